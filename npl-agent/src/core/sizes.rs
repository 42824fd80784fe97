// SPDX-License-Identifier: Apache-2.0
//! Computes the sizes of the maps that depend on the Node's memory and CPUs: the flow tables and the socket reverse NAT
//! maps. All other maps have a constant size. In some of these maps, the programs select a slot by a hash with a
//! constant mask. The number of entries of the remaining maps has a documented limit.

use std::{fmt, str::FromStr};

use npl_common::{
    catalog::{MAPS, Map, MapKind},
    flow::{sctp_flows, udp_flows},
    names::{
        MAP_FLOW_V4, MAP_FLOW_V6, MAP_SCTP_FLOW_V4, MAP_SCTP_FLOW_V6, MAP_SOCKET_RNAT_V4, MAP_SOCKET_RNAT_V6,
        MAP_UDP_FLOW_V4, MAP_UDP_FLOW_V6,
    },
};

/// The number of free elements of an LRU map that the kernel reserves for each possible CPU (`LOCAL_FREE_TARGET`). A
/// CPU cannot use the elements that are reserved for another CPU, so the kernel may evict entries although some
/// elements are free.
const FREE_PER_CPU: u32 = 128;
/// By default, the TCP flow table of each IP family has room for about one flow per this number of bytes of the
/// machine's memory.
const MEMORY_PER_FLOW: u64 = 32 << 10;
/// The smallest and the largest number of flows that the agent chooses by default.
const DEFAULT_FLOWS: [u32; 2] = [32_768, 262_144];
/// The smallest and the largest number that `--max-flows` accepts.
const ACCEPTED_FLOWS: [u32; 2] = [4096, 8_388_608];
/// The number of flows for which the socket reverse NAT map gets one entry: only connections of local clients need an
/// entry in this map.
const FLOWS_PER_LOCAL_CLIENT: u32 = 8;
/// The minimum number of entries of the socket reverse NAT map.
const LEAST_SOCKET_RNAT: u32 = 16_384;
/// The memory limit, in bytes, of the agent's container in the Helm chart.
pub const CONTAINER_LIMIT: u64 = 480 << 20;
/// The memory in bytes that the agent and its programs need in the container, without the maps.
pub const AGENT_MEMORY: u64 = 64 << 20;

/// The size in bytes of the kernel's `struct htab_elem` without key and value.
const ELEMENT_HEADER: u64 = 48;
/// The size in bytes of the kernel's `struct bucket`.
const BUCKET: u64 = 16;
const POINTER: u64 = 8;
/// The size in bytes of a memory page on amd64, and on most arm64 kernels; other arm64 kernels have pages of 16 KiB or
/// 64 KiB.
pub const USUAL_PAGE: u64 = 4096;
/// The number of metadata pages of a ring buffer, besides the pages of its data: the kernel's `RINGBUF_NR_META_PAGES`.
const RING_BUFFER_PAGES: u64 = 3;

/// The value of `--max-flows`: the number of flows for which the TCP flow table of each IP family has room. The UDP
/// table has room for half as many flows, and the SCTP table for a sixteenth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MaxFlows {
    /// The number of flows follows from the memory and the CPUs of the machine.
    #[default]
    Auto,
    /// The operator has set this number of flows.
    Flows(u32),
}

/// The error for a text that is neither `auto` nor a number within the limits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a number of flows: give auto or a number from {least} to {most}, for example 131072",
    least = ACCEPTED_FLOWS[0], most = ACCEPTED_FLOWS[1]
)]
pub struct MaxFlowsError {
    text: String,
}

impl FromStr for MaxFlows {
    type Err = MaxFlowsError;

    fn from_str(text: &str) -> Result<Self, MaxFlowsError> {
        let [least, most] = ACCEPTED_FLOWS;
        let number = || text.parse().ok().filter(|flows| (least..=most).contains(flows));
        let parsed = if text == "auto" { Some(Self::Auto) } else { number().map(Self::Flows) };
        parsed.ok_or_else(|| MaxFlowsError { text: text.to_owned() })
    }
}

impl fmt::Display for MaxFlows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Flows(flows) => flows.fmt(f),
        }
    }
}

/// The facts about a machine on which the sizes depend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// The number of CPUs for which the kernel has reserved per-CPU memory, including CPUs that are not present.
    pub possible_cpus: u32,
    /// The memory of the machine in bytes.
    pub memory: u64,
    /// The size of a memory page in bytes.
    pub page: u64,
}

/// The sizes of the maps that depend on the Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableSizes {
    /// The number of flows for which the TCP flow table of each IP family has room.
    pub flows: u32,
    /// The number of entries for which the socket reverse NAT map of each IP family has room.
    pub socket_rnat: u32,
    possible_cpus: u32,
    page: u64,
}

impl TableSizes {
    /// Computes the sizes for a machine. The default number of flows is the largest power of two within
    /// [`DEFAULT_FLOWS`] that meets two conditions. The machine has at least 24 KiB of memory per flow (three quarters
    /// of [`MEMORY_PER_FLOW`]). All maps and the agent together fit into the memory limit of the chart's container. If
    /// no number meets both conditions, the default is the smallest number in [`DEFAULT_FLOWS`].
    pub fn of(machine: Machine, max_flows: MaxFlows) -> Self {
        let Machine { possible_cpus, memory, page } = machine;
        if let MaxFlows::Flows(flows) = max_flows {
            return Self::with_flows(flows, possible_cpus, page);
        }
        let by_memory = memory / MEMORY_PER_FLOW;
        let [least, most] = DEFAULT_FLOWS;
        let is_possible = |flows: &u32| {
            // Three quarters of `MEMORY_PER_FLOW` are sufficient, because the kernel reports a few percent less memory
            // than the machine has.
            u64::from(*flows) * 3 / 4 <= by_memory
                && Self::with_flows(*flows, possible_cpus, page).memory() + AGENT_MEMORY <= CONTAINER_LIMIT
        };
        let halves = std::iter::successors(Some(most), |flows| Some(flows / 2)).take_while(|flows| *flows > least);
        Self::with_flows(halves.into_iter().find(is_possible).unwrap_or(least), possible_cpus, page)
    }

    fn with_flows(flows: u32, possible_cpus: u32, page: u64) -> Self {
        Self { flows, socket_rnat: (flows / FLOWS_PER_LOCAL_CLIENT).max(LEAST_SOCKET_RNAT), possible_cpus, page }
    }

    /// Returns the `max_entries` with which the agent creates a map: the number of entries in this struct plus the
    /// elements that the kernel reserves for each CPU. `None` for a map of constant size.
    pub fn max_entries(&self, map: &str) -> Option<u32> {
        let stated = match map {
            MAP_FLOW_V4 | MAP_FLOW_V6 => self.flows,
            MAP_UDP_FLOW_V4 | MAP_UDP_FLOW_V6 => udp_flows(self.flows),
            MAP_SCTP_FLOW_V4 | MAP_SCTP_FLOW_V6 => sctp_flows(self.flows),
            MAP_SOCKET_RNAT_V4 | MAP_SOCKET_RNAT_V6 => self.socket_rnat,
            _ => return None,
        };
        Some(stated.saturating_add(kept_aside(self.possible_cpus)))
    }

    /// Returns an upper bound, in bytes, of the memory that the kernel allocates for all maps on this machine. The
    /// bound does not include ranges of allowed sources: the kernel allocates memory for a range when the agent writes
    /// the range.
    pub fn memory(&self) -> u64 {
        let of_map = |map: &Map| {
            let sizes = map.names.iter().enumerate().map(|(position, name)| {
                let entries = self.max_entries(name).unwrap_or(map.capacity);
                memory_of(map, position, entries, self.possible_cpus, self.page)
            });
            sizes.sum::<u64>()
        };
        MAPS.iter().map(of_map).sum()
    }
}

/// Whether the size of a map depends on the Node.
pub fn follows_the_node(map: &str) -> bool {
    TableSizes::with_flows(0, 0, USUAL_PAGE).max_entries(map).is_some()
}

/// The number of entries that an LRU map with this `max_entries` can hold before the kernel evicts an entry.
pub const fn stated_entries(max_entries: u32, possible_cpus: u32) -> u32 {
    max_entries.saturating_sub(kept_aside(possible_cpus))
}

const fn kept_aside(possible_cpus: u32) -> u32 {
    FREE_PER_CPU.saturating_mul(possible_cpus)
}

/// Returns the memory of one map in bytes. `map` is an entry of the map catalog: one map, or an IPv4 map and an IPv6
/// map of the same purpose. `position` selects the map: 0 for the only or the IPv4 map, 1 for the IPv6 map. `page` is the
/// size of a memory page in bytes.
pub fn memory_of(map: &Map, position: usize, entries: u32, possible_cpus: u32, page: u64) -> u64 {
    let size = |content: npl_common::catalog::Content| (content.size(position) as u64).next_multiple_of(8);
    let (entries, cpus) = (u64::from(entries), u64::from(possible_cpus));
    // The kernel rounds the number of buckets of a hash table up to a power of two. If the process that creates an
    // array map lacks CAP_PERFMON, the kernel also rounds the array's number of elements up.
    let rounded = entries.next_power_of_two();
    let element = ELEMENT_HEADER + size(map.key) + size(map.value);
    match map.kind {
        MapKind::Array => rounded * size(map.value),
        MapKind::PerCpuArray => rounded * POINTER + entries * cpus * size(map.value),
        // For updates of a full map, the kernel allocates one element per CPU in addition to `entries`.
        MapKind::Hash => (entries + cpus) * element + rounded * BUCKET,
        MapKind::LruHash => entries * element + rounded * BUCKET,
        MapKind::LpmTrie => 0,
        MapKind::ProgramArray => rounded * POINTER,
        // Besides data and metadata pages, a ring buffer needs an array of pointers to pages, in which each data page
        // occurs twice because the kernel maps the data twice.
        MapKind::RingBuffer => {
            entries + RING_BUFFER_PAGES * page + (RING_BUFFER_PAGES + 2 * entries.div_ceil(page)) * POINTER
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn machine(possible_cpus: u32, memory: u64) -> Machine {
        Machine { possible_cpus, memory, page: USUAL_PAGE }
    }

    fn auto(possible_cpus: u32, memory: u64) -> TableSizes {
        TableSizes::of(machine(possible_cpus, memory), MaxFlows::Auto)
    }

    #[test]
    fn the_default_follows_the_memory_within_its_limits() {
        let flows = |memory| auto(4, memory).flows;
        assert_eq!(
            [GIB / 2, GIB, 2 * GIB, 4 * GIB, 8 * GIB, 512 * GIB].map(flows),
            [32_768, 32_768, 65_536, 131_072, 262_144, 262_144]
        );
        assert_eq!(flows(4 * GIB * 9 / 10), 131_072, "the kernel keeps a part of the memory for itself");
    }

    #[test]
    fn a_value_is_auto_or_a_number_within_the_limits() {
        for (text, expected) in [
            ("auto", MaxFlows::Auto),
            ("4096", MaxFlows::Flows(4096)),
            ("100000", MaxFlows::Flows(100_000)),
            ("8388608", MaxFlows::Flows(8_388_608)),
        ] {
            assert_eq!(text.parse(), Ok(expected));
            assert_eq!(expected.to_string(), text);
        }
        for text in ["", "0", "4095", "8388609", "-1", "1e6", "128k", "all", "99999999999999999999"] {
            let error = text.parse::<MaxFlows>().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")) && error.contains("from 4096 to 8388608"), "{error}");
        }
    }

    #[test]
    fn only_maps_that_depend_on_the_node_have_a_variable_size() {
        let sizes = auto(2, 8 * GIB);
        let sized: Vec<_> = MAPS.iter().flat_map(|map| map.names).filter_map(|it| sizes.max_entries(it)).collect();
        assert_eq!(sized, [262_400, 262_400, 131_328, 131_328, 16_640, 16_640, 33_024, 33_024]);
    }

    /// Reads the container's memory request and limit from the chart's values; `deploy/npl.yaml` is rendered from these
    /// values.
    #[test]
    fn default_maps_and_the_agent_fit_into_the_containers_request_and_limit() {
        let values = include_str!("../../../deploy/chart/npl/values.yaml");
        let quantity = |name: &str| {
            let (_, rest) = values.split_once("\nresources:\n").unwrap();
            let (_, rest) = rest.split_once(&format!("  {name}:\n")).unwrap();
            let (_, rest) = rest.split_once("memory: ").unwrap();
            rest.split_once("Mi\n").unwrap().0.parse::<u64>().unwrap() << 20
        };
        assert_eq!(quantity("limits"), CONTAINER_LIMIT);
        let needed = |cpus| auto(cpus, 4096 * GIB).memory() + AGENT_MEMORY;
        assert!(needed(64) <= quantity("requests"), "{}", needed(64));
        for cpus in [128, 512, 768] {
            assert!(needed(cpus) <= quantity("limits"), "{cpus} CPUs: {}", needed(cpus));
        }
        assert_eq!(auto(768, 4096 * GIB).flows, 262_144, "the container's memory limit does not reduce the default");
    }

    /// The memory of the ring buffer depends on the page size; the memory of all other maps does not. With pages of 64
    /// KiB instead of 4 KiB, the three metadata pages of the ring buffer are larger, and the buffer has pointers to
    /// fewer data pages.
    #[test]
    fn only_the_ring_buffer_depends_on_the_size_of_a_page() {
        let of = |page| TableSizes::of(Machine { page, ..machine(8, 8 * GIB) }, MaxFlows::Auto);
        let (usual, large) = (of(USUAL_PAGE), of(64 << 10));
        assert_eq!(usual.flows, large.flows);
        assert_eq!(large.memory() - usual.memory(), 3 * (60 << 10) - 2 * (64 - 4) * POINTER);
        let ring = MAPS.iter().find(|map| map.kind == MapKind::RingBuffer).unwrap();
        assert_eq!(u64::from(ring.capacity) % (64 << 10), 0, "the kernel requires a multiple of its page size");
    }

    proptest! {
        #[test]
        fn sizes_and_memory_never_decrease_with_memory_or_flows(
            cpus in 1_u32..1024, memory in 0..(64 * GIB), more in 0..(64 * GIB), flows in 4096_u32..8_388_608,
        ) {
            let (small, large) = (auto(cpus, memory), auto(cpus, memory + more));
            prop_assert!(small.flows <= large.flows && small.socket_rnat <= large.socket_rnat);
            prop_assert!(small.memory() <= large.memory());
            let of = |flows| TableSizes::of(machine(cpus, memory), MaxFlows::Flows(flows));
            prop_assert!(of(4096).memory() <= of(flows).memory() && of(flows).memory() <= of(8_388_608).memory());
            let more_cpus = TableSizes::of(machine(cpus + 1, memory), MaxFlows::Flows(flows));
            prop_assert!(of(flows).memory() < more_cpus.memory());
        }

        #[test]
        fn the_stated_number_is_available_whatever_the_number_of_cpus(
            cpus in 1_u32..8192, memory in 0..(64 * GIB), flows in 4096_u32..8_388_608,
        ) {
            for sizes in [auto(cpus, memory), TableSizes::of(machine(cpus, memory), MaxFlows::Flows(flows))] {
                for (maps, expected) in [
                    ([MAP_FLOW_V4, MAP_FLOW_V6], sizes.flows),
                    ([MAP_UDP_FLOW_V4, MAP_UDP_FLOW_V6], sizes.flows / 2),
                    ([MAP_SCTP_FLOW_V4, MAP_SCTP_FLOW_V6], sizes.flows / 16),
                ] {
                    for map in maps {
                        prop_assert_eq!(stated_entries(sizes.max_entries(map).unwrap(), cpus), expected);
                    }
                }
                for map in [MAP_SOCKET_RNAT_V4, MAP_SOCKET_RNAT_V6] {
                    prop_assert_eq!(stated_entries(sizes.max_entries(map).unwrap(), cpus), sizes.socket_rnat);
                }
            }
            let given = TableSizes::of(machine(cpus, memory), MaxFlows::Flows(flows));
            prop_assert_eq!(given.flows, flows);
        }

        #[test]
        fn default_sizes_fit_into_the_container_on_machines_of_up_to_768_cpus(
            cpus in 1_u32..=768, memory in 0..(4096 * GIB),
        ) {
            prop_assert!(auto(cpus, memory).memory() + AGENT_MEMORY <= CONTAINER_LIMIT);
        }
    }
}
