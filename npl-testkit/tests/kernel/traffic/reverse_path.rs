// SPDX-License-Identifier: Apache-2.0
//! Tests reverse path filters, with a Pod whose policy routing sends its packets through another uplink than the one on
//! which requests arrive.

use std::net::SocketAddr;
use std::time::Duration;

use npl_agent::core::devices::redirect::Forwarding;
use npl_testkit::traffic::{UdpOptions, tcp_connect, tcp_request, udp_request, udp_socket};
use npl_testkit::{poll, tools};

use super::uplinks::{assert_answered_by, joined_clients};
use crate::world::World;

/// Time limit for the kernel to count a packet, far above the usual duration.
const LIMIT: Duration = Duration::from_secs(30);

/// Values of `rp_filter`.
const STRICT: &str = "1";
const LOOSE: &str = "2";

/// Creates a Node on which the first client's requests arrive on the first uplink, and the Pod's packets leave through
/// the second one.
fn pod_with_a_table_of_its_own() -> World {
    let world = joined_clients();
    let routes = "route add default via 203.0.113.2 dev eth1 table 100
route add default via 2001:db8:0:3::2 dev eth1 table 100";
    world.node().ip(routes).unwrap();
    for (family, pod_ip) in ["-4", "-6"].into_iter().zip(world.pod().ips()) {
        let mut add = world.node().command("ip").unwrap();
        tools::output(add.args([family, "rule", "add", "from", &pod_ip.to_string(), "lookup", "100"])).unwrap();
    }
    world
}

fn set_rp_filter(world: &World, value: &str) {
    for device in ["all", "eth0", "eth1", world.pod().host_device.name()] {
        world.node().sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), value).unwrap();
    }
}

/// Number of packets that the Node's reverse path filter has dropped.
fn dropped(world: &World) -> u64 {
    world.node().counter("TcpExt", "IPReversePathFilter").unwrap()
}

/// Asserts that the kernel drops IPv4 requests of both protocols before the Pod receives them. IPv6 requests must be
/// answered, because the kernel has no reverse path filter for IPv6.
#[track_caller]
fn assert_requests_are_dropped_in_v4(world: &World) {
    let [v4, v6] = world.frontends();
    let is_dropped = |what: &str, send: &dyn Fn(SocketAddr)| {
        let before = dropped(world);
        send(v4);
        poll::until(what, LIMIT, || (dropped(world) > before).then_some(())).unwrap();
    };
    is_dropped("a dropped SYN", &|server| assert!(tcp_connect(world.client(), server).is_err()));
    let socket = udp_socket(world.client(), v4, true).unwrap();
    is_dropped("a dropped datagram", &|_| assert!(socket.send(b"hello").is_ok()));
    assert_eq!(tcp_request(world.client(), v6, "who are you?").unwrap().pod, "web-0");
    assert_eq!(udp_request(world.client(), v6, b"and you?", UdpOptions::default()).unwrap().answer.pod, "web-0");
}

/// The strict filter looks up the route from the Pod's address to the client. This route uses another uplink than the
/// one on which the request arrives, so the filter drops the request. The filter would also drop requests that a client
/// sends to the Pod's own address.
#[test]
fn strict_reverse_path_filter_drops_requests_to_a_policy_routed_pod_and_a_loose_one_does_not() {
    let mut world = pod_with_a_table_of_its_own();
    world.node().set_liberal_tracking(true).unwrap();
    set_rp_filter(&world, LOOSE);
    let [first, second] = world.topology.clients() else { unreachable!("the Node has two clients") };
    assert_answered_by(&world, first, &second.netns, &first.netns);
    assert_eq!(dropped(&world), 0);
    set_rp_filter(&world, STRICT);
    // In offload mode, the stack forwards the first packets of a flow, so the first requests of the flow are dropped
    // too.
    for forwarding in [Forwarding::Stack, Forwarding::Offload] {
        world.follow(forwarding);
        assert_requests_are_dropped_in_v4(&world);
    }
}

/// A redirect bypasses the filter and the Pod's routing table: replies are routed like packets from the node address,
/// and leave through the uplink on which the request arrived.
#[test]
fn redirected_requests_to_a_policy_routed_pod_pass_a_strict_filter_and_are_answered_by_their_uplink() {
    let mut world = pod_with_a_table_of_its_own();
    set_rp_filter(&world, STRICT);
    world.follow(Forwarding::Redirect);
    let [first, second] = world.topology.clients() else { unreachable!("the Node has two clients") };
    assert_answered_by(&world, first, &first.netns, &second.netns);
    assert_eq!(dropped(&world), 0);
}
