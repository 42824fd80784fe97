// SPDX-License-Identifier: Apache-2.0
//! `--forwarding offload`: the host's stack decides on every flow, and most packets pass it by.

use std::time::{Duration, Instant};

use npl_agent::core::devices::redirect::Forwarding;
use npl_testkit::poll;
use npl_testkit::traffic::{self, Direction, Transfer, transfer, udp_socket};

use super::redirect::redirected_over_a_bridge;
use crate::world::{World, is_emulated};

/// What a CNI's firewall is like: connections are let through that began with a SYN, and whatever belongs to nobody's is
/// dropped and counted.
pub(super) const STATEFUL: &str = "
table inet npl_test {
  counter forwarded { }
  counter invalid { }
  chain forward {
    type filter hook forward priority filter; policy drop;
    counter name forwarded
    ct state invalid counter name invalid drop
    ct state established,related accept
    ct state new tcp flags & (fin | syn | rst | ack) == syn accept
    ct state new meta l4proto udp accept
    meta l4proto icmpv6 accept
    counter name invalid
  }
}";

/// As [`STATEFUL`] once somebody has changed their mind.
const NOTHING_ANY_MORE: &str = "insert rule inet npl_test forward meta l4proto tcp drop comment \"changed\"";

/// Far longer than the kernel needs.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

fn bytes() -> u64 {
    if is_emulated() { 1 << 20 } else { 32 << 20 }
}

/// A Pod on a Node with a stateful firewall and liberal connection tracking.
pub(super) fn offloading() -> World {
    let mut world = World::new(1);
    world.node().nft(STATEFUL).unwrap();
    world.node().set_liberal_tracking(true).unwrap();
    world.follow(Forwarding::Offload);
    assert_eq!(world.datapath().redirected().unwrap().len(), 2, "the Pod's two addresses");
    world
}

/// Packets that a counter of the rules has seen.
pub(super) fn counted(world: &World, counter: &str) -> u64 {
    world.node().packets_counted(&format!("inet npl_test {counter}")).unwrap()
}

/// Packets that the host forwards for a transfer each way, in each family.
fn forwarded_for_transfers(world: &World) -> u64 {
    let before = counted(world, "forwarded");
    for frontend in world.frontends() {
        for direction in [Direction::Upload, Direction::Download] {
            assert_eq!(transfer(world.client(), frontend, direction, bytes()).unwrap().bytes, bytes());
        }
    }
    counted(world, "forwarded") - before
}

/// Few packets of transfers take the stack of a Node that offloads, beside what takes it otherwise; none is invalid.
#[track_caller]
pub(super) fn assert_most_packets_pass_by(mut world: World) {
    let offloaded = forwarded_for_transfers(&world);
    world.follow(Forwarding::Stack);
    let by_the_stack = forwarded_for_transfers(&world);
    assert!(offloaded > 0 && offloaded * 4 < by_the_stack, "{offloaded} packets instead of {by_the_stack}");
    assert_eq!(counted(&world, "invalid"), 0);
}

#[test]
fn most_packets_of_established_flows_pass_by_the_hosts_stack() {
    let world = offloading();
    world.assert_answers();
    assert_most_packets_pass_by(world);
}

#[test]
fn a_policy_that_changes_ends_live_flows() {
    for direction in [Direction::Upload, Direction::Download] {
        let world = offloading();
        let rate = 4 << 20;
        let transfer = Transfer::start(world.client(), world.frontend(), direction, rate * 12, rate).unwrap();
        transfer.wait_for_share(0.1, LIMIT).unwrap();
        world.node().nft(NOTHING_ANY_MORE).unwrap();
        let since = Instant::now();
        let stalled = || {
            let before = transfer.moved();
            poll::until("nothing", Duration::from_millis(500), || (transfer.moved() != before).then_some(())).is_err()
        };
        poll::until("the end of the flow", LIMIT, || stalled().then_some(())).unwrap();
        assert!(transfer.moved() < rate * 10, "it was let through to its end");
        assert!(since.elapsed() < Duration::from_secs(8), "{:?}", since.elapsed());
        // With the rules as they were, it goes on: nothing of ours has broken it.
        world.node().nft("flush chain inet npl_test forward\nadd rule inet npl_test forward accept").unwrap();
        assert_eq!(transfer.join().unwrap().bytes, rate * 12);
    }
}

#[test]
fn flows_to_pods_on_a_bridge_are_offloaded_too() {
    let mut world = redirected_over_a_bridge();
    world.node().nft(STATEFUL).unwrap();
    world.node().set_liberal_tracking(true).unwrap();
    world.follow(Forwarding::Offload);
    assert_most_packets_pass_by(world);
}

#[test]
fn what_the_host_does_not_let_through_is_never_offloaded() {
    let world = offloading();
    world.node().nft(NOTHING_ANY_MORE).unwrap();
    assert!(traffic::tcp_connect(world.client(), world.frontend()).is_err());
    let socket = udp_socket(world.client(), world.frontend(), true).unwrap();
    for question in 0..8 {
        assert_eq!(traffic::udp_ask(&socket, &format!("question {question}")).unwrap().pod, "web-0");
    }
}

/// Where devices carry filters, two of ours may be on one hook of a device, by what they are for.
#[test]
fn nothing_is_left_on_a_device_that_flows_are_not_offloaded_to_any_more() {
    let mut world = offloading();
    let device = world.pod().host_device.clone();
    let has_filters = ["ingress", "egress"].map(|side| {
        let device = device.clone();
        move || !device.netns().tc(&format!("filter show dev {} {side}", device.name())).unwrap().is_empty()
    });
    let are_filters = world.datapath().hooks.mechanism() == "clsact";
    assert!(has_filters.iter().all(|has| has() == are_filters));
    world.follow(Forwarding::Stack);
    assert!(!has_filters.iter().any(|has| has()));
}

/// Connection tracking that has to see every packet of a connection would call the rest invalid.
#[test]
fn strict_connection_tracking_gets_every_packet() {
    let mut world = World::new(1);
    world.node().nft(STATEFUL).unwrap();
    world.node().set_liberal_tracking(false).unwrap();
    world.follow(Forwarding::Offload);
    assert!(world.datapath().redirected().unwrap().is_empty());
    forwarded_for_transfers(&world);
    world.node().set_liberal_tracking(true).unwrap();
    world.follow(Forwarding::Offload);
    assert_eq!(world.datapath().redirected().unwrap().len(), 2);
    forwarded_for_transfers(&world);
    assert_eq!(counted(&world, "invalid"), 0);
}
