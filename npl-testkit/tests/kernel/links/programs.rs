// SPDX-License-Identifier: Apache-2.0
//! Tests pinned programs: the next agent adopts programs that are identical to its own, and no others.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use aya::maps::{HashMap, Map, MapData, ProgramArray};
use aya::programs::ProgramInfo;
use npl_agent::datapath::Pins;
use npl_common::names::{
    MAP_FRAGMENT_BUFFER, MAP_MAPPING_V4, MAP_SLOW_PATH, PROG_EGRESS, PROG_INGRESS, PROG_INGRESS_L3, PROGRAMS,
    SLOW_PATH_PROGRAMS,
};
use npl_testkit::traffic;

use crate::world::World;

/// The programs that every Node needs, ordered by name.
const ALWAYS: [&str; 6] =
    ["npl_egress", "npl_in_slow4", "npl_in_slow6", "npl_ingress", "npl_out_slow4", "npl_out_slow6"];

/// Properties of all pinned programs, by build and name.
pub(crate) fn pinned_infos(bpffs: &Path) -> BTreeMap<(String, String), ProgramInfo> {
    let pins = Pins::new(bpffs);
    let mut infos = BTreeMap::new();
    for build in pins.builds().unwrap() {
        for name in pins.program_names(&build).unwrap() {
            let info = ProgramInfo::from_pin(pins.program(&build, &name)).unwrap();
            infos.insert((build.clone(), name), info);
        }
    }
    infos
}

/// IDs of all pinned programs, by build and name.
pub(crate) fn pinned(bpffs: &Path) -> BTreeMap<(String, String), u32> {
    pinned_infos(bpffs).into_iter().map(|(key, info)| (key, info.id())).collect()
}

/// Renames the directory of pinned programs, as if another build had pinned them.
pub(crate) fn rename_build(bpffs: &Path) -> PathBuf {
    let pins = Pins::new(bpffs);
    let build = pins.builds().unwrap().pop().unwrap();
    let renamed = pins.programs_of("another");
    fs::rename(pins.programs_of(&build), &renamed).unwrap();
    renamed
}

impl World {
    /// Drops the datapath as if the agent had died, and returns the directory of its programs.
    fn stop_agent(&mut self) -> PathBuf {
        self.datapath = None;
        let pins = Pins::new(self.bpffs.path());
        pins.programs_of(&pins.builds().unwrap()[0])
    }

    /// Asserts that the next agent reloads every program and serves requests.
    #[track_caller]
    fn assert_all_reloaded(&mut self, before: &BTreeMap<(String, String), u32>) {
        self.install();
        assert_different_ids(&pinned(self.bpffs.path()), before);
        self.assert_answers();
    }
}

/// Asserts that the programs have the same names but different IDs.
#[track_caller]
fn assert_different_ids(now: &BTreeMap<(String, String), u32>, before: &BTreeMap<(String, String), u32>) {
    assert!(now.keys().eq(before.keys()), "{before:?} {now:?}");
    assert!(now.iter().all(|(name, id)| before[name] != *id), "{before:?} {now:?}");
}

#[test]
fn next_agent_adopts_pinned_programs() {
    let mut world = World::fresh(1);
    let before = pinned(world.bpffs.path());
    let names: Vec<&str> = before.keys().map(|(_, name)| name.as_str()).collect();
    assert_eq!(names, ALWAYS);
    world.datapath = None;
    let mut next = world.open();
    world.attach(&mut next);
    assert_eq!(pinned(world.bpffs.path()), before);
    for name in [PROG_INGRESS, PROG_EGRESS] {
        let id = next.hooks.load_program(name).unwrap().info().unwrap().id();
        assert!(
            before.iter().any(|((_, pinned), of)| pinned == name && *of == id),
            "{name} has the ID {id}: {before:?}"
        );
    }
    world.assert_answers();
}

#[test]
fn programs_of_another_build_are_removed_once_all_devices_use_new_ones() {
    let mut world = World::fresh(1);
    world.datapath = None;
    let before = pinned(world.bpffs.path());
    let renamed = rename_build(world.bpffs.path());
    let mut next = world.open();
    assert!(renamed.exists(), "the other build must stay pinned while devices use its programs");
    world.assert_answers();
    world.attach(&mut next);
    assert!(!renamed.exists());
    assert_different_ids(&pinned(world.bpffs.path()), &before);
    world.assert_answers();
}

#[test]
fn programs_that_use_an_unpinned_map_are_loaded_again() {
    let mut world = World::fresh(1);
    // The first map is used by all programs, the second only by the slow path.
    for map in [MAP_MAPPING_V4, MAP_FRAGMENT_BUFFER] {
        world.stop_agent();
        let before = pinned(world.bpffs.path());
        fs::remove_file(Pins::new(world.bpffs.path()).map(map)).unwrap();
        world.assert_all_reloaded(&before);
    }
}

#[test]
fn programs_without_recorded_constants_are_loaded_again() {
    let mut world = World::fresh(1);
    let directory = world.stop_agent();
    let before = pinned(world.bpffs.path());
    fs::remove_file(directory.join("constants_0")).unwrap();
    world.assert_all_reloaded(&before);
}

#[test]
fn program_pinned_under_another_name_is_not_adopted() {
    let mut world = World::fresh(1);
    let directory = world.stop_agent();
    let before = pinned(world.bpffs.path());
    let [ingress, egress, aside] = [PROG_INGRESS, PROG_EGRESS, "aside"].map(|name| directory.join(name));
    for (from, to) in [(&ingress, &aside), (&egress, &ingress), (&aside, &egress)] {
        fs::rename(from, to).unwrap();
    }
    world.assert_all_reloaded(&before);
}

#[test]
fn pin_other_than_a_program_is_replaced() {
    let mut world = World::fresh(1);
    let replacements: [fn(&Path); 3] = [
        |pin| HashMap::<MapData, u32, u64>::create(1, 0).unwrap().pin(pin).unwrap(),
        |pin| fs::create_dir(pin).unwrap(),
        // This case simulates an agent that was killed after it had pinned only some of the programs.
        |_nothing| {},
    ];
    for replacement in replacements {
        let directory = world.stop_agent();
        let before = pinned(world.bpffs.path());
        let pin = directory.join(SLOW_PATH_PROGRAMS[0]);
        fs::remove_file(&pin).unwrap();
        replacement(&pin);
        world.assert_all_reloaded(&before);
    }
}

#[test]
fn program_for_devices_without_link_layer_header_is_loaded_once() {
    let mut world = World::fresh(1);
    let mut ids = Vec::new();
    // The first agent loads the program when it is needed, and the second agent adopts it.
    for _ in 0..2 {
        ids.push(world.datapath().hooks.load_program(PROG_INGRESS_L3).unwrap().info().unwrap().id());
        world.datapath = None;
        world.datapath = Some(world.open());
    }
    assert_eq!(ids[0], ids[1]);
    let names: Vec<_> = pinned(world.bpffs.path()).into_keys().map(|(_, name)| name).collect();
    assert!(names.iter().any(|name| *name == PROGRAMS[2]) && names.len() == ALWAYS.len() + 3, "{names:?}");
    world.assert_answers();
}

#[test]
fn removed_tail_calls_are_restored_by_the_next_agent() {
    let mut world = World::fresh(1);
    world.datapath = None;
    let before = pinned(world.bpffs.path());
    let slow_path = MapData::from_pin(Pins::new(world.bpffs.path()).map(MAP_SLOW_PATH)).and_then(Map::from_map_data);
    let mut slow_path = ProgramArray::try_from(slow_path.unwrap()).unwrap();
    for index in 0..4 {
        slow_path.clear_index(&index).unwrap();
    }
    drop(world.open());
    assert_eq!(pinned(world.bpffs.path()), before);
    let fragmented = traffic::udp_exchange(world.client(), world.frontend(), 4000, 4000).unwrap();
    assert_eq!(fragmented.pod, "web-0");
}
