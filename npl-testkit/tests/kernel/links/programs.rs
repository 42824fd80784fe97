// SPDX-License-Identifier: Apache-2.0
//! Pinned programs: the next agent goes on with those that it would load itself, and with no others.

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

/// What every Node needs, in the order of names.
const ALWAYS: [&str; 4] = ["npl_egress", "npl_in_slow", "npl_ingress", "npl_out_slow"];

/// The ids of all pinned programs, by build and name.
pub(crate) fn pinned(bpffs: &Path) -> BTreeMap<(String, String), u32> {
    let pins = Pins::new(bpffs);
    let mut ids = BTreeMap::new();
    for build in pins.builds().unwrap() {
        for name in pins.program_names(&build).unwrap() {
            let id = ProgramInfo::from_pin(pins.program(&build, &name)).unwrap().id();
            ids.insert((build.clone(), name), id);
        }
    }
    ids
}

/// Makes every program look like one of another build.
pub(crate) fn make_strange(bpffs: &Path) -> PathBuf {
    let pins = Pins::new(bpffs);
    let build = pins.builds().unwrap().pop().unwrap();
    let strange = pins.programs_of("another");
    fs::rename(pins.programs_of(&build), &strange).unwrap();
    strange
}

impl World {
    /// As an agent that died left it; the folder of its programs.
    fn left_behind(&mut self) -> PathBuf {
        self.datapath = None;
        let pins = Pins::new(self.bpffs.path());
        pins.programs_of(&pins.builds().unwrap()[0])
    }

    /// A next agent loads every program anew, and works.
    #[track_caller]
    fn assert_all_are_loaded_anew(&mut self, before: &BTreeMap<(String, String), u32>) {
        self.install();
        assert_are_others(&pinned(self.bpffs.path()), before);
        self.assert_answers();
    }
}

/// The same names, and no id that was there before.
#[track_caller]
fn assert_are_others(now: &BTreeMap<(String, String), u32>, before: &BTreeMap<(String, String), u32>) {
    assert!(now.keys().eq(before.keys()), "{before:?} {now:?}");
    assert!(now.iter().all(|(name, id)| before[name] != *id), "{before:?} {now:?}");
}

#[test]
fn next_agent_goes_on_with_the_programs_of_the_last() {
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
        assert!(before.iter().any(|((_, pinned), of)| pinned == name && *of == id), "{name} has id {id}: {before:?}");
    }
    world.assert_answers();
}

#[test]
fn programs_of_another_build_go_once_all_devices_carry_their_own() {
    let mut world = World::fresh(1);
    world.datapath = None;
    let before = pinned(world.bpffs.path());
    let strange = make_strange(world.bpffs.path());
    let mut next = world.open();
    assert!(strange.exists(), "devices still carry them");
    world.assert_answers();
    world.attach(&mut next);
    assert!(!strange.exists());
    assert_are_others(&pinned(world.bpffs.path()), &before);
    world.assert_answers();
}

#[test]
fn programs_over_a_map_that_is_not_pinned_any_more_are_loaded_anew() {
    let mut world = World::fresh(1);
    // One map that all programs use, and one that the plain path does not know.
    for map in [MAP_MAPPING_V4, MAP_FRAGMENT_BUFFER] {
        world.left_behind();
        let before = pinned(world.bpffs.path());
        fs::remove_file(Pins::new(world.bpffs.path()).map(map)).unwrap();
        world.assert_all_are_loaded_anew(&before);
    }
}

#[test]
fn programs_whose_constants_are_not_known_are_loaded_anew() {
    let mut world = World::fresh(1);
    let folder = world.left_behind();
    let before = pinned(world.bpffs.path());
    fs::remove_file(folder.join("constants_0")).unwrap();
    world.assert_all_are_loaded_anew(&before);
}

#[test]
fn program_under_the_name_of_another_is_not_taken_for_it() {
    let mut world = World::fresh(1);
    let folder = world.left_behind();
    let before = pinned(world.bpffs.path());
    let [ingress, egress, aside] = [PROG_INGRESS, PROG_EGRESS, "aside"].map(|name| folder.join(name));
    for (from, to) in [(&ingress, &aside), (&egress, &ingress), (&aside, &egress)] {
        fs::rename(from, to).unwrap();
    }
    world.assert_all_are_loaded_anew(&before);
}

#[test]
fn pin_that_is_no_program_is_replaced() {
    let mut world = World::fresh(1);
    let places: [fn(&Path); 3] = [
        |pin| HashMap::<MapData, u32, u64>::create(1, 0).unwrap().pin(pin).unwrap(),
        |pin| fs::create_dir(pin).unwrap(),
        // As after a death between two pins.
        |_nothing| {},
    ];
    for place in places {
        let folder = world.left_behind();
        let before = pinned(world.bpffs.path());
        let pin = folder.join(SLOW_PATH_PROGRAMS[0]);
        fs::remove_file(&pin).unwrap();
        place(&pin);
        world.assert_all_are_loaded_anew(&before);
    }
}

#[test]
fn program_for_a_device_without_headers_is_loaded_once() {
    let mut world = World::fresh(1);
    let mut ids = Vec::new();
    // The first agent loads it after its start, the second finds it.
    for _ in 0..2 {
        ids.push(world.datapath().hooks.load_program(PROG_INGRESS_L3).unwrap().info().unwrap().id());
        world.datapath = None;
        world.datapath = Some(world.open());
    }
    assert_eq!(ids[0], ids[1]);
    let names: Vec<_> = pinned(world.bpffs.path()).into_keys().map(|(_, name)| name).collect();
    assert!(names.iter().any(|name| *name == PROGRAMS[2]) && names.len() == ALWAYS.len() + 2, "{names:?}");
    world.assert_answers();
}

#[test]
fn jumps_that_somebody_removed_are_back_with_the_next_agent() {
    let mut world = World::fresh(1);
    world.datapath = None;
    let before = pinned(world.bpffs.path());
    let jumps = MapData::from_pin(Pins::new(world.bpffs.path()).map(MAP_SLOW_PATH)).and_then(Map::from_map_data);
    let mut jumps = ProgramArray::try_from(jumps.unwrap()).unwrap();
    for index in 0..2 {
        jumps.clear_index(&index).unwrap();
    }
    drop(world.open());
    assert_eq!(pinned(world.bpffs.path()), before);
    let fragmented = traffic::udp_exchange(world.client(), world.frontend(), 4000, 4000).unwrap();
    assert_eq!(fragmented.pod, "web-0");
}
