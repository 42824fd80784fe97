// SPDX-License-Identifier: Apache-2.0
//! Tests that `npl-agent cleanup` removes all of NPL's kernel state and no other state, and that its dry run lists
//! exactly this state.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use aya::maps::{HashMap, MapData};
use npl_agent::core::cleanup::{Removal, RemovalKind};
use npl_agent::datapath::cleanup::{plan, remove_everything};
use npl_common::names::PIN_ROOT;
use npl_testkit::residue::Residue;
use npl_testkit::topology::Options;

use crate::world::World;

fn clean_up(world: &World) -> Vec<Removal> {
    let (removed, errors) = world.node().block_on(remove_everything(world.bpffs.path())).unwrap();
    assert!(errors.is_empty(), "{errors:?}");
    removed
}

fn dry_run(world: &World) -> Vec<Removal> {
    let (planned, errors) = world.node().block_on(plan(world.bpffs.path())).unwrap();
    assert!(errors.is_empty(), "{errors:?}");
    planned
}

fn has(removals: &[Removal], kind: RemovalKind) -> bool {
    removals.iter().any(|removal| removal.kind == kind)
}

fn add_paths(folder: &Path, paths: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().unwrap().is_dir() {
            add_paths(&entry.path(), paths);
        }
        paths.push(entry.path());
    }
}

/// The paths of NPL's pins and directories, the directory `npl` included.
fn paths(world: &World) -> Vec<PathBuf> {
    let (root, mut paths) = (world.bpffs.path().join(PIN_ROOT), Vec::new());
    add_paths(&root, &mut paths);
    paths.extend(root.exists().then_some(root));
    paths
}

/// All state that a cleanup could change, in text form.
fn state(world: &World) -> Vec<String> {
    let residue = Residue::look_at(&world.run, world.bpffs.path()).unwrap();
    let of_path = |path: PathBuf| {
        let facts = fs::metadata(&path).unwrap();
        let times = [facts.mtime(), facts.mtime_nsec(), facts.ctime(), facts.ctime_nsec()];
        format!("{} {} {:o} {times:?}", path.display(), facts.ino(), facts.mode())
    };
    let metadata = paths(world).into_iter().map(of_path);
    let filters = ["ingress", "egress"].map(|side| tc(world, &format!("filter show dev eth0 {side}")));
    let rest =
        [tc(world, "qdisc show dev eth0"), world.node().nft("list ruleset").unwrap(), world.node().ip("link").unwrap()];
    residue.lines().map(str::to_owned).chain(metadata).chain(filters).chain(rest).collect()
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
    assert!(has(&removed, RemovalKind::Map) && has(&removed, RemovalKind::Program), "{removed:?}");
    assert!(!world.bpffs.path().join(PIN_ROOT).exists());
    assert!(!tc(&world, "qdisc show dev eth0").contains("clsact"));
    world.wait_until_refused();
    assert_eq!(clean_up(&world), [], "a second cleanup must remove nothing");
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
    let planned = dry_run(&world);
    let removed = clean_up(&world);
    assert!(!has(&removed, RemovalKind::Qdisc), "{removed:?}");
    assert_eq!(planned, removed);
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

/// Asserts that a dry run changes nothing, that it lists every pin and directory, and that the cleanup then removes
/// what the dry run has listed. Returns the removed objects.
#[track_caller]
fn assert_dry_run_is_exact(world: &World) -> Vec<Removal> {
    let (before, existing) = (state(world), BTreeSet::from_iter(paths(world)));
    let planned = dry_run(world);
    assert_eq!(state(world), before, "the dry run has changed state");
    let is_path = |removal: &&Removal| Path::new(&removal.name).is_absolute();
    let listed: Vec<PathBuf> = planned.iter().filter(is_path).map(|removal| PathBuf::from(&removal.name)).collect();
    assert_eq!(listed.len(), existing.len(), "{listed:?}");
    assert_eq!(BTreeSet::from_iter(listed), existing);
    assert_eq!(clean_up(world), planned);
    assert_eq!(paths(world), Vec::<PathBuf>::new());
    assert_eq!(dry_run(world), []);
    planned
}

#[test]
fn dry_run_lists_exactly_what_the_cleanup_removes() {
    for with_filters in [false, true] {
        let mut world = World::fresh(1);
        if with_filters {
            world.use_filters();
        }
        let is_tcx = world.datapath().hooks.mechanism() == "tcx";
        world.assert_answers();
        world.node().nft("add table inet npl; add table inet foreign").unwrap();
        world.datapath = None;
        let removed = assert_dry_run_is_exact(&world);
        let kinds = if is_tcx { [RemovalKind::TcLink; 2] } else { [RemovalKind::TcFilter, RemovalKind::Qdisc] };
        for kind in kinds {
            assert!(has(&removed, kind), "{kind:?}: {removed:?}");
        }
        for hook in ["ingress", "egress"] {
            let is_on = |it: &Removal| it.device.as_deref() == Some("eth0") && it.hook.as_deref() == Some(hook);
            assert!(removed.iter().any(is_on), "{hook}: {removed:?}");
        }
        assert!(has(&removed, RemovalKind::NftablesTable));
        assert_eq!(world.node().nft("list tables").unwrap().trim(), "table inet foreign");
        world.wait_until_refused();
    }
}

#[test]
fn dry_run_on_a_node_without_kernel_state_lists_nothing() {
    let world = World::bare(0, Options::default());
    let bpffs = world.run.bpffs("empty").unwrap();
    let (planned, errors) = world.node().block_on(plan(bpffs.path())).unwrap();
    assert!(planned.is_empty() && errors.is_empty(), "{planned:?} {errors:?}");
    assert!(!bpffs.path().join(PIN_ROOT).exists());
}

/// A crash of the agent or of the cleanup can leave any subset of NPL's pins.
#[test]
fn dry_run_is_exact_after_a_crash_left_half_of_the_objects() {
    for (remainder, with_filters) in [(0, false), (1, false), (0, true), (1, true)] {
        let mut world = World::fresh(1);
        if with_filters {
            world.use_filters();
        }
        // Without TCX, NPL has added the qdisc itself. A directory records that NPL has added the qdisc, and the test
        // does not remove this directory.
        let is_added_by_npl = world.datapath().hooks.mechanism() != "tcx";
        world.datapath = None;
        let files = paths(&world).into_iter().filter(|path| path.is_file());
        for (index, pin) in files.enumerate() {
            if index % 2 == remainder {
                fs::remove_file(pin).unwrap();
            }
        }
        tc(&world, "qdisc replace dev eth0 clsact");
        let removed = assert_dry_run_is_exact(&world);
        assert!(has(&removed, RemovalKind::Map), "{removed:?}");
        assert_eq!(has(&removed, RemovalKind::Qdisc), is_added_by_npl, "{removed:?}");
        assert_eq!(tc(&world, "qdisc show dev eth0").contains("clsact"), !is_added_by_npl);
    }
}
