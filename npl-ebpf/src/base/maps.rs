// SPDX-License-Identifier: GPL-2.0-only
//! Declares the maps of the datapath programs. The agent pins each of these maps under its name in `npl_common::names`.
//!
//! A flood of packets cannot fill a map permanently: packets create entries only in LRU hashes, from which the kernel
//! evicts old entries, and in arrays, in which new entries overwrite old or expired ones. The programs write each word
//! of an array by one aligned store, so that no reader sees a half-written word.

use aya_ebpf::{
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, ProgramArray, RingBuf},
    macros::btf_map,
};
use npl_common::{
    config::{Config, MAX_PRE_TC_DEVICES},
    crc,
    flow::{FlowKeyV4, FlowKeyV6, FlowV4, FlowV6, MAX_FLOWS, MAX_SCTP_FLOWS, MAX_UDP_FLOWS},
    fragment,
    fragment_buffer::{self, SavedFrame},
    half_open, host_connection,
    lookup_cache::{CACHED_MAPPINGS, CachedMappingV4, CachedMappingV6, CachedReply},
    mapping::{
        BackendV4, BackendV6, Endpoint, EndpointV4, EndpointV6, Frontend, LocalAddress, MAX_LOCAL_ADDRESSES,
        MAX_MAPPINGS, MAX_SOURCE_RANGES, NodeAddressV4, NodeAddressV6, SourceV4, SourceV6,
    },
    names::SLOW_PATH_PROGRAMS,
    next_hop::{
        CACHED_NEXT_HOPS, CachedNextHop, MAX_NEXT_HOPS, MAX_UPLINKS, PodAddressV4, PodAddressV6, PodNextHop,
        RouteLookup,
    },
    offload::{self, StackSeen},
    packet_trace::{RING_BYTES, TraceCpu, TraceFilter, TraceRecord},
    reason::MAX_REASONS,
    socket_rnat::{MAX_SOCKET_RNAT, SocketRnatKeyV4, SocketRnatKeyV6, SocketRnatV4, SocketRnatV6},
    stats::{MAX_STATS, MappingStats},
    unmapped,
};

/// The configuration of the programs, such as the node port range, the hash seed and the epoch. The agent writes this
/// map.
#[btf_map(name = "npl_config")]
pub static CONFIG: Array<Config, 1> = Array::new();

/// Maps node addresses to their indexes. The agent writes this map.
#[btf_map(name = "npl_addr2idx_v4")]
pub static NODE_ADDRESS_V4: HashMap<NodeAddressV4, LocalAddress, { MAX_LOCAL_ADDRESSES as usize }> = HashMap::new();

/// Maps indexes to node addresses. All bytes of the element of an unused index are zero. The agent writes this map.
#[btf_map(name = "npl_idx2addr_v4")]
pub static NODE_ADDRESS_BY_INDEX_V4: Array<NodeAddressV4, { MAX_LOCAL_ADDRESSES as usize }> = Array::new();

/// Maps frontends (node port and protocol) to backends (Pods). The agent writes this map. The map is a hash table,
/// because the kernel replaces elements of hash tables atomically.
#[btf_map(name = "npl_mapping_v4")]
pub static MAPPING_V4: HashMap<Frontend, BackendV4, { MAX_MAPPINGS as usize }> = HashMap::new();

/// Source allow-lists of restricted mappings. The agent writes this map.
#[btf_map(name = "npl_allow_v4")]
pub static ALLOW_V4: LpmTrie<SourceV4, u32, { MAX_SOURCE_RANGES as usize }> = LpmTrie::new();

/// The Pod endpoints (address, port and protocol) of all mappings, by which the programs recognize replies. The agent
/// writes this map.
#[btf_map(name = "npl_endpoint_v4")]
pub static ENDPOINT_V4: HashMap<EndpointV4, Endpoint, { MAX_MAPPINGS as usize }> = HashMap::new();

/// The flow table of TCP: conntrack entries of established connections. The kernel programs write the entries; the
/// agent removes expired entries.
#[btf_map(name = "npl_flow_v4")]
pub static FLOW_V4: LruHashMap<FlowKeyV4, FlowV4, { MAX_FLOWS as usize }> = LruHashMap::new();

/// The flow table of UDP; otherwise like `npl_flow_v4`.
#[btf_map(name = "npl_udpflow_v4")]
pub static UDP_FLOW_V4: LruHashMap<FlowKeyV4, FlowV4, { MAX_UDP_FLOWS as usize }> = LruHashMap::new();

/// The flow table of SCTP; otherwise like `npl_flow_v4`.
#[btf_map(name = "npl_sctpflow_v4")]
pub static SCTP_FLOW_V4: LruHashMap<FlowKeyV4, FlowV4, { MAX_SCTP_FLOWS as usize }> = LruHashMap::new();

/// The half-open cache: conntrack entries of half-open flows, and copies of the entries of established flows. The
/// kernel programs write the entries; the agent, which maps the array into its memory, clears timed-out entries.
#[btf_map(name = "npl_halfopen_v4")]
pub static HALF_OPEN_V4: Array<u64, { half_open::WORDS as usize }, { half_open::MAP_FLAGS as usize }> = Array::new();

/// Fragment tracking: records of how the first fragment of each datagram was translated. The kernel programs write this
/// map.
#[btf_map(name = "npl_frag_v4")]
pub static FRAGMENT_V4: Array<u64, { fragment::SLOTS as usize }> = Array::new();

/// Host connections, see [`npl_common::host_connection`]. The kernel programs write this map. The agent adds
/// connections that other software translates, and clears the map each time that it copies entries of another ABI
/// version's maps.
#[btf_map(name = "npl_hostconn_v4")]
pub static HOST_CONNECTION_V4: Array<u64, { host_connection::SLOTS as usize }> = Array::new();

/// Socket reverse NAT: the address that a local client's socket connected to, see [`npl_common::socket_rnat`]. The
/// kernel programs write this map; the agent removes entries of removed mappings.
#[btf_map(name = "npl_sk_rnat_v4")]
pub static SOCKET_RNAT_V4: LruHashMap<SocketRnatKeyV4, SocketRnatV4, { MAX_SOCKET_RNAT as usize }> = LruHashMap::new();

/// For each node port, the time of the last packet that matched no mapping. The kernel programs write this map. The
/// agent also writes an element when it removes a mapping.
#[btf_map(name = "npl_unmap_ts_v4")]
pub static UNMAPPED_V4: Array<u64, { unmapped::PORTS as usize }> = Array::new();

/// The next hops by which the programs redirect packets to Pods. The agent writes this map, and updates the map when
/// devices, routes or mappings change.
#[btf_map(name = "npl_pod_dev_v4")]
pub static NEXT_HOP_V4: HashMap<PodAddressV4, PodNextHop, { MAX_NEXT_HOPS as usize }> = HashMap::new();

/// Lookup cache of requests: copies of mappings and next hops. The kernel programs write this map; the agent clears the
/// map when the agent starts.
#[btf_map(name = "npl_reqcache_v4")]
pub static LOOKUP_CACHE_V4: Array<CachedMappingV4, { CACHED_MAPPINGS as usize }> = Array::new();

/// Lookup cache of replies: copies of the endpoints of established flows, and the sequence and acknowledgement numbers
/// of mid-stream entries (entries that a client's segment in the middle of a connection has opened). The kernel
/// programs write this map.
#[btf_map(name = "npl_repcache_v4")]
pub static REPLY_CACHE_V4: Array<CachedReply, { half_open::REPLY_CACHE_ELEMENTS as usize }> = Array::new();

/// Stack observations for `--forwarding offload`: when the host's stack last forwarded a packet of each direction of a
/// flow. The kernel programs write this map.
#[btf_map(name = "npl_stkseen_v4")]
pub static STACK_SEEN_V4: Array<StackSeen, { offload::SLOTS as usize }> = Array::new();

/// Maps node addresses to their indexes. The agent writes this map.
#[btf_map(name = "npl_addr2idx_v6")]
pub static NODE_ADDRESS_V6: HashMap<NodeAddressV6, LocalAddress, { MAX_LOCAL_ADDRESSES as usize }> = HashMap::new();

/// Maps indexes to node addresses. All bytes of the element of an unused index are zero. The agent writes this map.
#[btf_map(name = "npl_idx2addr_v6")]
pub static NODE_ADDRESS_BY_INDEX_V6: Array<NodeAddressV6, { MAX_LOCAL_ADDRESSES as usize }> = Array::new();

/// Maps frontends (node port and protocol) to backends (Pods). The agent writes this map. The map is a hash table,
/// because the kernel replaces elements of hash tables atomically.
#[btf_map(name = "npl_mapping_v6")]
pub static MAPPING_V6: HashMap<Frontend, BackendV6, { MAX_MAPPINGS as usize }> = HashMap::new();

/// Source allow-lists of restricted mappings. The agent writes this map.
#[btf_map(name = "npl_allow_v6")]
pub static ALLOW_V6: LpmTrie<SourceV6, u32, { MAX_SOURCE_RANGES as usize }> = LpmTrie::new();

/// The Pod endpoints (address, port and protocol) of all mappings, by which the programs recognize replies. The agent
/// writes this map.
#[btf_map(name = "npl_endpoint_v6")]
pub static ENDPOINT_V6: HashMap<EndpointV6, Endpoint, { MAX_MAPPINGS as usize }> = HashMap::new();

/// The flow table of TCP: conntrack entries of established connections. The kernel programs write the entries; the
/// agent removes expired entries.
#[btf_map(name = "npl_flow_v6")]
pub static FLOW_V6: LruHashMap<FlowKeyV6, FlowV6, { MAX_FLOWS as usize }> = LruHashMap::new();

/// The flow table of UDP; otherwise like `npl_flow_v4`.
#[btf_map(name = "npl_udpflow_v6")]
pub static UDP_FLOW_V6: LruHashMap<FlowKeyV6, FlowV6, { MAX_UDP_FLOWS as usize }> = LruHashMap::new();

/// The flow table of SCTP; otherwise like `npl_flow_v4`.
#[btf_map(name = "npl_sctpflow_v6")]
pub static SCTP_FLOW_V6: LruHashMap<FlowKeyV6, FlowV6, { MAX_SCTP_FLOWS as usize }> = LruHashMap::new();

/// The half-open cache: conntrack entries of half-open flows, and copies of the entries of established flows. The
/// kernel programs write the entries; the agent, which maps the array into its memory, clears timed-out entries.
#[btf_map(name = "npl_halfopen_v6")]
pub static HALF_OPEN_V6: Array<u64, { half_open::WORDS as usize }, { half_open::MAP_FLAGS as usize }> = Array::new();

/// Fragment tracking: records of how the first fragment of each datagram was translated. The kernel programs write this
/// map.
#[btf_map(name = "npl_frag_v6")]
pub static FRAGMENT_V6: Array<u64, { fragment::SLOTS as usize }> = Array::new();

/// Host connections, see [`npl_common::host_connection`]. The kernel programs write this map. The agent adds
/// connections that other software translates, and clears the map each time that it copies entries of another ABI
/// version's maps.
#[btf_map(name = "npl_hostconn_v6")]
pub static HOST_CONNECTION_V6: Array<u64, { host_connection::SLOTS as usize }> = Array::new();

/// Socket reverse NAT: the address that a local client's socket connected to, see [`npl_common::socket_rnat`]. The
/// kernel programs write this map; the agent removes entries of removed mappings.
#[btf_map(name = "npl_sk_rnat_v6")]
pub static SOCKET_RNAT_V6: LruHashMap<SocketRnatKeyV6, SocketRnatV6, { MAX_SOCKET_RNAT as usize }> = LruHashMap::new();

/// For each node port, the time of the last packet that matched no mapping. The kernel programs write this map. The
/// agent also writes an element when it removes a mapping.
#[btf_map(name = "npl_unmap_ts_v6")]
pub static UNMAPPED_V6: Array<u64, { unmapped::PORTS as usize }> = Array::new();

/// The next hops by which the programs redirect packets to Pods. The agent writes this map, and updates the map when
/// devices, routes or mappings change.
#[btf_map(name = "npl_pod_dev_v6")]
pub static NEXT_HOP_V6: HashMap<PodAddressV6, PodNextHop, { MAX_NEXT_HOPS as usize }> = HashMap::new();

/// Lookup cache of requests: copies of mappings and next hops. The kernel programs write this map; the agent clears the
/// map when the agent starts.
#[btf_map(name = "npl_reqcache_v6")]
pub static LOOKUP_CACHE_V6: Array<CachedMappingV6, { CACHED_MAPPINGS as usize }> = Array::new();

/// Lookup cache of replies: copies of the endpoints of established flows, and the sequence and acknowledgement numbers
/// of mid-stream entries (entries that a client's segment in the middle of a connection has opened). The kernel
/// programs write this map.
#[btf_map(name = "npl_repcache_v6")]
pub static REPLY_CACHE_V6: Array<CachedReply, { half_open::REPLY_CACHE_ELEMENTS as usize }> = Array::new();

/// Stack observations for `--forwarding offload`: when the host's stack last forwarded a packet of each direction of a
/// flow. The kernel programs write this map.
#[btf_map(name = "npl_stkseen_v6")]
pub static STACK_SEEN_V6: Array<StackSeen, { offload::SLOTS as usize }> = Array::new();

/// The slow-path programs, which the fast-path programs tail-call. The agent writes this map.
#[btf_map(name = "npl_slow")]
pub static SLOW_PATH: ProgramArray<{ SLOW_PATH_PROGRAMS.len() }> = ProgramArray::new();

/// The `CRC32c` table, which the agent writes at its start. Each element has only one word. A program would address the
/// words of a larger element by a variable offset. If the loader lacks `CAP_PERFMON`, the verifier would check the rest
/// of the program once for each value of the offset.
#[btf_map(name = "npl_crc")]
pub static CRC: Array<u32, { crc::ELEMENTS }> = Array::new();

/// The uplinks to which the programs may redirect replies, by ifindex. The agent writes this map, and updates the map
/// when devices change.
#[btf_map(name = "npl_rd_uplinks")]
pub static UPLINK: HashMap<u32, u32, { MAX_UPLINKS as usize }> = HashMap::new();

/// Cached next hops of replies. The kernel programs write this map.
#[btf_map(name = "npl_rd_nexthops")]
pub static CACHED_NEXT_HOP: PerCpuArray<CachedNextHop, { CACHED_NEXT_HOPS as usize }> = PerCpuArray::new();

/// The parameters and the result of the route look-up that the running program makes. A map contains this structure,
/// because the programs have no room for it on their stack.
#[btf_map(name = "npl_rd_lookup")]
pub static ROUTE_LOOKUP: PerCpuArray<RouteLookup, 1> = PerCpuArray::new();

/// The devices, by ifindex, whose packets may already be translated when NPL's TC program runs. These are devices with
/// the XDP program and, before Linux 6.6, devices with NPL's temporary second filter, which exists while the agent
/// moves NPL's filter ahead of all other filters. The agent writes this map. Programs look up a device only if
/// [`npl_common::config::FLAG_PRE_TC_DEVICES`] is set.
#[btf_map(name = "npl_pre_tc_devs")]
pub static PRE_TC_DEVICE: HashMap<u32, u32, { MAX_PRE_TC_DEVICES as usize }> = HashMap::new();

/// The fragment buffer: copies of fragments that arrived before the first fragment of their datagram. The kernel
/// programs write this map.
#[btf_map(name = "npl_early_frags")]
pub static FRAGMENT_BUFFER: PerCpuArray<SavedFrame, { fragment_buffer::ELEMENTS as usize }> = PerCpuArray::new();

/// The SCTP reassembly buffer: first fragments that wait for the last fragment of their packet. The kernel programs
/// write this map.
#[btf_map(name = "npl_sctp_frags")]
pub static SCTP_BUFFER: Array<SavedFrame, { fragment_buffer::SCTP_FRAGMENTS as usize }> = Array::new();

/// Counters of packets, bytes and flows for each mapping. The kernel programs write this map; the agent adds the
/// counters of a removed mapping to a sum, and then clears them.
#[btf_map(name = "npl_cnt_mapping")]
pub static STATS: PerCpuArray<MappingStats, { MAX_STATS as usize }> = PerCpuArray::new();

/// The number of packets that were counted under each reason. The kernel programs write this map.
#[btf_map(name = "npl_cnt_reason")]
pub static REASONS: PerCpuArray<u64, { MAX_REASONS as usize }> = PerCpuArray::new();

/// The filter of packet tracing, which `npl-agent trace` writes. After the time in [`TraceFilter::until`], a program
/// sets the field `until` to 0, which turns tracing off.
#[btf_map(name = "npl_tracefilter")]
pub static TRACE_FILTER: Array<TraceFilter, 1> = Array::new();

/// For each CPU, the record of packet tracing that the running program fills in. The kernel programs write this map.
#[btf_map(name = "npl_trace_cpu")]
pub static TRACE_CPU: PerCpuArray<TraceCpu, 1> = PerCpuArray::new();

/// The ring buffer from which `npl-agent trace` reads the records of packet tracing. The kernel programs write this
/// map.
#[btf_map(name = "npl_trace_ring")]
pub static TRACE_RING: RingBuf<TraceRecord, { RING_BYTES as usize }> = RingBuf::new();
