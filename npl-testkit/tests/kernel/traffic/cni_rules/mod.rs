// SPDX-License-Identifier: Apache-2.0
//! Tests NPL on a Node with the rules and routes of a CNI. The same requests and transfers must succeed with each CNI's
//! rules.
//!
//! The rules are written for nftables, even if the CNI uses iptables: the kernel's hooks, verdicts and marks are the
//! same for both.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::core::model::{Family, Protocol};
use npl_agent::core::repairs::RepairJournal;
use npl_agent::nft_guard::{self, Guard, GuardMode};
use npl_testkit::echo::EchoServer;
use npl_testkit::netns::Netns;
use npl_testkit::packet::{Packet, tcp_flags};
use npl_testkit::topology::{Options, Pod};
use npl_testkit::traffic::{
    Direction, UdpOptions, tcp_connect, tcp_request, transfer, udp_exchange, udp_request, udp_socket,
};
use npl_testkit::{poll, tools};

use crate::lab::mapping;
use crate::wire;
use crate::world::{NODE_PORT, POD_PORT, World, is_emulated, port_range};

const FLANNEL: &str = include_str!("flannel.nft");
const CALICO: &str = include_str!("calico.nft");
const ANTREA: &str = include_str!("antrea.nft");
const KUBE_ROUTER: &str = include_str!("kube-router.nft");
const AWS_VPC: &str = include_str!("aws-vpc.nft");
const KUBE_PROXY: &str = include_str!("kube-proxy.nft");

/// A node port whose Pod port is closed.
const CLOSED: u16 = 61_050;

/// The port of a server outside of the cluster.
const OUTSIDE: u16 = 9090;

/// MTU of a Pod's link, smaller than that of the client's and the Node's links.
const SMALL_LINK: u32 = 1400;

/// A client port without a connection.
const UNOPENED: u16 = 20_000;

/// Time limit for a packet to reach a rule, far above the usual duration.
const LIMIT: Duration = Duration::from_secs(30);

/// Interval in which the guard checks its table.
const RESYNC: Duration = Duration::from_millis(200);

/// A NAT address, with the Pod and the client's source address that are expected.
struct Target {
    pod: String,
    server: SocketAddr,
    client: IpAddr,
}

/// Returns the first Pod's NAT addresses, one of each family.
fn to_first_pod(world: &World) -> Vec<Target> {
    let targets = world.frontends().into_iter().zip(world.client_ips());
    targets.map(|(server, client)| Target { pod: world.pod().name.clone(), server, client }).collect()
}

/// Returns every Pod's IPv4 NAT address: a cluster with the AWS VPC CNI has one family.
fn to_every_pod_by_v4(world: &World) -> Vec<Target> {
    let target = |(node_port, (pod, _)): (u16, &(Pod, EchoServer))| Target {
        pod: pod.name.clone(),
        server: (world.node_ip(), node_port).into(),
        client: world.client_ip(),
    };
    (NODE_PORT..).zip(&world.pods).map(target).collect()
}

/// Creates a Node with two Pods and these rules.
fn node_with(rules: &[&str], clients: u8) -> World {
    let mut world = World::with_options(2, Options { clients, ..Options::default() });
    world.node().nft(&rules.concat()).unwrap();
    let (frontend, backend) = mapping(Protocol::Tcp, CLOSED, (world.pod().ip(), POD_PORT + 1).into(), 1);
    world.datapath().upsert_mapping(frontend, backend).unwrap();
    world
}

/// Runs the checks in stack, redirect and offload mode.
fn assert_passes_in_every_mode(world: &mut World, targets: fn(&World) -> Vec<Target>) {
    world.node().set_liberal_tracking(false).unwrap();
    for forwarding in [Forwarding::Stack, Forwarding::Redirect, Forwarding::Offload] {
        if forwarding == Forwarding::Offload {
            world.node().set_liberal_tracking(true).unwrap();
        }
        switch(world, forwarding);
        assert_passes(world, forwarding, &targets(world));
        assert_path_mtu_discovery(world, forwarding, targets);
    }
    // Redirect is left out here, because redirected packets bypass the rules.
    for forwarding in [Forwarding::Offload, Forwarding::Stack] {
        switch(world, forwarding);
        assert_invalid_is_dropped(world, &targets(world));
    }
}

/// Applies the forwarding mode, or the changed MTU of a device, after all connections are closed. Otherwise, a rule
/// would drop the FIN of an open connection. While the agent changes the next hops, the FIN would pass through the
/// stack. Kernel conntrack has no entry for a redirected connection, and would classify the FIN as invalid.
fn switch(world: &mut World, forwarding: Forwarding) {
    world.wait_for_closed_connections();
    world.follow(forwarding);
}

/// Sends all requests and transfers that must succeed on every Node.
fn assert_passes(world: &World, forwarding: Forwarding, targets: &[Target]) {
    let size = transfer_size();
    for Target { pod, server, client } in targets {
        let expected = (pod.as_str(), *client);
        let ask = |options| udp_request(world.client(), *server, b"and you?", options).unwrap().answer;
        for _ in 0..3 {
            let tcp = tcp_request(world.client(), *server, "who are you?").unwrap();
            assert_eq!((tcp.pod.as_str(), tcp.client.ip()), expected);
            let udp = ask(UdpOptions::default());
            assert_eq!((udp.pod.as_str(), udp.client.ip()), expected);
        }
        for direction in [Direction::Upload, Direction::Download] {
            assert_eq!(transfer(world.client(), *server, direction, size).unwrap().bytes, size);
        }
        for (question, answer) in [(4000, 512), (512, 4000)] {
            let answer = udp_exchange(world.client(), *server, question, answer).unwrap();
            assert_eq!((answer.pod.as_str(), answer.client.ip()), expected);
        }
        if server.is_ipv4() {
            let answer = ask(UdpOptions { checksum: false, ..UdpOptions::default() });
            assert_eq!((answer.pod.as_str(), answer.client.ip()), expected);
        }
    }
    let refused = |node_port| refusal(world.client(), (world.node_ip(), node_port).into());
    assert_eq!(refused(CLOSED), ErrorKind::ConnectionRefused, "the Pod must refuse the connection");
    assert_eq!(refused(CLOSED + 1), ErrorKind::ConnectionRefused, "the host must refuse the connection");
    assert_nothing_was_dropped(world, forwarding);
    for Target { server, client, .. } in targets {
        assert_eq!(source_seen_outside(world, *client), server.ip(), "the rules must masquerade the Pod");
    }
}

/// Asserts that a client learns the path MTU when its packets exceed the MTU of a Pod's link. For this, the client must
/// receive an ICMP error about a packet to the NAT address.
fn assert_path_mtu_discovery(world: &mut World, forwarding: Forwarding, targets: fn(&World) -> Vec<Target>) {
    let set_mtu = |world: &World, mtu| world.pods.iter().for_each(|(pod, _)| pod.host_device.set_mtu(mtu).unwrap());
    set_mtu(world, SMALL_LINK);
    switch(world, forwarding);
    for Target { server, .. } in targets(world) {
        let size = transfer_size();
        assert_eq!(transfer(world.client(), server, Direction::Upload, size).unwrap().bytes, size);
        let route = world.client().ip(&format!("route get {}", server.ip())).unwrap();
        assert!(route.contains(&format!("mtu {SMALL_LINK}")), "{route}");
    }
    assert_nothing_was_dropped(world, forwarding);
    set_mtu(world, Options::default().mtu);
    switch(world, forwarding);
    for family in ["-4", "-6"] {
        let mut flush = world.client().command("ip").unwrap();
        tools::output(flush.args([family, "route", "flush", "cache"])).unwrap();
    }
}

fn transfer_size() -> u64 {
    if is_emulated() { 1 << 17 } else { 4 << 20 }
}

/// Asserts that no rule has dropped an invalid or forbidden packet.
#[track_caller]
fn assert_nothing_was_dropped(world: &World, forwarding: Forwarding) {
    let dropped = dropping_rules(world);
    assert!(dropped.iter().all(|(_, packets)| *packets == 0), "in {forwarding:?} mode: {dropped:?}");
}

/// Returns every rule that has an inline counter, with its number of packets. In these rulesets, all such rules drop
/// packets.
fn dropping_rules(world: &World) -> Vec<(String, u64)> {
    let rules = world.node().nft("list ruleset").unwrap();
    let counted = |line: &str| {
        let (rule, after) = line.split_once("counter packets ")?;
        Some((rule.trim().to_owned(), after.split_once(' ')?.0.parse().unwrap()))
    };
    rules.lines().filter_map(counted).collect()
}

/// Asserts that a rule that `is_expected` selects drops the packet that `send` sends. This proves that the counters
/// work: in other tests, a count of zero means that no packet was dropped.
#[track_caller]
fn assert_dropped_by(world: &World, is_expected: fn(&str) -> bool, send: impl FnOnce()) {
    let dropped = || -> u64 {
        dropping_rules(world).iter().filter(|(rule, _)| is_expected(rule)).map(|(_, packets)| packets).sum()
    };
    let before = dropped();
    send();
    poll::until("a dropped packet", LIMIT, || (dropped() > before).then_some(())).unwrap();
    assert_eq!(dropped(), before + 1);
}

/// Sends a RST of a connection that does not exist, and asserts that the rules drop it.
fn assert_invalid_is_dropped(world: &World, targets: &[Target]) {
    for Target { server, client, .. } in targets {
        let link = world.topology.client();
        let wire = wire::open_for(Family::of(*client), &link.device, &link.uplink);
        let mut reset = Packet::tcp((*client, UNOPENED).into(), *server, tcp_flags::RST, b"");
        reset.ethernet = Some(wire.ethernet());
        assert_dropped_by(world, |rule| rule == "ct state invalid", || assert!(wire.send(&reset.build()).is_ok()));
    }
}

/// Returns the first Pod's source address, as a server outside of the cluster sees it.
fn source_seen_outside(world: &World, address: IpAddr) -> IpAddr {
    let _outside = EchoServer::start_in(world.client(), "outside", &[OUTSIDE]).unwrap();
    let answer = tcp_request(&world.pod().netns, (address, OUTSIDE).into(), "which source?").unwrap();
    assert_eq!(answer.pod, "outside");
    answer.client.ip()
}

/// Returns the error with which a client's connection fails.
fn refusal(client: &Netns, server: SocketAddr) -> ErrorKind {
    let error = tcp_connect(client, server).unwrap_err();
    error.downcast_ref::<std::io::Error>().unwrap().kind()
}

#[test]
fn npl_works_with_flannel_rules() {
    assert_passes_in_every_mode(&mut node_with(&[FLANNEL, KUBE_PROXY], 1), to_first_pod);
}

#[test]
fn npl_works_with_calico_rules_and_its_policy_applies() {
    let mut world = node_with(&[CALICO, KUBE_PROXY], 2);
    assert_passes_in_every_mode(&mut world, to_first_pod);
    for forwarding in [Forwarding::Offload, Forwarding::Stack] {
        world.follow(forwarding);
        for server in world.frontends() {
            let other_client = udp_socket(&world.topology.clients()[1].netns, server, true).unwrap();
            assert_dropped_by(&world, str::is_empty, || assert!(other_client.send(b"forbidden").is_ok()));
        }
    }
}

#[test]
fn npl_works_with_antrea_rules_and_strict_reverse_path_filter() {
    let mut world = node_with(&[ANTREA, KUBE_PROXY], 1);
    for device in ["all", "default", "eth0", world.pod().host_device.name()] {
        world.node().sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), "1").unwrap();
    }
    assert_passes_in_every_mode(&mut world, to_first_pod);
}

/// Asserts that the policy rejects the allowed client's connection to the second Pod, and another client's connections
/// to the first Pod. The client's connection fails only if the host's ICMP error quotes the address to which the client
/// has sent.
#[track_caller]
fn assert_policy(world: &World) {
    let second_pod = (world.node_ip(), NODE_PORT + 1).into();
    assert_eq!(refusal(world.client(), second_pod), ErrorKind::ConnectionRefused);
    let other_client = &world.topology.clients()[1].netns;
    for server in world.frontends() {
        assert_eq!(refusal(other_client, server), ErrorKind::ConnectionRefused, "{server}");
    }
}

#[test]
fn npl_works_with_kube_router_rules_and_its_policy_applies_in_the_stack() {
    let mut world = node_with(&[KUBE_ROUTER, KUBE_PROXY], 2);
    assert_policy(&world);
    assert_passes_in_every_mode(&mut world, to_first_pod);
    assert_policy(&world);
}

/// Creates a Node with the policy routing of the AWS VPC CNI, and with these netfilter rules. The second Pod's packets
/// leave through the second interface, where the network does not accept the Node's address as source.
fn node_with_aws_vpc(rules: &[&str]) -> World {
    let world = node_with(rules, 2);
    let second = world.pods[1].0.ip();
    world
        .node()
        .ip(&format!(
            "route add default via 203.0.113.2 dev eth1 table 100
rule add to 10.244.0.0/24 lookup main priority 512
rule add fwmark 0x80/0x80 lookup main priority 1024
rule add from {second} lookup 100 priority 1536"
        ))
        .unwrap();
    for device in ["all", "eth0", "eth1"] {
        world.node().sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), "2").unwrap();
    }
    world
}

/// Starts the nftables guard. Waits until the guard has found the routing rules of the mark and of the second Pod, and
/// has installed its own rules.
fn guarded(mut world: World) -> World {
    world.guard = Some(
        world.node().run(|| Guard::start(GuardMode::Auto, port_range(), RESYNC, RepairJournal::default())).unwrap(),
    );
    world.follow(Forwarding::Stack);
    let second = format!("{} . 6 . {POD_PORT}", world.pods[1].0.ip());
    let is_there = || {
        let table = world.node().nft_table(nft_guard::TABLE)?;
        (table.contains("ct mark set") && table.contains(&second)).then_some(())
    };
    poll::until("the guard's mark", LIMIT, is_there).unwrap();
    world
}

#[test]
fn npl_works_with_aws_vpc_cni_rules_and_the_guards_mark() {
    let mut world = guarded(node_with_aws_vpc(&[AWS_VPC, KUBE_PROXY]));
    assert_passes_in_every_mode(&mut world, to_every_pod_by_v4);
}

/// Counts packets of connections with and without the guard's mark, by the interface on which the packets arrive.
const MARKED: &str = "
table inet npl_test {
  counter first_marked {}
  counter second_marked {}
  counter second_unmarked {}
  chain prerouting {
    type filter hook prerouting priority mangle + 1;
    iifname eth0 ip daddr 10.244.0.0/16 ct mark & 0x80 == 0x80 counter name first_marked
    iifname eth1 ip daddr 10.244.0.0/16 ct mark & 0x80 == 0x80 counter name second_marked
    iifname eth1 ip daddr 10.244.0.0/16 ct mark & 0x80 == 0 counter name second_unmarked
  }
}";

/// If a direct request to a Pod arrives on the Pod's own interface, its reply must leave through the same interface, so
/// the guard must not mark the connection.
#[test]
fn direct_request_through_the_pods_own_interface_is_not_marked() {
    let world = guarded(node_with_aws_vpc(&[AWS_VPC, KUBE_PROXY]));
    world.node().nft(MARKED).unwrap();
    let count = |name: &str| world.node().packets_counted(&format!("inet npl_test {name}")).unwrap();
    let second = world.pods[1].0.ip();
    let second_client = &world.topology.clients()[1];
    assert_eq!(tcp_request(&second_client.netns, (second, POD_PORT).into(), "directly?").unwrap().pod, "web-1");
    assert_eq!((count("first_marked"), count("second_marked")), (0, 0));
    assert!(count("second_unmarked") > 0, "the request must arrive on the second interface");
    assert_eq!(tcp_request(world.client(), (world.node_ip(), NODE_PORT + 1).into(), "who?").unwrap().pod, "web-1");
    assert!(count("first_marked") > 0);
    assert_eq!(count("second_marked"), 0);
}

/// If a UDP flow started before the guard's rule existed, the flow's next request must set the missing mark.
#[test]
fn misrouted_udp_flow_is_corrected_once_the_guard_starts() {
    let world = node_with_aws_vpc(&[AWS_VPC, KUBE_PROXY]);
    let second_client = world.topology.clients()[1].netns.clone();
    second_client.nft(MISROUTED).unwrap();
    let socket = udp_socket(world.client(), (world.node_ip(), NODE_PORT + 1).into(), true).unwrap();
    socket.set_nonblocking(true).unwrap();
    let mut answer = [0; 512];
    socket.send(b"who?").unwrap();
    // Without the guard, the reply leaves through the second interface and gets lost.
    let is_misrouted = || (second_client.packets_counted("inet npl_test misrouted").unwrap() > 0).then_some(());
    poll::until("the reply on the second interface", LIMIT, is_misrouted).unwrap();
    assert_eq!(socket.recv(&mut answer).unwrap_err().kind(), ErrorKind::WouldBlock);
    let _guarded = guarded(world);
    let is_answered = || {
        socket.send(b"who?").unwrap();
        socket.recv(&mut answer).ok()
    };
    poll::until("a reply", LIMIT, is_answered).unwrap();
}

/// Counts packets from the Node's first address, which must not arrive on the second interface.
const MISROUTED: &str = "
table inet npl_test {
  counter misrouted {}
  chain prerouting {
    type filter hook prerouting priority raw;
    ip saddr 192.0.2.10 meta l4proto { tcp, udp } th sport 61001 counter name misrouted
  }
}";

#[test]
fn replies_leave_by_the_pods_own_interface_without_the_mark_unless_redirected() {
    let mut world = node_with_aws_vpc(&[AWS_VPC, KUBE_PROXY]);
    let second_client = world.topology.clients()[1].netns.clone();
    second_client.nft(MISROUTED).unwrap();
    let second_pod = (world.node_ip(), NODE_PORT + 1).into();
    let misrouted = || second_client.packets_counted("inet npl_test misrouted").unwrap();
    for forwarding in [Forwarding::Stack, Forwarding::Redirect, Forwarding::Offload] {
        world.node().set_liberal_tracking(true).unwrap();
        world.follow(forwarding);
        // The count is read after the mode has changed, because the rule also counts the SYN-ACKs that the Pod still
        // retransmits on the connection of the previous mode.
        let before = misrouted();
        let answer = tcp_request(world.client(), second_pod, "who are you?");
        let is_redirected = forwarding == Forwarding::Redirect;
        let none_is_misrouted = misrouted() == before;
        assert_eq!((answer.is_ok(), none_is_misrouted), (is_redirected, is_redirected), "{forwarding:?}: {answer:?}");
    }
}
