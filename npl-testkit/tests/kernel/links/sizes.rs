// SPDX-License-Identifier: Apache-2.0
//! Tests the maps whose size depends on the Node: a change of `--max-flows`, and the memory that the documents state.

use std::fs;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;
use std::time::Instant;

use aya::maps::MapData;
use aya::util::{KernelVersion, nr_cpus};
use nix::unistd::{SysconfVar, sysconf};
use npl_agent::core::model::Family;
use npl_agent::core::sizes::{MaxFlows, memory_of};
use npl_agent::datapath::{Datapath, Pins, Takeover};
use npl_common::catalog::{MAPS, MapKind};

use crate::bpffs_pool::BPFFS;
use crate::lab::with_lab;
use crate::world::World;

/// The maximum size in bytes of the kernel's own structure of a map, which the computed size does not include.
const STRUCTURE: u64 = 4096;
/// The first kernel that reports the memory of a map, instead of an estimate from its number of elements.
const REPORTS_MEMORY: (u8, u8) = (6, 4);

#[test]
fn another_number_of_flows_takes_effect_and_keeps_the_entries() {
    const FLOWS: u32 = 50_000;
    let mut world = World::fresh(1);
    world.assert_answers();
    let (mappings, before) = (world.datapath().mappings().unwrap(), world.datapath().tables.flow_count().unwrap());
    world.datapath = None;
    let path = world.bpffs.path().to_owned();
    let open = |flows| world.node().run(|| Datapath::open_sized(&path, MaxFlows::Flows(flows))).unwrap().unwrap();
    let mut next = open(FLOWS);
    let flows = FLOWS as usize;
    for family in Family::ALL {
        assert_eq!(next.tables.flow_capacities(family), [flows, flows / 2, flows / 16]);
    }
    assert_eq!((next.tables.flow_count().unwrap(), next.mappings().unwrap()), (before, mappings));
    world.attach(&mut next);
    assert_eq!(next.remove_predecessors(Instant::now()).unwrap(), Takeover::Complete(Vec::new()));
    let map = |path: &Path| MapData::from_pin(Pins::new(path).map("npl_flow_v4")).unwrap().info().unwrap().id();
    let first = map(&path);
    drop(next);
    let again = open(FLOWS);
    assert_eq!(map(&path), first, "an unchanged number of flows must not replace the map");
    world.datapath = Some(again);
    world.assert_answers();
}

#[test]
fn computed_memory_of_each_map_is_what_the_kernel_allocates() {
    let (major, minor) = REPORTS_MEMORY;
    if KernelVersion::current().unwrap() < KernelVersion::new(major, minor, 0) {
        return;
    }
    let cpus = u32::try_from(nr_cpus().unwrap()).unwrap();
    let page = u64::try_from(sysconf(SysconfVar::PAGE_SIZE).unwrap().unwrap()).unwrap();
    with_lab(|_lab| {
        let pins = Pins::new(Path::new(BPFFS));
        for map in MAPS.iter().filter(|map| map.kind != MapKind::LpmTrie) {
            for (position, name) in map.names.iter().enumerate() {
                let pinned = MapData::from_pin(pins.map(name)).unwrap();
                let computed = memory_of(map, position, pinned.info().unwrap().max_entries(), cpus, page);
                let file = format!("/proc/self/fdinfo/{}", pinned.fd().as_fd().as_raw_fd());
                let text = fs::read_to_string(file).unwrap();
                let allocated = text.lines().find_map(|line| line.strip_prefix("memlock:")).unwrap();
                let allocated: u64 = allocated.trim().parse().unwrap();
                assert!(computed + STRUCTURE >= allocated, "{name}: {computed} computed, {allocated} allocated");
                // The computed size may be up to twice the allocated size. The computation always rounds the number of
                // elements of an array up to a power of two; the kernel rounds this number up only for a process
                // without CAP_PERFMON.
                assert!(computed <= 2 * allocated + STRUCTURE, "{name}: {computed} computed, {allocated} allocated");
            }
        }
    });
}
