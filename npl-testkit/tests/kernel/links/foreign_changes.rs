// SPDX-License-Identifier: Apache-2.0
//! Tests changes of NPL's filters and their qdisc by other software while a client sends requests: the agent restores
//! the objects and records each repair once. Filters of other software stay. The agent's tests
//! (`tests/agent/foreign_changes/`) test the other objects, with the programs of the host's kernel.

use std::collections::BTreeMap;

use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::core::repairs::RepairedObject::{self, Filter, Qdisc};
use npl_testkit::traffic::Load;

use crate::world::{World, load_rate};

/// A filter of other software, with the priority of NPL's filters and a handle of its own.
const FOREIGN_FILTER: &str = "filter add dev eth0 ingress pref 2 protocol ip u32 match u32 0 0 flowid 1:1";

/// The name of a change by other software, the change, and the repairs that it causes.
type Case = (&'static str, fn(&World), &'static [(RepairedObject, u64)]);

/// Surveys the devices as the agent does at a resync, and returns the numbers of repairs.
fn repairs(world: &mut World) -> BTreeMap<RepairedObject, u64> {
    world.follow(Forwarding::Stack);
    let mut counts = BTreeMap::new();
    for repair in world.datapath().repairs.take() {
        *counts.entry(repair.object).or_default() += 1;
    }
    counts
}

/// Removes NPL's filter of a direction, as an administrator does who reads the filter's priority and handle.
fn remove_filter(world: &World, direction: &str) {
    let shown = world.node().tc(&format!("filter show dev eth0 {direction} pref 1")).unwrap();
    let handle = shown.split_once("handle ").and_then(|(_, rest)| rest.split_whitespace().next()).unwrap();
    world.node().tc(&format!("filter del dev eth0 {direction} pref 1 handle {handle} bpf")).unwrap();
}

#[test]
fn filters_and_qdiscs_that_other_software_removes_are_repaired_and_recorded_once() {
    let mut world = World::new(1);
    world.use_filters();
    world.node().tc(FOREIGN_FILTER).unwrap();
    let is_foreign_there = |world: &World| world.node().tc("filter show dev eth0 ingress").unwrap().contains("u32");
    assert_eq!(repairs(&mut world), BTreeMap::new(), "the first attachment is no repair");
    let load = Load::start(world.client(), load_rate(), world.load_requests());
    let cases: [Case; 4] = [
        ("the ingress filter is removed", |world| remove_filter(world, "ingress"), &[(Filter, 1)]),
        ("the egress filter is removed", |world| remove_filter(world, "egress"), &[(Filter, 1)]),
        (
            "all filters are removed",
            |world| drop(world.node().tc("filter del dev eth0 egress").unwrap()),
            &[(Filter, 1)],
        ),
        (
            "the qdisc is removed",
            |world| drop(world.node().tc("qdisc del dev eth0 clsact").unwrap()),
            &[(Filter, 2), (Qdisc, 1)],
        ),
    ];
    for (name, change, expected) in cases {
        assert!(is_foreign_there(&world), "before `{name}`");
        change(&world);
        assert_eq!(repairs(&mut world), expected.iter().copied().collect(), "{name}");
        world.assert_answers();
        assert_eq!(repairs(&mut world), BTreeMap::new(), "{name}: the second survey must find nothing");
    }
    let wrong: Vec<_> =
        load.stop().failures.into_iter().filter(|failure| failure.error.contains("responded instead of")).collect();
    assert_eq!(wrong, []);
}

#[test]
fn upgrades_and_wanted_changes_are_no_repairs() {
    let mut world = World::new(2);
    assert_eq!(repairs(&mut world), BTreeMap::new());
    world.follow(Forwarding::Redirect);
    world.follow(Forwarding::Stack);
    assert_eq!(repairs(&mut world), BTreeMap::new(), "another forwarding mode");
    world.datapath = None;
    let mut next = world.open_configured();
    next.mappings().unwrap();
    world.datapath = Some(next);
    assert_eq!(repairs(&mut world), BTreeMap::new(), "the next agent");
    let frontends: Vec<_> = world.datapath().mappings().unwrap().into_keys().collect();
    for frontend in frontends {
        world.datapath().remove_mapping(frontend).unwrap();
    }
    world.datapath().mappings().unwrap();
    assert_eq!(repairs(&mut world), BTreeMap::new(), "removed mappings");
}
