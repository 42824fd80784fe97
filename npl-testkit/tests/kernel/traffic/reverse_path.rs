// SPDX-License-Identifier: Apache-2.0
//! A Pod whose own packets a rule has leave by another uplink than that which requests come by, and reverse path filters.

use std::net::SocketAddr;
use std::time::Duration;

use npl_agent::core::devices::redirect::Forwarding;
use npl_testkit::traffic::{UdpOptions, tcp_connect, tcp_request, udp_request, udp_socket};
use npl_testkit::{poll, tools};

use super::uplinks::{assert_answered_by, joined};
use crate::world::World;

/// Far longer than the kernel needs to count a packet.
const LIMIT: Duration = Duration::from_secs(5);

/// What `rp_filter` is set to.
const STRICT: &str = "1";
const LOOSE: &str = "2";

/// Requests of the first client come by the first uplink, and what the Pod sends leaves by the second one.
fn pod_with_a_table_of_its_own() -> World {
    let world = joined();
    let routes = "route add default via 203.0.113.2 dev eth1 table 100
route add default via 2001:db8:0:3::2 dev eth1 table 100";
    world.node().ip(routes).unwrap();
    for (family, pod_ip) in ["-4", "-6"].into_iter().zip(world.pod().ips()) {
        let mut add = world.node().command("ip").unwrap();
        tools::output(add.args([family, "rule", "add", "from", &pod_ip.to_string(), "lookup", "100"])).unwrap();
    }
    world
}

fn filter(world: &World, value: &str) {
    for device in ["all", "eth0", "eth1", world.pod().host_device.name()] {
        world.node().sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), value).unwrap();
    }
}

/// Packets that the Node has dropped for their reverse path.
fn dropped(world: &World) -> u64 {
    world.node().counter("TcpExt", "IPReversePathFilter").unwrap()
}

/// The kernel drops requests by either protocol before the Pod sees one; of IPv6 it has no such filter.
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
    is_dropped("a dropped datagram", &|_| assert!(socket.send(b"anybody?").is_ok()));
    assert_eq!(tcp_request(world.client(), v6, "who are you?").unwrap().pod, "web-0");
    assert_eq!(udp_request(world.client(), v6, b"and you?", UdpOptions::default()).unwrap().answer.pod, "web-0");
}

/// As the client would be refused that asks the Pod directly: the filter knows no more than the Pod's address.
#[test]
fn a_strict_filter_drops_requests_to_a_pod_with_a_table_of_its_own_and_a_loose_one_does_not() {
    let mut world = pod_with_a_table_of_its_own();
    world.node().set_liberal_tracking(true).unwrap();
    filter(&world, LOOSE);
    let [first, second] = world.topology.clients() else { unreachable!("two clients were asked for") };
    assert_answered_by(&world, first, &second.netns, &first.netns);
    assert_eq!(dropped(&world), 0);
    filter(&world, STRICT);
    // A flow begins by the stack where it is offloaded later.
    for forwarding in [Forwarding::Stack, Forwarding::Offload] {
        world.follow(forwarding);
        assert_requests_are_dropped_in_v4(&world);
    }
}

/// Neither the filter nor the Pod's table is asked: the way back is that of the Node's own address.
#[test]
fn redirected_requests_to_a_pod_with_a_table_of_its_own_pass_a_strict_filter_and_are_answered_where_they_came_in() {
    let mut world = pod_with_a_table_of_its_own();
    filter(&world, STRICT);
    world.follow(Forwarding::Redirect);
    let [first, second] = world.topology.clients() else { unreachable!("two clients were asked for") };
    assert_answered_by(&world, first, &first.netns, &second.netns);
    assert_eq!(dropped(&world), 0);
}
