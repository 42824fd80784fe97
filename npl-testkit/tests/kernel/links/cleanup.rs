// SPDX-License-Identifier: Apache-2.0
//! Tests that `npl-agent cleanup` removes all of NPL's kernel state and no other state.

use aya::maps::{HashMap, MapData};
use npl_agent::datapath::cleanup::{Removed, remove_everything};
use npl_common::names::PIN_ROOT;
use npl_testkit::topology::Options;

use crate::world::World;

fn clean_up(world: &World) -> Removed {
    let (removed, errors) = world.node().block_on(remove_everything(world.bpffs.path())).unwrap();
    assert!(errors.is_empty(), "{errors:?}");
    removed
}

fn tc(world: &World, words: &str) -> String {
    world.node().tc(words).unwrap()
}

#[test]
fn cleanup_removes_all_of_npls_state() {
    let mut world = World::fresh(1);
    world.assert_answers();
    world.datapath = None;
    let removed = clean_up(&world);
    assert!(!removed.pins.is_empty());
    assert!(!world.bpffs.path().join(PIN_ROOT).exists());
    assert!(!tc(&world, "qdisc show dev eth0").contains("clsact"));
    world.wait_until_refused();
    assert_eq!(clean_up(&world), Removed::default(), "a second cleanup removes nothing");
    world.install();
    world.assert_answers();
}

#[test]
fn cleanup_leaves_third_party_qdiscs_filters_and_pins() {
    let mut world = World::bare(1, Options::default());
    tc(&world, "qdisc add dev eth0 clsact");
    tc(&world, "filter add dev eth0 ingress pref 10 protocol ip u32 match u32 0 0 flowid 1:1");
    let foreign_pin = world.bpffs.path().join("foreign");
    HashMap::<MapData, u32, u32>::create(1, 0).unwrap().pin(&foreign_pin).unwrap();
    world.install();
    world.assert_answers();
    world.datapath = None;
    let removed = clean_up(&world);
    assert!(removed.qdiscs.is_empty(), "{removed:?}");
    assert!(foreign_pin.exists());
    let filters = tc(&world, "filter show dev eth0 ingress");
    assert!(filters.contains("u32") && !filters.contains("npl_ingress"), "{filters}");
    world.wait_until_refused();
}

#[test]
fn cleanup_keeps_a_qdisc_with_a_later_third_party_filter() {
    let mut world = World::fresh(1);
    // With TCX links, the device has no qdisc yet, so the test adds one.
    if world.datapath().hooks.mechanism() == "tcx" {
        tc(&world, "qdisc add dev eth0 clsact");
    }
    tc(&world, "filter add dev eth0 egress pref 10 protocol ip u32 match u32 0 0 flowid 1:1");
    world.datapath = None;
    clean_up(&world);
    assert!(tc(&world, "filter show dev eth0 egress").contains("u32"));
}
