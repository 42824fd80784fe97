// SPDX-License-Identifier: Apache-2.0
//! Beside the rules and routes of others: one set of requests and transfers passes on a Node of each CNI.
//!
//! Rules are written as nftables takes them, whatever the CNI itself uses: to the kernel they are the same hooks, verdicts
//! and marks.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::core::model::{Family, Protocol};
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
use crate::world::{NODE_PORT, POD_PORT, World, is_emulated};

const FLANNEL: &str = include_str!("flannel.nft");
const CALICO: &str = include_str!("calico.nft");
const ANTREA: &str = include_str!("antrea.nft");
const KUBE_ROUTER: &str = include_str!("kube-router.nft");
const AWS_VPC: &str = include_str!("aws-vpc.nft");
const KUBE_PROXY: &str = include_str!("kube-proxy.nft");

/// A node port whose Pod port nobody listens on.
const CLOSED: u16 = 61_050;

/// Where somebody outside of the cluster listens.
const OUTSIDE: u16 = 9090;

/// What a Pod's link takes, less than the client's and the Node's.
const SMALL_LINK: u32 = 1400;

/// A port of the client's that has no connection.
const UNOPENED: u16 = 20_000;

/// Far longer than a packet needs to come to a rule.
const LIMIT: Duration = Duration::from_secs(5);

/// How soon the guard looks at its table again.
const RESYNC: Duration = Duration::from_millis(200);

/// How long nothing comes where nothing can.
const SILENCE: Duration = Duration::from_millis(500);

/// How a client comes to a Pod.
struct Way {
    pod: String,
    server: SocketAddr,
    client: IpAddr,
}

/// To the first Pod, in each family.
fn to_first_pod(world: &World) -> Vec<Way> {
    let ways = world.frontends().into_iter().zip(world.client_ips());
    ways.map(|(server, client)| Way { pod: world.pod().name.clone(), server, client }).collect()
}

/// To every Pod, in the one family that a cluster of the AWS VPC CNI has.
fn to_every_pod_by_v4(world: &World) -> Vec<Way> {
    let way = |(node_port, (pod, _)): (u16, &(Pod, EchoServer))| Way {
        pod: pod.name.clone(),
        server: (world.node_ip(), node_port).into(),
        client: world.client_ip(),
    };
    (NODE_PORT..).zip(&world.pods).map(way).collect()
}

/// Two Pods on a Node with these rules.
fn node_with(rules: &[&str], clients: u8) -> World {
    let mut world = World::with_options(2, Options { clients, ..Options::default() });
    world.node().nft(&rules.concat()).unwrap();
    let (frontend, backend) = mapping(Protocol::Tcp, CLOSED, (world.pod().ip(), POD_PORT + 1).into(), 1);
    world.datapath().upsert_mapping(frontend, backend).unwrap();
    world
}

/// By the host's stack, past it, and past it as long as it lets flows through.
fn everything_passes_either_way(world: &mut World, ways: fn(&World) -> Vec<Way>) {
    world.node().set_liberal_tracking(false).unwrap();
    for forwarding in [Forwarding::Stack, Forwarding::Redirect, Forwarding::Offload] {
        if forwarding == Forwarding::Offload {
            world.node().set_liberal_tracking(true).unwrap();
        }
        world.follow(forwarding);
        everything_passes(world, &ways(world));
        small_links_are_told(world, forwarding, ways);
    }
    // Past the stack no rule is asked.
    for forwarding in [Forwarding::Offload, Forwarding::Stack] {
        world.follow(forwarding);
        what_is_invalid_is_dropped(world, &ways(world));
    }
}

/// What passes on every Node, whose rules hide its Pods behind it.
fn everything_passes(world: &World, ways: &[Way]) {
    let size = transfer_size();
    for Way { pod, server, client } in ways {
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
    assert_eq!(refused(CLOSED), ErrorKind::ConnectionRefused, "by the Pod itself");
    assert_eq!(refused(CLOSED + 1), ErrorKind::ConnectionRefused, "by the host");
    nothing_was_invalid(world);
    for Way { server, client, .. } in ways {
        assert_eq!(seen_outside_as(world, *client), server.ip(), "the rules are there");
    }
}

/// A client whose packets are too large for the Pods' links learns it, and of the address that it knows.
fn small_links_are_told(world: &mut World, forwarding: Forwarding, ways: fn(&World) -> Vec<Way>) {
    let set_mtu = |world: &World, mtu| world.pods.iter().for_each(|(pod, _)| pod.host_device.set_mtu(mtu).unwrap());
    set_mtu(world, SMALL_LINK);
    world.follow(forwarding);
    for Way { server, .. } in ways(world) {
        let size = transfer_size();
        assert_eq!(transfer(world.client(), server, Direction::Upload, size).unwrap().bytes, size);
        let route = world.client().ip(&format!("route get {}", server.ip())).unwrap();
        assert!(route.contains(&format!("mtu {SMALL_LINK}")), "{route}");
    }
    nothing_was_invalid(world);
    set_mtu(world, Options::default().mtu);
    world.follow(forwarding);
    for family in ["-4", "-6"] {
        let mut forget = world.client().command("ip").unwrap();
        tools::output(forget.args([family, "route", "flush", "cache"])).unwrap();
    }
}

fn transfer_size() -> u64 {
    if is_emulated() { 1 << 17 } else { 4 << 20 }
}

/// No rule has met a packet that belongs to no connection, or one that nobody allowed.
fn nothing_was_invalid(world: &World) {
    let dropped = dropping_rules(world);
    assert!(dropped.iter().all(|(_, packets)| *packets == 0), "{dropped:?}");
}

/// Every rule that drops, as far as it says which packets, and how many it has met.
fn dropping_rules(world: &World) -> Vec<(String, u64)> {
    let rules = world.node().nft("list ruleset").unwrap();
    let counted = |line: &str| {
        let (rule, after) = line.split_once("counter packets ")?;
        Some((rule.trim().to_owned(), after.split_once(' ')?.0.parse().unwrap()))
    };
    rules.lines().filter_map(counted).collect()
}

/// What is sent is dropped by one of these rules: a test of which they meet nothing says something only where they would.
#[track_caller]
fn is_dropped_by(world: &World, is_meant: fn(&str) -> bool, send: impl FnOnce()) {
    let dropped =
        || -> u64 { dropping_rules(world).iter().filter(|(rule, _)| is_meant(rule)).map(|(_, packets)| packets).sum() };
    let before = dropped();
    send();
    poll::until("a dropped packet", LIMIT, || (dropped() > before).then_some(())).unwrap();
    assert_eq!(dropped(), before + 1);
}

/// The end of a connection that nobody has opened.
fn what_is_invalid_is_dropped(world: &World, ways: &[Way]) {
    for Way { server, client, .. } in ways {
        let ends = world.topology.client();
        let wire = wire::open_for(Family::of(*client), &ends.device, &ends.uplink);
        let mut reset = Packet::tcp((*client, UNOPENED).into(), *server, tcp_flags::RST, b"");
        reset.ethernet = Some(wire.ethernet());
        is_dropped_by(world, |rule| rule == "ct state invalid", || assert!(wire.send(&reset.build()).is_ok()));
    }
}

/// As whom somebody outside, at this address, sees the first Pod.
fn seen_outside_as(world: &World, address: IpAddr) -> IpAddr {
    let _outside = EchoServer::start_in(world.client(), "outside", &[OUTSIDE]).unwrap();
    let answer = tcp_request(&world.pod().netns, (address, OUTSIDE).into(), "as whom?").unwrap();
    assert_eq!(answer.pod, "outside");
    answer.client.ip()
}

/// How a client is turned away.
fn refusal(client: &Netns, server: SocketAddr) -> ErrorKind {
    let error = tcp_connect(client, server).unwrap_err();
    error.downcast_ref::<std::io::Error>().unwrap().kind()
}

#[test]
fn everything_passes_beside_flannel() {
    everything_passes_either_way(&mut node_with(&[FLANNEL, KUBE_PROXY], 1), to_first_pod);
}

#[test]
fn everything_passes_beside_calico_and_its_policy_holds() {
    let mut world = node_with(&[CALICO, KUBE_PROXY], 2);
    everything_passes_either_way(&mut world, to_first_pod);
    for forwarding in [Forwarding::Offload, Forwarding::Stack] {
        world.follow(forwarding);
        for server in world.frontends() {
            let stranger = udp_socket(&world.topology.clients()[1].netns, server, true).unwrap();
            is_dropped_by(&world, str::is_empty, || assert!(stranger.send(b"may I?").is_ok()));
        }
    }
}

#[test]
fn everything_passes_beside_antrea_with_strict_reverse_paths() {
    let mut world = node_with(&[ANTREA, KUBE_PROXY], 1);
    for device in ["all", "default", "eth0", world.pod().host_device.name()] {
        world.node().sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), "1").unwrap();
    }
    everything_passes_either_way(&mut world, to_first_pod);
}

/// The Node speaks in the Pod's place, and clients learn it of the address that they know.
#[track_caller]
fn policy_refuses_others(world: &World) {
    let second_pod = (world.node_ip(), NODE_PORT + 1).into();
    assert_eq!(refusal(world.client(), second_pod), ErrorKind::ConnectionRefused);
    let stranger = &world.topology.clients()[1].netns;
    for server in world.frontends() {
        assert_eq!(refusal(stranger, server), ErrorKind::ConnectionRefused, "{server}");
    }
}

#[test]
fn everything_passes_beside_kube_router_and_its_policy_holds_wherever_it_is_asked() {
    let mut world = node_with(&[KUBE_ROUTER, KUBE_PROXY], 2);
    policy_refuses_others(&world);
    everything_passes_either_way(&mut world, to_first_pod);
    policy_refuses_others(&world);
}

/// A Node of the AWS VPC CNI: the second Pod's own packets leave by the second interface, where nobody expects the Node's
/// address.
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

/// The guard has found the rules for a mark and for the second Pod, and has its own in place.
fn guarded(mut world: World) -> World {
    world.guard = Some(world.node().run(|| Guard::start(GuardMode::Auto, RESYNC)).unwrap());
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
fn everything_passes_beside_the_aws_vpc_cni_as_the_guard_marks_where_requests_came_in() {
    let mut world = guarded(node_with_aws_vpc(&[AWS_VPC, KUBE_PROXY]));
    everything_passes_either_way(&mut world, to_every_pod_by_v4);
}

/// Counts what the guard has marked and what it has not, as it comes in by each interface.
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

/// Whoever asks a Pod directly comes in by the Pod's own interface, and is answered there.
#[test]
fn who_asks_a_pod_directly_by_its_own_interface_is_not_marked() {
    let world = guarded(node_with_aws_vpc(&[AWS_VPC, KUBE_PROXY]));
    world.node().nft(MARKED).unwrap();
    let count = |name: &str| world.node().packets_counted(&format!("inet npl_test {name}")).unwrap();
    let second = world.pods[1].0.ip();
    let neighbour = &world.topology.clients()[1];
    assert_eq!(tcp_request(&neighbour.netns, (second, POD_PORT).into(), "directly?").unwrap().pod, "web-1");
    assert_eq!((count("first_marked"), count("second_marked")), (0, 0));
    assert!(count("second_unmarked") > 0, "it came by the second interface");
    assert_eq!(tcp_request(world.client(), (world.node_ip(), NODE_PORT + 1).into(), "who?").unwrap().pod, "web-1");
    assert!(count("first_marked") > 0);
    assert_eq!(count("second_marked"), 0);
}

/// A conversation that began before the rule was there goes on by the right interface with its next request.
#[test]
fn datagrams_that_strayed_before_the_guard_was_there_are_answered_once_it_is() {
    let world = node_with_aws_vpc(&[AWS_VPC, KUBE_PROXY]);
    let socket = udp_socket(world.client(), (world.node_ip(), NODE_PORT + 1).into(), true).unwrap();
    socket.set_read_timeout(Some(SILENCE)).unwrap();
    let mut answer = [0; 512];
    let mut ask = || {
        socket.send(b"who?").unwrap();
        poll::uninterrupted(|| socket.recv(&mut answer))
    };
    assert!(ask().is_err(), "the answer leaves by the second interface");
    let _guarded = guarded(world);
    poll::until("an answer", LIMIT, || ask().ok()).unwrap();
}

/// Counts what comes from the Node's first address, which has no business at the second interface.
const ASTRAY: &str = "
table inet npl_test {
  counter astray {}
  chain prerouting {
    type filter hook prerouting priority raw;
    ip saddr 192.0.2.10 tcp sport 61001 counter name astray
  }
}";

#[test]
fn without_that_mark_the_stacks_replies_leave_by_the_pods_own_interface_and_redirected_ones_do_not() {
    let mut world = node_with_aws_vpc(&[AWS_VPC, KUBE_PROXY]);
    let beyond = world.topology.clients()[1].netns.clone();
    beyond.nft(ASTRAY).unwrap();
    let second_pod = (world.node_ip(), NODE_PORT + 1).into();
    let mut astray = 0;
    for forwarding in [Forwarding::Stack, Forwarding::Redirect, Forwarding::Offload] {
        world.node().set_liberal_tracking(true).unwrap();
        world.follow(forwarding);
        let answer = tcp_request(world.client(), second_pod, "who are you?");
        let now = beyond.packets_counted("inet npl_test astray").unwrap();
        let is_redirected = forwarding == Forwarding::Redirect;
        assert_eq!((answer.is_ok(), now == astray), (is_redirected, is_redirected), "{forwarding:?}: {answer:?}");
        astray = now;
    }
}
