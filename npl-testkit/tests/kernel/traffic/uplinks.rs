// SPDX-License-Identifier: Apache-2.0
//! Tests a Node with two uplinks, where replies leave through another uplink than the one on which requests arrive.

use std::time::Duration;

use npl_agent::core::devices::redirect::Forwarding;
use npl_testkit::netns::Netns;
use npl_testkit::poll;
use npl_testkit::topology::{Client, Options};
use npl_testkit::traffic::{Direction, UdpOptions, tcp_request, transfer, udp_request};

use super::flow_offload::STATEFUL;
use super::tunnels::received;
use crate::world::{NODE_PORT, World, is_emulated};

/// The time limit of each wait for a change in the kernel, far above the usual duration.
const LIMIT: Duration = Duration::from_secs(10);

/// The value of `rp_filter` for the loose reverse path filter, which accepts a packet whose source is reachable through
/// any device. The strict filter would drop the requests of these tests, with and without NPL, because the replies
/// leave through another device.
const LOOSE: &str = "2";

fn bytes() -> u64 {
    if is_emulated() { 1 << 20 } else { 8 << 20 }
}

/// Creates a Node with two clients that are connected to each other; each client forwards packets of the Node to the
/// other.
pub(super) fn joined_clients() -> World {
    let world = World::with_options(1, Options { clients: 2, ..Options::default() });
    let [first, second] = world.topology.clients() else { unreachable!("the Node has two clients") };
    let joined_clients = format!("link add far0 index 300 type veth peer name far0 netns {}", second.netns.name());
    first.netns.ip(&joined_clients).unwrap();
    for (own, other, next, other_next) in [(first, second, "fe80::a", "fe80::b"), (second, first, "fe80::b", "fe80::a")]
    {
        own.netns.ip(&format!("link set far0 up\naddr add {next}/64 dev far0 nodad")).unwrap();
        let (v4, v6) = (other.addresses.v4, other.addresses.v6);
        own.netns.ip(&format!("route add {v4}/32 dev far0\nroute add {v6}/128 via {other_next} dev far0")).unwrap();
        own.netns.sysctl("net/ipv4/ip_forward", "1").unwrap();
        own.netns.sysctl("net/ipv6/conf/all/forwarding", "1").unwrap();
    }
    for client in [first, second] {
        let is_up = || client.netns.ip("link show dev far0").is_ok_and(|it| it.contains("state UP")).then_some(());
        poll::until("the carrier between the clients", LIMIT, is_up).unwrap();
    }
    world
}

/// Creates a Node that uses each of the two clients as the gateway to the other.
fn crossed() -> World {
    let world = joined_clients();
    let [first, second] = world.topology.clients() else { unreachable!("the Node has two clients") };
    world.node().sysctl("net/ipv4/conf/all/rp_filter", LOOSE).unwrap();
    let by = |gateways: [&str; 2], client: &Client, other: &Client| {
        let ([v4, v6], device) = (gateways, other.uplink.name());
        let (to_v4, to_v6) = (client.addresses.v4, client.addresses.v6);
        format!("route add {to_v4}/32 via {v4} dev {device} onlink\nroute add {to_v6}/128 via {v6} dev {device} onlink")
    };
    world.node().ip(&by(["203.0.113.2", "2001:db8:0:3::2"], first, second)).unwrap();
    world.node().ip(&by(["192.0.2.1", "2001:db8:0:1::1"], second, first)).unwrap();
    world
}

/// Asserts that a client's requests are answered through the uplink of `by` and not of `not_by`, in both families and
/// over both protocols.
#[track_caller]
pub(super) fn assert_answered_by(world: &World, client: &Client, by: &Netns, not_by: &Netns) {
    let received_bytes = || [by, not_by].map(|netns| received(netns, "eth0"));
    for (node_ip, own_ip) in world.node_ips().into_iter().zip(client.addresses.ips()) {
        let (server, before) = ((node_ip, NODE_PORT).into(), received_bytes());
        let tcp = tcp_request(&client.netns, server, "who are you?").unwrap();
        assert_eq!((tcp.pod.as_str(), tcp.client.ip()), ("web-0", own_ip));
        let udp = udp_request(&client.netns, server, b"and you?", UdpOptions::default()).unwrap().answer;
        assert_eq!((udp.pod.as_str(), udp.client.ip()), ("web-0", own_ip));
        for direction in [Direction::Upload, Direction::Download] {
            assert_eq!(transfer(&client.netns, server, direction, bytes()).unwrap().bytes, bytes());
        }
        let [expected, unexpected] = [0, 1].map(|uplink| received_bytes()[uplink] - before[uplink]);
        // A few packets may use the other uplink, because neighbor resolution uses this uplink too.
        assert!(
            unexpected < bytes() / 100 && expected > bytes(),
            "the client received {unexpected} bytes through the wrong uplink, {expected} through the right one"
        );
    }
}

/// Number of packets that the kernel stack forwards while both clients are served.
#[track_caller]
fn forwarded(world: &mut World, forwarding: Forwarding) -> u64 {
    world.wait_for_closed_connections();
    world.follow(forwarding);
    let count = |world: &World| world.node().packets_counted("inet npl_test forwarded").unwrap();
    let before = count(world);
    let [first, second] = world.topology.clients() else { unreachable!("the Node has two clients") };
    assert_answered_by(world, first, &second.netns, &first.netns);
    assert_answered_by(world, second, &first.netns, &second.netns);
    count(world) - before
}

#[test]
fn replies_may_leave_through_another_uplink_than_requests_arrive_on() {
    let mut world = crossed();
    world.node().nft(STATEFUL).unwrap();
    world.node().set_liberal_tracking(true).unwrap();
    let in_stack_mode = forwarded(&mut world, Forwarding::Stack);
    let redirected = forwarded(&mut world, Forwarding::Redirect);
    assert!(redirected * 50 < in_stack_mode, "{redirected} packets instead of {in_stack_mode}");
    let offloaded = forwarded(&mut world, Forwarding::Offload);
    assert!(offloaded > 0 && offloaded * 4 < in_stack_mode, "{offloaded} packets instead of {in_stack_mode}");
    assert_eq!(world.node().packets_counted("inet npl_test invalid").unwrap(), 0);
}
