// SPDX-License-Identifier: Apache-2.0
//! Tests `--forwarding redirect`: packets in both directions bypass the kernel stack, except those that the stack must
//! handle, such as packets that exceed the MTU.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::core::model;
use npl_testkit::echo::Protocol;
use npl_testkit::packet::Packet;
use npl_testkit::poll;
use npl_testkit::topology::{Offload, Options};
use npl_testkit::traffic::{self, Direction, Load, Request, Transfer, UdpOptions, transfer, udp_exchange, udp_socket};

use super::firewall::load_rules;
use super::fragments::{reply_in_every_order, request_in_every_order};
use crate::lab::mapping;
use crate::wire;
use crate::world::{NODE_PORT, POD_PORT, World, is_emulated, load_rate};

/// Drops all forwarded packets: a packet that arrives has bypassed the forward chain.
pub(super) const DROP_FORWARDED: &str = "
table inet npl_test {
  chain forward {
    type filter hook forward priority filter; policy drop;
  }
}";

/// Counts ICMP time exceeded errors that a client receives.
const TIME_EXCEEDED_IS_COUNTED: &str = "
table inet npl_test {
  chain input {
    type filter hook input priority filter; policy accept;
    icmp type time-exceeded counter
  }
}";

/// A node port whose Pod port is closed.
const CLOSED: u16 = 61_050;

/// The time limit of each wait for a change in the kernel, far above the usual duration.
const LIMIT: Duration = Duration::from_secs(30);

fn bytes() -> u64 {
    if is_emulated() { 1 << 18 } else { 16 << 20 }
}

/// Creates a Node in redirect mode with two Pods.
pub(super) fn redirected() -> World {
    let mut world = World::new(2);
    world.follow(Forwarding::Redirect);
    world
}

/// Does the same as [`redirected`], with the Pods on a bridge, which many CNIs use.
pub(super) fn redirected_over_a_bridge() -> World {
    let mut world = World::new(2);
    let mut lines = vec![
        "link add cni0 type bridge forward_delay 0".to_owned(),
        "link set cni0 up".to_owned(),
        "addr add fe80::1/64 dev cni0 nodad".to_owned(),
    ];
    for (pod, _) in &world.pods {
        let (device, v4, v6) = (pod.host_device.name(), pod.addresses.v4, pod.addresses.v6);
        lines.push(format!("addr flush dev {device}\nlink set {device} master cni0"));
        lines.push(format!("route replace {v4}/32 dev cni0 scope link\nroute replace {v6}/128 dev cni0"));
    }
    world.node().ip(&lines.join("\n")).unwrap();
    world.node().sysctl("net/ipv4/conf/cni0/proxy_arp", "1").unwrap();
    world.node().sysctl("net/ipv4/neigh/cni0/proxy_delay", "0").unwrap();
    world.assert_answers();
    world.follow(Forwarding::Redirect);
    world
}

/// Asserts that requests over both protocols and families are answered, and that transfers in both directions are
/// complete.
#[track_caller]
pub(super) fn assert_served(world: &World) {
    for _ in 0..3 {
        world.assert_answers();
    }
    for frontend in world.frontends() {
        for direction in [Direction::Upload, Direction::Download] {
            assert_eq!(transfer(world.client(), frontend, direction, bytes()).unwrap().bytes, bytes());
        }
    }
}

#[test]
fn both_directions_bypass_the_stack() {
    let world = redirected();
    world.node().nft(DROP_FORWARDED).unwrap();
    assert_served(&world);
    let without = UdpOptions { checksum: false, ..UdpOptions::default() };
    let answer = traffic::udp_request(world.client(), world.frontend(), b"no checksum", without).unwrap().answer;
    assert_eq!((answer.pod.as_str(), answer.client.ip()), ("web-0", world.client_ip()));
}

#[test]
fn both_directions_bypass_the_stack_over_a_bridge() {
    let world = redirected_over_a_bridge();
    world.node().nft(DROP_FORWARDED).unwrap();
    assert_served(&world);
}

#[test]
fn redirected_transfers_are_complete_with_and_without_device_offloads() {
    let world = redirected();
    world.node().nft(DROP_FORWARDED).unwrap();
    for is_on in [false, true] {
        for device in world.path_devices() {
            device.set_offloads(&Offload::ALL, is_on).unwrap();
        }
        assert_served(&world);
    }
    for device in world.path_devices() {
        device.set_offloads(&[Offload::Tso, Offload::Gso], false).unwrap();
        device.set_offloads(&[Offload::Gro], true).unwrap();
    }
    assert_served(&world);
}

/// Fragments and ICMP errors must bypass the stack too. If the stack forwarded only fragments and ICMP errors of a
/// connection, a stateful firewall would know no connection for these packets, and would drop or masquerade them.
#[test]
fn fragments_and_icmp_errors_bypass_the_stack() {
    let mut world = redirected();
    let (frontend, backend) = mapping(model::Protocol::Udp, CLOSED, (world.pod().ip(), POD_PORT + 1).into(), 1);
    world.datapath().upsert_mapping(frontend, backend).unwrap();
    world.node().nft(DROP_FORWARDED).unwrap();
    for frontend in world.frontends() {
        for (question, answer) in [(4000, 512), (512, 4000), (4000, 4000)] {
            assert_eq!(udp_exchange(world.client(), frontend, question, answer).unwrap().pod, "web-0");
        }
    }
    let socket = udp_socket(world.client(), (world.node_ip(), CLOSED).into(), true).unwrap();
    let error = traffic::udp_ask(&socket, "hello").unwrap_err();
    let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    assert_eq!(kind, Some(ErrorKind::ConnectionRefused), "the Pod's port is closed: {error:#}");
}

/// Early fragments are passed to the host; when the first fragment arrives, their saved copies are redirected with it.
#[test]
fn fragments_bypass_the_stack_in_any_order() {
    let world = redirected();
    world.assert_answers();
    world.node().nft(DROP_FORWARDED).unwrap();
    assert_eq!(request_in_every_order(&world, world.frontends()), ["web-0"; 10]);
    reply_in_every_order(&world, &world.pod().host_device);
}

#[test]
fn fragments_bypass_the_stack_in_any_order_over_a_bridge() {
    let world = redirected_over_a_bridge();
    world.assert_answers();
    world.node().nft(DROP_FORWARDED).unwrap();
    assert_eq!(request_in_every_order(&world, world.frontends()), ["web-0"; 10]);
    reply_in_every_order(&world, &world.topology.node_device("cni0"));
}

/// Creates a Node in redirect mode with one Pod, whose route has a small MTU.
fn narrow() -> World {
    const NARROW: u32 = 1300;
    let mut world = World::new(1);
    let pod = world.pod().clone();
    let (v4, v6, device) = (pod.addresses.v4, pod.addresses.v6, pod.host_device.name());
    world
        .node()
        .ip(&format!("route replace {v4}/32 dev {device} scope link mtu {NARROW}\nroute replace {v6}/128 dev {device} mtu {NARROW}"))
        .unwrap();
    world.follow(Forwarding::Redirect);
    world
}

/// The first fragment exceeds the MTU, so the stack forwards it, and kernel conntrack waits for the other fragments.
/// Therefore, the last fragment must also be passed to the stack, although it does not exceed the MTU. In IPv6, the
/// client receives a "packet too big" error and sends smaller fragments.
#[test]
fn later_fragments_take_the_path_of_the_first_one() {
    let world = narrow();
    load_rules(&world);
    for server in world.frontends() {
        let exchange = || udp_exchange(world.client(), server, 2000, 512);
        let after_error = if server.is_ipv6() { exchange().ok() } else { None };
        let answer = after_error.map_or_else(exchange, Ok).unwrap();
        assert_eq!((answer.pod.as_str(), answer.received), ("web-0", 2000));
    }
}

/// The host must send the client a path MTU error, and packets that fit must be served in both directions.
#[test]
fn redirected_client_discovers_the_path_mtu() {
    let world = narrow();
    assert_served(&world);
    for node_ip in world.node_ips() {
        let has_learned =
            || world.client().ip(&format!("route get {node_ip}")).is_ok_and(|it| it.contains("mtu 1300")).then_some(());
        poll::until("the client's path MTU", LIMIT, has_learned).unwrap();
    }
}

/// When a Pod's route changes, the Pod's packets are redirected, or no longer redirected, as soon as the agent has
/// listed the routes. No request may use a cached next hop of an earlier route.
#[test]
fn redirect_follows_route_changes_of_a_pod() {
    let mut world = redirected();
    let pod = world.pod().clone();
    let (v4, v6, device) = (pod.addresses.v4, pod.addresses.v6, pod.host_device.name());
    let by_gateway = format!(
        "route replace {v4}/32 via {v4} dev {device} onlink\nroute replace {v6}/128 via {v6} dev {device} onlink"
    );
    let directly = format!("route replace {v4}/32 dev {device} scope link\nroute replace {v6}/128 dev {device}");
    let node = world.node().clone();
    let request = Request {
        protocol: Protocol::Udp,
        server: world.frontend(),
        pod: "web-0".to_owned(),
        client: world.client_ip(),
    };
    for _turn in 0..3 {
        node.ip(&by_gateway).unwrap();
        world.follow(Forwarding::Redirect);
        assert_eq!(world.datapath().redirected().unwrap().len(), 2, "packets must be redirected only to the other Pod");
        world.assert_answers();
        node.ip(&directly).unwrap();
        let per_second = if is_emulated() { 100 } else { 2000 };
        let load = Load::start(world.client(), per_second, vec![request.clone()]);
        let has_begun = || (load.report().total() > 0).then_some(());
        poll::until("the first reply", LIMIT, has_begun).unwrap();
        world.follow(Forwarding::Redirect);
        let report = load.stop();
        assert!(report.failures.is_empty(), "{report:?}");
        node.nft(DROP_FORWARDED).unwrap();
        world.assert_answers();
        node.nft("delete table inet npl_test").unwrap();
    }
}

/// A packet whose TTL expires must be passed to the host, which sends the time exceeded error.
#[test]
fn host_answers_a_packet_whose_ttl_expires() {
    let world = redirected();
    world.client().nft(TIME_EXCEEDED_IS_COUNTED).unwrap();
    let socket = udp_socket(world.client(), world.frontend(), true).unwrap();
    traffic::udp_ask(&socket, "far enough").unwrap();
    socket.set_ttl(1).unwrap();
    socket.send(b"not far enough").unwrap();
    let is_counted =
        || world.client().nft("list chain inet npl_test input").unwrap().contains("packets 1 ").then_some(());
    poll::until("the time exceeded error", LIMIT, is_counted).unwrap();
    socket.set_ttl(64).unwrap();
    traffic::udp_ask(&socket, "far enough again").unwrap();
}

/// No packet may be lost when the forwarding mode changes or the agent restarts.
#[test]
fn no_packet_is_lost_when_the_forwarding_mode_changes() {
    let mut world = redirected();
    world.node().set_liberal_tracking(true).unwrap();
    let requests = |world: &World| -> Vec<Request> {
        let to = |protocol, (server, client): (SocketAddr, IpAddr)| Request {
            protocol,
            server,
            pod: "web-0".to_owned(),
            client,
        };
        let endpoints = world.frontends().into_iter().zip(world.client_ips());
        endpoints.flat_map(|endpoints| [to(Protocol::Tcp, endpoints), to(Protocol::Udp, endpoints)]).collect()
    };
    let rate = 2 << 20;
    let size = if is_emulated() { 2 << 20 } else { 8 << 20 };
    let running = [Direction::Upload, Direction::Download]
        .map(|direction| Transfer::start(world.client(), world.frontend(), direction, size, rate).unwrap());
    let load = Load::start(world.client(), load_rate(), requests(&world));
    for share in 1..=8_u8 {
        running[0].wait_for_share(f64::from(share) / 10.0, LIMIT).unwrap();
        let modes = [Forwarding::Redirect, Forwarding::Stack, Forwarding::Offload];
        let forwarding = modes[usize::from(share) % modes.len()];
        if share == 5 {
            // The test opens the datapath again, as a restarted agent does.
            world.datapath = Some(world.open());
        }
        world.follow(forwarding);
    }
    for transfer in running {
        assert_eq!(transfer.join().unwrap().bytes, size);
    }
    let report = load.stop();
    assert!(report.failures.is_empty() && report.total() > 0, "{report:?}");
}

#[test]
fn redirected_requests_by_a_second_uplink_are_answered() {
    let mut world = World::with_options(1, Options { clients: 2, ..Options::default() });
    world.follow(Forwarding::Redirect);
    world.node().nft(DROP_FORWARDED).unwrap();
    for client in world.topology.clients() {
        let answer = traffic::tcp_request(&client.netns, (world.node_ip(), NODE_PORT).into(), "who?").unwrap();
        assert_eq!((answer.pod.as_str(), answer.client.ip()), ("web-0", client.addresses.v4.into()));
    }
}

/// In redirect mode, the stack must forward direct connections of clients to Pods, and must not change their packets.
#[test]
fn direct_connections_take_the_stack_in_redirect_mode() {
    let world = redirected();
    let direct = traffic::tcp_request(world.client(), (world.pod().ip(), POD_PORT).into(), "directly?").unwrap();
    assert_eq!((direct.pod.as_str(), direct.client.ip()), ("web-0", world.client_ip()));
    world.node().nft(DROP_FORWARDED).unwrap();
    assert!(traffic::tcp_connect(world.client(), (world.pod().ip(), POD_PORT).into()).is_err());
    world.assert_answers();
}

/// Another Pod sends datagrams with the address and port of the first Pod, in a flow whose replies are in the reply
/// cache. The programs must redirect only packets from the first Pod's own device: the stack forwards the forged
/// datagrams, and FORWARD rules apply to them.
#[test]
fn forged_replies_of_another_pod_are_not_redirected() {
    let world = redirected();
    let (other, _server) = &world.pods[1];
    let device = other.host_device.name();
    for setting in ["all", device] {
        world.node().sysctl(&format!("net/ipv4/conf/{setting}/rp_filter"), "0").unwrap();
    }
    let chain = "chain forward { type filter hook forward priority filter; policy accept;";
    let rule = format!("iifname {device} counter name forged drop");
    world.node().nft(&format!("table inet npl_test {{\ncounter forged {{}}\n{chain}\n{rule}\n}}\n}}")).unwrap();
    let counted = || world.node().packets_counted("inet npl_test forged").unwrap();
    let ends = world.frontends().into_iter().zip(world.client_ips()).zip(world.pod().ips());
    for ((server, client_ip), pod_ip) in ends {
        let socket = udp_socket(world.client(), server, true).unwrap();
        let ask = |question| traffic::udp_ask(&socket, question).unwrap().pod;
        assert_eq!(["first", "second", "third"].map(ask), ["web-0"; 3]);
        let client = SocketAddr::new(client_ip, socket.local_addr().unwrap().port());
        let family = if server.is_ipv4() { model::Family::V4 } else { model::Family::V6 };
        let wire = wire::open_for(family, &other.device, &other.host_device);
        let mut forged = Packet::udp((pod_ip, POD_PORT).into(), client, b"forged");
        forged.ethernet = Some(wire.ethernet());
        let before = counted();
        wire.send(&forged.build()).unwrap();
        poll::until("the forged datagram in the stack", LIMIT, || (counted() > before).then_some(())).unwrap();
        assert_eq!(ask("fourth"), "web-0");
    }
}

#[test]
fn removed_pod_leaves_no_redirect_state_and_others_are_served() {
    let mut world = redirected();
    let gone = world.pods.pop().unwrap();
    world.topology.remove_pod(&gone.0.name).unwrap();
    world.follow(Forwarding::Redirect);
    world.node().nft(DROP_FORWARDED).unwrap();
    world.assert_answers();
    assert_eq!(world.datapath().redirected().unwrap().len(), 2, "packets must be redirected only to the other Pod");
    let hooks = world.datapath().hooks.attached_hooks().unwrap();
    let attached: BTreeSet<u32> = hooks.into_iter().map(|(ifindex, _)| ifindex).collect();
    assert_eq!(attached.len(), 2, "there must be programs only on the uplink and on the other Pod's device");
    world.follow(Forwarding::Stack);
    assert!(world.datapath().redirected().unwrap().is_empty());
}
