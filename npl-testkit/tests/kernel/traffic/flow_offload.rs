// SPDX-License-Identifier: Apache-2.0
//! Tests `--forwarding offload`: the kernel stack must first forward packets of a flow, and then most packets of the
//! flow bypass the stack.

use std::time::{Duration, Instant};

use npl_agent::core::devices::redirect::Forwarding;
use npl_testkit::poll;
use npl_testkit::traffic::{self, Direction, Transfer, transfer, udp_socket};

use super::firewall::{assert_no_packet_is_invalid, counted};
use super::redirect::redirected_over_a_bridge;
use crate::world::{World, is_emulated};

/// A stateful firewall like that of a CNI. A TCP connection must start with a SYN; packets that belong to no connection
/// are dropped and counted.
pub(super) const STATEFUL: &str = "
table inet npl_test {
  counter forwarded { }
  counter invalid { }
  counter invalid_rst { }
  counter invalid_fin { }
  chain forward {
    type filter hook forward priority filter; policy drop;
    counter name forwarded
    ct state invalid tcp flags & rst == rst counter name invalid_rst
    ct state invalid tcp flags & fin == fin counter name invalid_fin
    ct state invalid counter name invalid drop
    ct state established,related accept
    ct state new tcp flags & (fin | syn | rst | ack) == syn accept
    ct state new meta l4proto udp accept
    meta l4proto icmpv6 accept
    counter name invalid
  }
}";

/// Adds to [`STATEFUL`] a rule that counts and drops all forwarded TCP packets.
const DROP_TCP: &str = "
add counter inet npl_test dropped
insert rule inet npl_test forward meta l4proto tcp counter name dropped drop comment \"changed\"";

/// The number of packets that the stack must drop before a transfer without further data counts as stopped. The
/// intervals between retransmissions double, so a larger number would take long.
const DROPPED: u64 = 2;

/// The minimum time without further data after which a flow counts as stopped. In a shorter time between two drops,
/// even a flow that is still offloaded may happen to move no data.
const STALLED: Duration = Duration::from_secs(1);

/// The time limit of each wait for a change in the kernel, far above the usual duration.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

fn bytes() -> u64 {
    if is_emulated() { 1 << 20 } else { 32 << 20 }
}

/// Creates a Pod on a Node in offload mode, with a stateful firewall and liberal conntrack.
pub(super) fn offloading() -> World {
    let mut world = World::new(1);
    world.node().nft(STATEFUL).unwrap();
    world.node().set_liberal_tracking(true).unwrap();
    world.follow(Forwarding::Offload);
    assert_eq!(world.datapath().redirected().unwrap().len(), 2, "both addresses of the Pod must be redirected");
    world
}

/// Number of packets that the kernel stack forwards for transfers in each direction and family.
fn forwarded_for_transfers(world: &World) -> u64 {
    let before = counted(world, "forwarded");
    for frontend in world.frontends() {
        for direction in [Direction::Upload, Direction::Download] {
            assert_eq!(transfer(world.client(), frontend, direction, bytes()).unwrap().bytes, bytes());
        }
    }
    counted(world, "forwarded") - before
}

/// Asserts that the stack forwards few packets of transfers in offload mode, compared with stack mode, and that kernel
/// conntrack classifies none of them as invalid.
#[track_caller]
pub(super) fn assert_most_packets_bypass_the_stack(mut world: World) {
    let offloaded = forwarded_for_transfers(&world);
    world.follow(Forwarding::Stack);
    let in_stack_mode = forwarded_for_transfers(&world);
    assert!(offloaded > 0 && offloaded * 4 < in_stack_mode, "{offloaded} packets instead of {in_stack_mode}");
    assert_no_packet_is_invalid(&world);
}

#[test]
fn most_packets_of_established_flows_bypass_the_stack() {
    let world = offloading();
    world.assert_answers();
    assert_most_packets_bypass_the_stack(world);
}

#[test]
fn changed_forward_rules_apply_to_offloaded_flows() {
    for direction in [Direction::Upload, Direction::Download] {
        let world = offloading();
        let rate = 4 << 20;
        let transfer = Transfer::start(world.client(), world.frontend(), direction, rate * 12, rate).unwrap();
        transfer.wait_for_share(0.1, LIMIT).unwrap();
        world.node().nft(DROP_TCP).unwrap();
        let moved_before = transfer.moved();
        // A time without further data alone would not show that the flow has stopped, because the machine may be slow.
        // The flow has stopped if no data arrives while the stack drops retransmissions for at least a second.
        let stalled = || {
            let (moved, dropped, since) = (transfer.moved(), counted(&world, "dropped"), Instant::now());
            let more = || (counted(&world, "dropped") >= dropped + DROPPED && since.elapsed() >= STALLED).then_some(());
            poll::until("retransmissions that the stack drops", LIMIT, more).unwrap();
            transfer.moved() == moved
        };
        poll::until("the end of the transfer", LIMIT, || stalled().then_some(())).unwrap();
        assert!(transfer.moved() < rate * 10, "the transfer was not interrupted");
        // The flow returns to the stack at most 256 jiffies after the rule was added, and the stack then drops its
        // packets. The limit is the data of eight seconds, a far longer time.
        let moved = transfer.moved() - moved_before;
        assert!(moved < rate * 8, "{moved} bytes moved although the host drops the flow's packets");
        // After the drop rule is removed, the transfer must continue, because NPL has not ended the connection.
        world.node().nft("flush chain inet npl_test forward\nadd rule inet npl_test forward accept").unwrap();
        assert_eq!(transfer.join().unwrap().bytes, rate * 12);
    }
}

#[test]
fn flows_to_pods_on_a_bridge_are_offloaded() {
    let mut world = redirected_over_a_bridge();
    world.wait_for_closed_connections();
    world.node().nft(STATEFUL).unwrap();
    world.node().set_liberal_tracking(true).unwrap();
    world.follow(Forwarding::Offload);
    assert_most_packets_bypass_the_stack(world);
}

#[test]
fn flow_that_the_host_drops_is_never_offloaded() {
    let world = offloading();
    world.node().nft(DROP_TCP).unwrap();
    assert!(traffic::tcp_connect(world.client(), world.frontend()).is_err());
    let socket = udp_socket(world.client(), world.frontend(), true).unwrap();
    for question in 0..8 {
        assert_eq!(traffic::udp_ask(&socket, &format!("question {question}")).unwrap().pod, "web-0");
    }
}

/// Without TCX, NPL may have attached two filters to one hook of a device, and must remove both.
#[test]
fn filters_are_removed_from_devices_after_offload() {
    let mut world = offloading();
    let device = world.pod().host_device.clone();
    let has_filters = ["ingress", "egress"].map(|direction| {
        let device = device.clone();
        move || !device.netns().tc(&format!("filter show dev {} {direction}", device.name())).unwrap().is_empty()
    });
    let are_filters = world.datapath().hooks.mechanism() == "clsact";
    assert!(has_filters.iter().all(|has| has() == are_filters));
    world.follow(Forwarding::Stack);
    assert!(!has_filters.iter().any(|has| has()));
}

/// Without `nf_conntrack_tcp_be_liberal`, no packet may bypass the stack. Otherwise, kernel conntrack would classify
/// later packets of the connection as invalid.
#[test]
fn with_strict_conntrack_the_stack_forwards_every_packet() {
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
    assert_no_packet_is_invalid(&world);
}
