// SPDX-License-Identifier: Apache-2.0
//! The state that must be the same before and after churn: NPL's objects in the kernel, the Node's network, and the
//! resources of the agent's process. Each part is text, so that a failed test shows the difference.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::time::Duration;

use aya::maps::{MapData, MapType};
use aya::programs::{loaded_links, loaded_programs};
use npl_common::names::{MAP_NODE_ADDRESS_BY_INDEX_V4, MAP_NODE_ADDRESS_BY_INDEX_V6, MAP_STATS, PIN_ROOT, PINNED_MAPS};
use npl_testkit::node_state::{self, State, add_tree, difference};
use npl_testkit::{maps, poll};

use crate::world::World;

/// The time limit for the agent to remove the state of removed objects. The longest of the agent's own time limits is
/// the grace period of addresses and devices, 10 s.
const SETTLED_WITHIN: Duration = Duration::from_mins(1);

/// The time limit for the agent to end unused threads, and to close unused connections to the API server.
const CLOSED_WITHIN: Duration = Duration::from_mins(2);

/// The arrays whose elements return to zero when their mappings or addresses are removed. The elements of other arrays
/// are caches, counters or times.
const EMPTIED_ARRAYS: [&str; 3] = [MAP_NODE_ADDRESS_BY_INDEX_V4, MAP_NODE_ADDRESS_BY_INDEX_V6, MAP_STATS];

/// The elements of `MAP_STATS` with the sums over removed mappings, one per IP family, which never return to zero.
const SUMS: usize = 2;

/// Returns NPL's objects in the kernel, and the Node's network.
pub(super) fn of_kernel(world: &World) -> State {
    let uplink = world.topology.client().uplink.name();
    let filters = ["ingress", "egress"].map(|side| format!("tc filter show dev {uplink} {side}"));
    let mut state = of_bpf(world);
    let further = [&["nft --stateless list ruleset".to_owned()], &filters[..]].concat();
    state.extend(node_state::of_network(world.topology.node(), &further).unwrap());
    state
}

/// Returns the pins, the elements and memory of maps, and the number of programs and links that use NPL's maps. These
/// numbers do not contain the objects of other tests.
fn of_bpf(world: &World) -> State {
    let (mut state, mut ids) = (State::new(), BTreeSet::new());
    for name in PINNED_MAPS {
        let pin = world.pins().join(name);
        let map = MapData::from_pin(&pin).unwrap();
        let info = map.info().unwrap();
        ids.insert(info.id());
        let kind = info.map_type().unwrap();
        if matches!(kind, MapType::Hash | MapType::LruHash | MapType::LpmTrie) || EMPTIED_ARRAYS.contains(name) {
            let sums = if *name == MAP_STATS { SUMS } else { 0 };
            let used = maps::used_elements(&pin).unwrap().saturating_sub(sums);
            state.insert(format!("elements of {name}"), used.to_string());
        }
        state.insert(format!("memory of {name}"), memory_of(&map));
    }
    let mut programs = BTreeSet::new();
    for program in loaded_programs().flatten() {
        let maps = program.map_ids().ok().flatten().unwrap_or_default();
        if maps.iter().any(|map| ids.contains(map)) {
            programs.insert(program.id());
        }
    }
    let links = loaded_links().flatten().filter(|link| programs.contains(&link.program_id())).count();
    state.insert("programs".to_owned(), programs.len().to_string());
    state.insert("links".to_owned(), links.to_string());
    add_tree(&world.bpffs.path().join(PIN_ROOT), &mut state).unwrap();
    state
}

/// Returns the kernel memory of a map in bytes, as the kernel reports it for a descriptor of the map.
fn memory_of(map: &MapData) -> String {
    let file = format!("/proc/self/fdinfo/{}", map.fd().as_fd().as_raw_fd());
    let text = fs::read_to_string(file).unwrap();
    text.lines().find_map(|line| line.strip_prefix("memlock:")).unwrap().trim().to_owned()
}

/// The resources of the agent's process.
#[derive(Clone, Debug, Default)]
pub(super) struct Resources {
    /// The number of open files of each kind, such as `socket`, and of threads.
    pub(super) counts: BTreeMap<String, usize>,
    /// The anonymous resident memory in kB: heap and stacks.
    pub(super) memory: u64,
}

impl Resources {
    /// Replaces each number that is larger than the other one.
    pub(super) fn reduce_to(&mut self, other: &Self) {
        for (kind, count) in &mut self.counts {
            *count = (*count).min(other.counts.get(kind).copied().unwrap_or_default());
        }
        self.memory = self.memory.min(other.memory);
    }
}

/// Returns the resources of the agent's process.
pub(super) fn of_process(world: &mut World) -> Resources {
    let process = format!("/proc/{}", world.agent().process().id());
    let mut counts = BTreeMap::new();
    for entry in fs::read_dir(format!("{process}/fd")).unwrap() {
        // A descriptor may be closed after it was listed.
        let Ok(target) = fs::read_link(entry.unwrap().path()) else { continue };
        let target = target.display().to_string();
        // `socket:[12345]` and `pipe:[12345]` contain an inode number.
        let kind = target.split_once(":[").map_or(target.as_str(), |(kind, _)| kind).to_owned();
        *counts.entry(format!("open files: {kind}")).or_default() += 1;
    }
    counts.insert("threads".to_owned(), fs::read_dir(format!("{process}/task")).unwrap().count());
    let status = fs::read_to_string(format!("{process}/status")).unwrap();
    let memory = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    let memory = memory.trim().trim_end_matches(" kB").parse().unwrap();
    Resources { counts, memory }
}

/// Waits until the kernel's state is the same as before.
#[track_caller]
pub(super) fn wait_for_kernel(world: &World, before: &State, stage: &str) {
    let mut now = State::new();
    let waited = poll::until("the kernel state of before the churn", SETTLED_WITHIN, || {
        now = of_kernel(world);
        (now == *before).then_some(())
    });
    assert!(waited.is_ok(), "{stage}: {waited:?}\n{}", difference(before, &now));
}

/// Waits until the agent has no more open files of any kind, and no more threads, than before. Threads of the agent's
/// pool, and connections to the API server, end only some time after their last use.
#[track_caller]
pub(super) fn wait_for_process(world: &mut World, before: &Resources) -> Resources {
    let mut now = Resources::default();
    let waited = poll::until("the open files and threads of before the churn", CLOSED_WITHIN, || {
        now = of_process(world);
        let has_more = now.counts.iter().any(|(kind, count)| before.counts.get(kind).is_none_or(|old| count > old));
        (!has_more).then_some(())
    });
    assert!(waited.is_ok(), "{waited:?}\nbefore {:#?}\nafter {:#?}", before.counts, now.counts);
    now
}
