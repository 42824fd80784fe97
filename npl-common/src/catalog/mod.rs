// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Describes all maps and programs, for `docs/reference/maps.md`. A test of the agent compares the described maps with
//! those of the kernel object.

mod programs;

pub use self::programs::{PROGRAM_LIST, Program};
use crate::{
    config::{Config, MAX_PRE_TC_DEVICES},
    crc,
    flow::{FlowKeyV4, FlowKeyV6, FlowV4, FlowV6, MAX_FLOWS, MAX_SCTP_FLOWS, MAX_UDP_FLOWS},
    fragment,
    fragment_buffer::{self, SavedFrame},
    half_open, host_connection,
    layout::Layout,
    lookup_cache::{CACHED_MAPPINGS, CachedMappingV4, CachedMappingV6, CachedReply},
    mapping::{
        BackendV4, BackendV6, Endpoint, EndpointV4, EndpointV6, Frontend, LocalAddress, MAX_LOCAL_ADDRESSES,
        MAX_MAPPINGS, MAX_SOURCE_RANGES, NodeAddressV4, NodeAddressV6, SourceV4, SourceV6,
    },
    names::{
        MAP_ALLOW_V4, MAP_ALLOW_V6, MAP_CACHED_NEXT_HOP, MAP_CONFIG, MAP_CRC, MAP_ENDPOINT_V4, MAP_ENDPOINT_V6,
        MAP_FLOW_V4, MAP_FLOW_V6, MAP_FRAGMENT_BUFFER, MAP_FRAGMENT_V4, MAP_FRAGMENT_V6, MAP_HALF_OPEN_V4,
        MAP_HALF_OPEN_V6, MAP_HOST_CONNECTION_V4, MAP_HOST_CONNECTION_V6, MAP_LOOKUP_CACHE_V4, MAP_LOOKUP_CACHE_V6,
        MAP_MAPPING_V4, MAP_MAPPING_V6, MAP_NEXT_HOP_V4, MAP_NEXT_HOP_V6, MAP_NODE_ADDRESS_BY_INDEX_V4,
        MAP_NODE_ADDRESS_BY_INDEX_V6, MAP_NODE_ADDRESS_V4, MAP_NODE_ADDRESS_V6, MAP_PRE_TC_DEVICE, MAP_REASON,
        MAP_REPLY_CACHE_V4, MAP_REPLY_CACHE_V6, MAP_ROUTE_LOOKUP, MAP_SCTP_BUFFER, MAP_SCTP_FLOW_V4, MAP_SCTP_FLOW_V6,
        MAP_SLOW_PATH, MAP_SOCKET_RNAT_V4, MAP_SOCKET_RNAT_V6, MAP_STACK_SEEN_V4, MAP_STACK_SEEN_V6, MAP_STATS,
        MAP_TRACE_CPU, MAP_TRACE_FILTER, MAP_TRACE_RING, MAP_UDP_FLOW_V4, MAP_UDP_FLOW_V6, MAP_UNMAPPED_V4,
        MAP_UNMAPPED_V6, MAP_UPLINK, SLOW_PATH_PROGRAMS,
    },
    next_hop::{
        CACHED_NEXT_HOPS, CachedNextHop, MAX_NEXT_HOPS, MAX_UPLINKS, PodAddressV4, PodAddressV6, PodNextHop,
        RouteLookup,
    },
    offload::{self, StackSeen},
    packet_trace::{RING_BYTES, TraceCpu, TraceFilter},
    reason::MAX_REASONS,
    socket_rnat::{MAX_SOCKET_RNAT, SocketRnatKeyV4, SocketRnatKeyV6, SocketRnatV4, SocketRnatV6},
    stats::{MAX_STATS, MappingStats},
    unmapped,
};

/// A map, or a pair of maps with the same purpose for IPv4 and IPv6.
#[derive(Debug, Clone, Copy)]
pub struct Map {
    /// The name of the map, or the names of the IPv4 and the IPv6 map.
    pub names: &'static [&'static str],
    /// The type of the maps.
    pub kind: MapKind,
    /// The kernel's `max_entries` of each map: the maximum number of elements or, for the ring buffer, its size in
    /// bytes.
    pub capacity: u32,
    /// The keys.
    pub key: Content,
    /// The values.
    pub value: Content,
    /// The purpose of the map.
    pub purpose: &'static str,
    /// The components that write elements of the map.
    pub written_by: &'static str,
    /// The effect of a full map.
    pub when_full: &'static str,
}

/// The type of a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapKind {
    /// One value for each index.
    Array,
    /// One value for each index and CPU.
    PerCpuArray,
    /// A hash table that rejects new elements when it is full.
    Hash,
    /// A hash table that evicts the least recently used element when it is full.
    LruHash,
    /// A longest prefix match trie.
    LpmTrie,
    /// An array of programs for tail calls.
    ProgramArray,
    /// A ring buffer, which all CPUs share.
    RingBuffer,
}

impl MapKind {
    /// Returns the kernel's number of the map type, `BPF_MAP_TYPE_*`.
    pub const fn number(self) -> u32 {
        match self {
            Self::Hash => 1,
            Self::Array => 2,
            Self::ProgramArray => 3,
            Self::PerCpuArray => 6,
            Self::LruHash => 9,
            Self::LpmTrie => 11,
            Self::RingBuffer => 27,
        }
    }

    /// Returns the name by which `bpftool map` shows the map type.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hash => "hash",
            Self::Array => "array",
            Self::ProgramArray => "prog_array",
            Self::PerCpuArray => "percpu_array",
            Self::LruHash => "lru_hash",
            Self::LpmTrie => "lpm_trie",
            Self::RingBuffer => "ringbuf",
        }
    }
}

/// A key or value.
#[derive(Debug, Clone, Copy)]
pub enum Content {
    /// For a ring buffer, which has neither keys nor values: the text that the reference page shows in place of a type.
    None(&'static str),
    /// A `u32`, and its meaning.
    U32(&'static str),
    /// A `u64`, and its meaning.
    U64(&'static str),
    /// A struct. The list contains one layout for each map in [`Map::names`], or a single layout that all of these maps
    /// share.
    Type(&'static [Layout]),
    /// The key of an LPM trie: a prefix length of four bytes, followed by a struct as in [`Self::Type`].
    Prefix(&'static [Layout]),
}

impl Content {
    /// Returns the layouts of a struct, as in [`Self::Type`]; empty for a number, and for a ring buffer.
    pub const fn layouts(self) -> &'static [Layout] {
        match self {
            Self::None(_) | Self::U32(_) | Self::U64(_) => &[],
            Self::Type(layouts) | Self::Prefix(layouts) => layouts,
        }
    }

    /// Returns the size in bytes of the key or value in the map whose name is at `position` in [`Map::names`].
    pub fn size(self, position: usize) -> usize {
        let layouts = self.layouts();
        let of_type = layouts.get(position).or(layouts.first()).map_or(0, |layout| layout.size);
        match self {
            Self::None(_) => 0,
            Self::U32(_) => size_of::<u32>(),
            Self::U64(_) => size_of::<u64>(),
            Self::Type(_) => of_type,
            Self::Prefix(_) => size_of::<u32>() + of_type,
        }
    }
}

const AGENT: &str = "agent";
const PROGRAMS: &str = "programs";
const NEVER: &str = "never, because the array always has all of its elements";
const FLOW_WRITERS: &str = "programs; the agent removes expired entries, and entries of removed mappings";
const EVICTS_FLOWS: &str = "the kernel evicts the least recently used entry, which the client's next packet \
                            recreates; if the kernel refuses the new entry, the programs count `flow_table_full`";
const OVERWRITES: &str = "never, because a new entry overwrites an older entry in the same slot";

/// Every pinned map.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the lengths of the slow-path list and of the CRC table fit in 32 bits"
)]
pub const MAPS: &[Map] = &[
    Map {
        names: &[MAP_CONFIG],
        kind: MapKind::Array,
        capacity: 1,
        key: Content::U32("0"),
        value: Content::Type(&[Config::LAYOUT]),
        purpose: "Configuration that all programs read.",
        written_by: AGENT,
        when_full: NEVER,
    },
    Map {
        names: &[MAP_NODE_ADDRESS_V4, MAP_NODE_ADDRESS_V6],
        kind: MapKind::Hash,
        capacity: MAX_LOCAL_ADDRESSES,
        key: Content::Type(&[NodeAddressV4::LAYOUT, NodeAddressV6::LAYOUT]),
        value: Content::Type(&[LocalAddress::LAYOUT]),
        purpose: "Node addresses: the addresses on which clients reach node ports.",
        written_by: AGENT,
        when_full: "node ports do not work on the remaining addresses; the log and the doctor check `addresses` report \
                    the number of these addresses and the first of them; the agent writes published addresses first",
    },
    Map {
        names: &[MAP_NODE_ADDRESS_BY_INDEX_V4, MAP_NODE_ADDRESS_BY_INDEX_V6],
        kind: MapKind::Array,
        capacity: MAX_LOCAL_ADDRESSES,
        key: Content::U32("index of the node address"),
        value: Content::Type(&[NodeAddressV4::LAYOUT, NodeAddressV6::LAYOUT]),
        purpose: "Node addresses by the index that half-open entries and fragment records contain; all zero if the \
                  index is free.",
        written_by: AGENT,
        when_full: "the same as for `npl_addr2idx_v4`",
    },
    Map {
        names: &[MAP_MAPPING_V4, MAP_MAPPING_V6],
        kind: MapKind::Hash,
        capacity: MAX_MAPPINGS,
        key: Content::Type(&[Frontend::LAYOUT]),
        value: Content::Type(&[BackendV4::LAYOUT, BackendV6::LAYOUT]),
        purpose: "Mappings: the Pod address and port behind each node port and protocol.",
        written_by: AGENT,
        when_full: "the agent does not write further mappings, logs this, and tries again",
    },
    Map {
        names: &[MAP_ALLOW_V4, MAP_ALLOW_V6],
        kind: MapKind::LpmTrie,
        capacity: MAX_SOURCE_RANGES,
        key: Content::Prefix(&[SourceV4::LAYOUT, SourceV6::LAYOUT]),
        value: Content::U32("1"),
        purpose: "Source allow-lists of restricted mappings.",
        written_by: AGENT,
        when_full: "packets from ranges that are not in the map are dropped (`source_refused`), and the Pod gets the \
                    Event `SourceRangesExhausted`",
    },
    Map {
        names: &[MAP_ENDPOINT_V4, MAP_ENDPOINT_V6],
        kind: MapKind::Hash,
        capacity: MAX_MAPPINGS,
        key: Content::Type(&[EndpointV4::LAYOUT, EndpointV6::LAYOUT]),
        value: Content::Type(&[Endpoint::LAYOUT]),
        purpose: "Endpoints: Pod address, port and protocol of each mapping; only packets from endpoints can be \
                  replies.",
        written_by: AGENT,
        when_full: "the same as for `npl_mapping_v4`",
    },
    Map {
        names: &[MAP_FLOW_V4, MAP_FLOW_V6],
        kind: MapKind::LruHash,
        capacity: MAX_FLOWS,
        key: Content::Type(&[FlowKeyV4::LAYOUT, FlowKeyV6::LAYOUT]),
        value: Content::Type(&[FlowV4::LAYOUT, FlowV6::LAYOUT]),
        purpose: "Flow table of TCP: conntrack entries of established connections.",
        written_by: FLOW_WRITERS,
        when_full: EVICTS_FLOWS,
    },
    Map {
        names: &[MAP_UDP_FLOW_V4, MAP_UDP_FLOW_V6],
        kind: MapKind::LruHash,
        capacity: MAX_UDP_FLOWS,
        key: Content::Type(&[FlowKeyV4::LAYOUT, FlowKeyV6::LAYOUT]),
        value: Content::Type(&[FlowV4::LAYOUT, FlowV6::LAYOUT]),
        purpose: "Flow table of UDP: conntrack entries of established flows.",
        written_by: FLOW_WRITERS,
        when_full: EVICTS_FLOWS,
    },
    Map {
        names: &[MAP_SCTP_FLOW_V4, MAP_SCTP_FLOW_V6],
        kind: MapKind::LruHash,
        capacity: MAX_SCTP_FLOWS,
        key: Content::Type(&[FlowKeyV4::LAYOUT, FlowKeyV6::LAYOUT]),
        value: Content::Type(&[FlowV4::LAYOUT, FlowV6::LAYOUT]),
        purpose: "Flow table of SCTP: conntrack entries of established associations.",
        written_by: FLOW_WRITERS,
        when_full: EVICTS_FLOWS,
    },
    Map {
        names: &[MAP_HALF_OPEN_V4, MAP_HALF_OPEN_V6],
        kind: MapKind::Array,
        capacity: half_open::WORDS,
        key: Content::U32(
            "slot: 0-65535 for established flows, 65536-81919 for handshakes, 81920-147455 for half-open UDP flows; a hash \
             of the flow tuple selects the slot, and the hash of a handshake also includes a TCP acknowledgement number \
             or SCTP tag, unless NPL first sees the TCP connection or SCTP association in the middle",
        ),
        value: Content::U64(
            "bits 0-15 node port, 16-23 index of the node address, 24-25 phase (0 requested, 1 replied, 2 established, \
             3 refused), 26-63 tag of the flow; 0 if free",
        ),
        purpose: "Half-open cache: conntrack entries of flows whose handshake or first exchange is incomplete, and \
                  copies of flow table entries.",
        written_by: "programs; the agent clears expired entries",
        when_full: OVERWRITES,
    },
    Map {
        names: &[MAP_FRAGMENT_V4, MAP_FRAGMENT_V6],
        kind: MapKind::Array,
        capacity: fragment::SLOTS,
        key: Content::U32("slot, selected by a hash of the datagram"),
        value: Content::U64(
            "bits 0-15 node port (0 if the first fragment was not translated), 16-23 index of the node address, 24-25 \
             protocol (0 UDP, 1 TCP, 2 SCTP), 26-32 time in units of 2^30 ns (1.07 s), 33 whether the stack \
             forwarded the first fragment, 34-63 tag of the datagram; 0 if free",
        ),
        purpose: "Fragment tracking: the translation of a datagram's first fragment, which the programs apply to the \
                  later fragments, because these have no ports.",
        written_by: PROGRAMS,
        when_full: OVERWRITES,
    },
    Map {
        names: &[MAP_SOCKET_RNAT_V4, MAP_SOCKET_RNAT_V6],
        kind: MapKind::LruHash,
        capacity: MAX_SOCKET_RNAT,
        key: Content::Type(&[SocketRnatKeyV4::LAYOUT, SocketRnatKeyV6::LAYOUT]),
        value: Content::Type(&[SocketRnatV4::LAYOUT, SocketRnatV6::LAYOUT]),
        purpose: "Socket reverse NAT: the address that a local client connected to, the Pod that a socket used last, \
                  and masqueraded clients to which a socket answers without translation.",
        written_by: "cgroup programs; the agent removes entries of removed mappings",
        when_full: "the kernel evicts the least recently used entry; the client of that entry sees the Pod's address, \
                    and the connection continues",
    },
    Map {
        names: &[MAP_FRAGMENT_BUFFER],
        kind: MapKind::PerCpuArray,
        capacity: fragment_buffer::ELEMENTS,
        key: Content::U32("0-15 saved fragments, 16-18 working elements for the current packet"),
        value: Content::Type(&[SavedFrame::LAYOUT]),
        purpose: "Fragment buffer: copies of fragments that arrived before the first fragment of their datagram.",
        written_by: PROGRAMS,
        when_full: "the new copy overwrites the CPU's oldest copy, whose datagram is lost unless the sender repeats it",
    },
    Map {
        names: &[MAP_SCTP_BUFFER],
        kind: MapKind::Array,
        capacity: fragment_buffer::SCTP_FRAGMENTS,
        key: Content::U32("slot, selected by a hash of the datagram"),
        value: Content::Type(&[SavedFrame::LAYOUT]),
        purpose: "SCTP reassembly buffer: first fragments that wait for the last fragment, which shows the \
                  datagram's length. If the last fragment arrives first, the slot contains the length.",
        written_by: PROGRAMS,
        when_full: "a fragment keeps its slot for one second; meanwhile, the programs estimate the length of \
                    another datagram with the same slot from its chunks or, if no chunk shows the length, pass the \
                    datagram to the host and count it as `sctp_fragment`",
    },
    Map {
        names: &[MAP_HOST_CONNECTION_V4, MAP_HOST_CONNECTION_V6],
        kind: MapKind::Array,
        capacity: host_connection::SLOTS,
        key: Content::U32("slot, selected by a hash of the connection"),
        value: Content::U64(
            "bits 0-23 time in units of 2^30 ns (1.07 s), 24-25 duration in these units (at most 2), 26-63 tag of the \
             connection; 0 if free",
        ),
        purpose: "Host connections: the Node's own and masqueraded connections that use a port of the range, and \
                  connections that rules of other software translate; the programs do not translate the packets that \
                  remote hosts send on these connections.",
        written_by: "programs; the agent adds the connections that other software translates, and clears the map \
                     each time that it copies entries of another ABI version's maps",
        when_full: OVERWRITES,
    },
    Map {
        names: &[MAP_UNMAPPED_V4, MAP_UNMAPPED_V6],
        kind: MapKind::Array,
        capacity: unmapped::PORTS,
        key: Content::U32("node port"),
        value: Content::U64(
            "time of the last packet or removal in units of 2^30 ns (1.07 s) of `CLOCK_MONOTONIC`; 0 if there was \
             neither",
        ),
        purpose: "Unmapped traffic: for each node port, the time of the last packet that matched no mapping, or of the \
                  last removal of a mapping. The agent assigns a port with a time in the last two minutes only if no \
                  other port is free. A restarted agent keeps a port in quarantine until `--quarantine` has passed since \
                   the stored time.",
        written_by: "programs, and the agent when it removes a mapping",
        when_full: NEVER,
    },
    Map {
        names: &[MAP_SLOW_PATH],
        kind: MapKind::ProgramArray,
        capacity: SLOW_PATH_PROGRAMS.len() as u32,
        key: Content::U32(
            "0 for the first program with the hook \"tail call\" in the table [Programs](#programs), 1 for the second, and \
             so on",
        ),
        value: Content::U32("the program's id"),
        purpose: "Slow-path programs, which the fast-path programs tail-call.",
        written_by: AGENT,
        when_full: NEVER,
    },
    Map {
        names: &[MAP_CRC],
        kind: MapKind::Array,
        capacity: crc::ELEMENTS as u32,
        key: Content::U32("position in the table"),
        value: Content::U32("element of the table"),
        purpose: "CRC32c table, with which programs update the checksums of SCTP packets.",
        written_by: "agent, at its start",
        when_full: NEVER,
    },
    Map {
        names: &[MAP_UPLINK],
        kind: MapKind::Hash,
        capacity: MAX_UPLINKS,
        key: Content::U32("index of the device"),
        value: Content::U32("1"),
        purpose: "Uplinks to which replies may be redirected; empty with `--forwarding stack`.",
        written_by: AGENT,
        when_full: "the programs redirect no packets, and the host's stack forwards all packets",
    },
    Map {
        names: &[MAP_PRE_TC_DEVICE],
        kind: MapKind::Hash,
        capacity: MAX_PRE_TC_DEVICES,
        key: Content::U32("index of the device"),
        value: Content::U32("1"),
        purpose: "Interface indexes of the devices whose packets may already be translated when NPL's TC program runs: \
                  by the XDP program or, before Linux 6.6, by a temporary second TC filter, which exists while the \
                  agent moves NPL's filter ahead of all other filters.",
        written_by: AGENT,
        when_full: "the agent attaches no XDP program to further devices, so TC translates their requests; the agent \
                    moves no filters on further devices",
    },
    Map {
        names: &[MAP_NEXT_HOP_V4, MAP_NEXT_HOP_V6],
        kind: MapKind::Hash,
        capacity: MAX_NEXT_HOPS,
        key: Content::Type(&[PodAddressV4::LAYOUT, PodAddressV6::LAYOUT]),
        value: Content::Type(&[PodNextHop::LAYOUT]),
        purpose: "Next hops of the Pods to which packets may be redirected; empty with `--forwarding stack`.",
        written_by: AGENT,
        when_full: "the host's stack forwards packets of further Pods",
    },
    Map {
        names: &[MAP_CACHED_NEXT_HOP],
        kind: MapKind::PerCpuArray,
        capacity: CACHED_NEXT_HOPS,
        key: Content::U32("slot, selected by a hash of the flow, the node address and the node port"),
        value: Content::Type(&[CachedNextHop::LAYOUT]),
        purpose: "Cached next hops of replies: uplink and Ethernet header, as the kernel's routes and neighbor table \
                  determined them at most 16 jiffies ago. Unused with `--forwarding stack`.",
        written_by: PROGRAMS,
        when_full: OVERWRITES,
    },
    Map {
        names: &[MAP_ROUTE_LOOKUP],
        kind: MapKind::PerCpuArray,
        capacity: 1,
        key: Content::U32("0"),
        value: Content::Type(&[RouteLookup::LAYOUT]),
        purpose: "Working memory of the programs that redirect replies: the route look-up that the program on this CPU \
                  makes.",
        written_by: PROGRAMS,
        when_full: NEVER,
    },
    Map {
        names: &[MAP_LOOKUP_CACHE_V4, MAP_LOOKUP_CACHE_V6],
        kind: MapKind::Array,
        capacity: CACHED_MAPPINGS,
        key: Content::U32("slot, selected by node port and protocol"),
        value: Content::Type(&[CachedMappingV4::LAYOUT, CachedMappingV6::LAYOUT]),
        purpose: "Lookup cache of requests: copies of mappings and next hops.",
        written_by: "programs; the agent clears the cache at its start",
        when_full: OVERWRITES,
    },
    Map {
        names: &[MAP_REPLY_CACHE_V4, MAP_REPLY_CACHE_V6],
        kind: MapKind::Array,
        capacity: half_open::REPLY_CACHE_ELEMENTS,
        key: Content::U32("the flow's slot in the half-open cache (slots of established flows and handshakes only)"),
        value: Content::Type(&[CachedReply::LAYOUT]),
        purpose: "Lookup cache of replies: copies of values of `npl_endpoint_v4` and `npl_endpoint_v6`. \
                  Elements from 65 536 on belong to half-open entries that a program has created in the middle of a \
                  TCP connection. These elements contain the sequence number and acknowledgement number of the \
                  client's segment for which the program created the entry.",
        written_by: PROGRAMS,
        when_full: OVERWRITES,
    },
    Map {
        names: &[MAP_STACK_SEEN_V4, MAP_STACK_SEEN_V6],
        kind: MapKind::Array,
        capacity: offload::SLOTS,
        key: Content::U32("slot of the flow in the half-open cache"),
        value: Content::Type(&[StackSeen::LAYOUT]),
        purpose: "Stack observations: the time at which the stack last forwarded a packet of each direction of a \
                  flow; for `--forwarding offload`.",
        written_by: PROGRAMS,
        when_full: "never, because several flows may share a slot: a flow keeps its slot while it is offloaded, and \
                    the stack forwards the packets of the slot's other flows",
    },
    Map {
        names: &[MAP_STATS],
        kind: MapKind::PerCpuArray,
        capacity: MAX_STATS,
        key: Content::U32("`stats_index` of a backend; the last two elements are the sums of IPv4 and of IPv6"),
        value: Content::Type(&[MappingStats::LAYOUT]),
        purpose: "Counters of each mapping. For each IP family, one more element contains the sum over removed \
                  mappings and over mappings without separate counters.",
        written_by: "programs; the agent moves the counters of removed mappings to the sums",
        when_full: "further mappings are counted in the sum of their family",
    },
    Map {
        names: &[MAP_REASON],
        kind: MapKind::PerCpuArray,
        capacity: MAX_REASONS,
        key: Content::U32("number of the reason"),
        value: Content::U64("packets"),
        purpose: "Number of packets counted under each reason.",
        written_by: PROGRAMS,
        when_full: NEVER,
    },
    Map {
        names: &[MAP_TRACE_FILTER],
        kind: MapKind::Array,
        capacity: 1,
        key: Content::U32("0"),
        value: Content::Type(&[TraceFilter::LAYOUT]),
        purpose: "Filter of packet tracing: the packets that `npl-agent trace` shows; tracing is off unless the \
                  command runs.",
        written_by: "`npl-agent trace`; a program turns tracing off if the command does not extend the trace for 3 s",
        when_full: NEVER,
    },
    Map {
        names: &[MAP_TRACE_CPU],
        kind: MapKind::PerCpuArray,
        capacity: 1,
        key: Content::U32("0"),
        value: Content::Type(&[TraceCpu::LAYOUT]),
        purpose: "The record of packet tracing that a CPU is writing, and the counts of records that this CPU did not \
                  write.",
        written_by: PROGRAMS,
        when_full: NEVER,
    },
    Map {
        names: &[MAP_TRACE_RING],
        kind: MapKind::RingBuffer,
        capacity: RING_BYTES,
        key: Content::None("none"),
        value: Content::None("none; the records are of the type `TraceRecord`"),
        purpose: "Records of packet tracing, which `npl-agent trace` reads.",
        written_by: PROGRAMS,
        when_full: "further records are counted as lost",
    },
];

#[cfg(test)]
mod tests;
