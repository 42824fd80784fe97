// SPDX-License-Identifier: Apache-2.0
//! Tests the order of filters before Linux 6.6, where the newest of the filters with the same priority runs first. The
//! agent moves NPL's filter ahead of those of other software, and attaches NPL's filter again after it was deleted.

use std::collections::BTreeSet;
use std::time::Duration;

use npl_agent::core::devices::DeviceSelection;
use npl_agent::core::devices::redirect::{Forwarding, NetworkPolicy};
use npl_agent::core::devices::xdp::Attach;
use npl_agent::core::model::Moment;
use npl_agent::devices::uplinks::{DeviceReport, Uplinks};
use npl_agent::netlink;
use npl_agent::nft_guard::GuardMode;
use npl_testkit::foreign::{BOTH, ENDS_THE_CHAIN, Foreign, HANDS_ON, Place};
use npl_testkit::traffic::{Load, tcp_ask, tcp_connect};

use crate::world::{World, is_emulated, load_rate};

/// Time limit for twenty requests, far above the usual duration.
const LIMIT: Duration = Duration::from_mins(1);

/// The number of moves under load with a slow filter. Without a grace period between the steps of a move, about half of
/// the moves lose a packet.
const MOVES: u32 = 12;

/// Rounds of the slow filter's loop, which take a few milliseconds: long compared with a move's steps. On an emulated
/// processor, a round takes many times longer.
fn slow_rounds() -> i32 {
    if is_emulated() { 300 } else { 10_000 }
}

/// Creates a Node whose programs are filters on every kernel, as before Linux 6.6.
fn with_filters() -> World {
    let mut world = World::new(1);
    world.use_filters();
    world.assert_answers();
    world
}

/// Attaches third-party filters with the priority of NPL's. They run before NPL's and end the chain, like those of a
/// Cilium agent that starts after NPL's agent.
fn attach_as_cilium(world: &World) -> Foreign {
    let uplink = &world.topology.client().uplink;
    Foreign::attach(&world.run, "cilium", uplink, ENDS_THE_CHAIN, Place::AheadAsFilter, &BOTH).unwrap()
}

/// Surveys the devices, and attaches or moves the programs accordingly, as the agent does after a device event.
fn decide(world: &mut World, uplinks: &mut Uplinks) -> DeviceReport {
    let (node, node_ips) = (world.node().clone(), world.node_ips());
    let datapath = world.datapath();
    let survey = async { netlink::join_survey(&mut uplinks.survey(datapath, BTreeSet::new())).await };
    let survey = node.block_on(survey).unwrap().unwrap();
    node.run(|| uplinks.apply(datapath, survey, &node_ips, Moment::default())).unwrap().unwrap()
}

fn uplinks_of(world: &World) -> Uplinks {
    let names = world.uplinks().into_iter().map(|device| device.name).collect();
    let stack = (Forwarding::Stack, NetworkPolicy::Applies);
    Uplinks::new(DeviceSelection::Named(names), stack, Attach::Tc, GuardMode::Off)
}

fn is_served(world: &World) -> bool {
    tcp_connect(world.client(), world.frontend()).is_ok()
}

/// A newer filter with the same priority runs before NPL's, so the agent must move NPL's filter ahead of the newer
/// filter.
#[test]
fn npls_filter_is_moved_ahead_of_a_newer_filter() {
    let mut world = with_filters();
    let mut uplinks = uplinks_of(&world);
    let _cilium = attach_as_cilium(&world);
    assert!(!is_served(&world), "the third-party filter must run before NPL's and end the chain");
    let report = decide(&mut world, &mut uplinks);
    assert!(report.errors.is_empty() && report.decisions.programs_ahead.is_empty(), "{report:?}");
    world.assert_answers();
    let again = decide(&mut world, &mut uplinks);
    assert!(again.decisions.plan.moves.is_empty(), "a filter at the head must not be moved");
    let filters = world.node().tc(&format!("filter show dev {} ingress", uplink_name(&world))).unwrap();
    assert_eq!(filters.matches("handle 0x4e504c02").count(), 1, "{filters}");
    assert!(!filters.contains("handle 0x4e504cff"), "the temporary filter of the move is left: {filters}");
}

fn uplink_name(world: &World) -> String {
    world.topology.client().uplink.name().to_owned()
}

/// Every new connection of a client is served while NPL's filter is moved.
#[test]
fn no_request_is_lost_while_npls_filter_is_moved() {
    let mut world = with_filters();
    let mut uplinks = uplinks_of(&world);
    let uplink = world.topology.client().uplink.clone();
    let load = Load::start(world.client(), 2 * load_rate(), world.load_requests());
    for round in 0..4 {
        let name = format!("other-{round}");
        let _other = Foreign::attach(&world.run, &name, &uplink, HANDS_ON, Place::AheadAsFilter, &BOTH).unwrap();
        let report = decide(&mut world, &mut uplinks);
        assert_eq!(report.decisions.plan.moves.len(), 2, "both filters must be moved: {report:?}");
        load.wait_for_answers(20, LIMIT).unwrap();
    }
    assert_eq!(load.stop().failures, []);
}

/// A packet that a slow filter of other software delays reaches NPL's old filter only after the move, so the old filter
/// must still be attached.
#[test]
fn no_packet_is_lost_in_a_slow_filter_while_npls_filter_is_moved() {
    let mut world = with_filters();
    let uplink = world.topology.client().uplink.clone();
    let load = Load::start(world.client(), 4 * load_rate(), world.load_requests());
    for round in 0..MOVES {
        let name = format!("slow-{round}");
        let place = Place::AheadAsFilter;
        let _slow = Foreign::attach_slow(&world.run, &name, &uplink, HANDS_ON, slow_rounds(), place, &BOTH).unwrap();
        load.wait_for_answers(4, LIMIT).unwrap();
        // A new agent makes each move, because one agent makes only a limited number of moves.
        let mut uplinks = uplinks_of(&world);
        let report = decide(&mut world, &mut uplinks);
        assert_eq!(report.decisions.plan.moves.len(), 2, "both filters must be moved: {report:?}");
    }
    assert_eq!(load.stop().failures, []);
}

/// The agent stops moving NPL's filter after some attempts. Otherwise, two agents that both move their filters to the
/// head would never stop.
#[test]
fn filter_that_returns_to_the_head_after_each_move_is_reported() {
    let mut world = with_filters();
    let mut uplinks = uplinks_of(&world);
    let mut cilium = attach_as_cilium(&world);
    let ahead = loop {
        let decisions = decide(&mut world, &mut uplinks).decisions;
        if !decisions.programs_ahead.is_empty() {
            break decisions.programs_ahead;
        }
        assert!(is_served(&world));
        drop(cilium);
        cilium = attach_as_cilium(&world);
    };
    assert_eq!(ahead.keys().collect::<Vec<_>>(), [&uplink_name(&world)]);
    assert!(!is_served(&world));
    drop(cilium);
    world.assert_answers();
}

/// A CNI may delete every filter of the egress hook, as Cilium does without kube-proxy replacement. The agent attaches
/// NPL's filter again at its next survey of the devices, and open connections continue.
#[test]
fn filter_that_was_deleted_at_egress_is_attached_again() {
    let mut world = with_filters();
    let mut uplinks = uplinks_of(&world);
    let stream = tcp_connect(world.client(), world.frontend()).unwrap();
    world.node().tc(&format!("filter del dev {} egress", uplink_name(&world))).unwrap();
    assert!(!is_served(&world), "replies must leave untranslated after the filter was deleted");
    let report = decide(&mut world, &mut uplinks);
    assert!(report.errors.is_empty(), "{report:?}");
    world.assert_answers();
    assert_eq!(tcp_ask(&stream, "still there?").unwrap().pod, world.pod().name);
}
