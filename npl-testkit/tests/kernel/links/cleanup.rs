// SPDX-License-Identifier: Apache-2.0
//! Everything of ours goes, and nothing of others.

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

fn shown(world: &World, words: &str) -> String {
    world.node().tc(words).unwrap()
}

#[test]
fn nothing_of_ours_is_left_after_a_cleanup() {
    let mut world = World::fresh(1);
    world.assert_answers();
    world.datapath = None;
    let removed = clean_up(&world);
    assert!(!removed.pins.is_empty());
    assert!(!world.bpffs.path().join(PIN_ROOT).exists());
    assert!(!shown(&world, "qdisc show dev eth0").contains("clsact"));
    world.wait_until_refused();
    assert_eq!(clean_up(&world), Removed::default(), "a second cleanup finds nothing");
    world.install();
    world.assert_answers();
}

#[test]
fn what_others_have_is_left_by_a_cleanup() {
    let mut world = World::bare(1, Options::default());
    shown(&world, "qdisc add dev eth0 clsact");
    shown(&world, "filter add dev eth0 ingress pref 10 protocol ip u32 match u32 0 0 flowid 1:1");
    let foreign_pin = world.bpffs.path().join("foreign");
    HashMap::<MapData, u32, u32>::create(1, 0).unwrap().pin(&foreign_pin).unwrap();
    world.install();
    world.assert_answers();
    world.datapath = None;
    let removed = clean_up(&world);
    assert!(removed.qdiscs.is_empty(), "{removed:?}");
    assert!(foreign_pin.exists());
    let filters = shown(&world, "filter show dev eth0 ingress");
    assert!(filters.contains("u32") && !filters.contains("npl_ingress"), "{filters}");
    world.wait_until_refused();
}

#[test]
fn filter_that_came_after_us_keeps_its_qdisc() {
    let mut world = World::fresh(1);
    // Where we are BPF links there is no qdisc yet.
    if world.datapath().hooks.mechanism() == "tcx" {
        shown(&world, "qdisc add dev eth0 clsact");
    }
    shown(&world, "filter add dev eth0 egress pref 10 protocol ip u32 match u32 0 0 flowid 1:1");
    world.datapath = None;
    clean_up(&world);
    assert!(shown(&world, "filter show dev eth0 egress").contains("u32"));
}
