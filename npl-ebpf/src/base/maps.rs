// SPDX-License-Identifier: GPL-2.0-only
//! All map statics. The agent pins them under the names of `npl_common::names`.
//!
//! Maps with entries from packets are arrays, whose slots a flood overwrites, or LRU hashes. Each word of an array is
//! written by one aligned store.

use aya_ebpf::{
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, ProgramArray},
    macros::btf_map,
};
use npl_common::{
    config::{Config, MAX_XDP_DEVICES},
    crc,
    flow::{FlowKeyV4, FlowKeyV6, FlowV4, FlowV6, MAX_FLOWS},
    fragment,
    fragment_buffer::{self, SavedFrame},
    half_open, host_connection,
    lookup_cache::{CACHED_MAPPINGS, CachedMappingV4, CachedMappingV6, CachedReply},
    mapping::{
        BackendV4, BackendV6, Endpoint, EndpointV4, EndpointV6, Frontend, LocalAddress, MAX_LOCAL_ADDRESSES,
        MAX_MAPPINGS, MAX_SOURCE_RANGES, NodeAddressV4, NodeAddressV6, SourceV4, SourceV6,
    },
    names::SLOW_PATH_PROGRAMS,
    next_hop::{MAX_NEXT_HOPS, MAX_UPLINKS, PodAddressV4, PodAddressV6, PodNextHop},
    offload::{self, StackSeen},
    reason::MAX_REASONS,
    socket_rnat::{MAX_SOCKET_RNAT, SocketRnatKeyV4, SocketRnatKeyV6, SocketRnatV4, SocketRnatV6},
    stats::{MAX_STATS, MappingStats},
    unmapped,
};

/// Port range, primary node address, hash seed and epoch. Written by the agent.
#[btf_map(name = "npl_config")]
pub static CONFIG: Array<Config, 1> = Array::new();

/// Maps node addresses to their indexes. Written by the agent.
#[btf_map(name = "npl_nodeip_v4")]
pub static NODE_ADDRESS_V4: HashMap<NodeAddressV4, LocalAddress, { MAX_LOCAL_ADDRESSES as usize }> = HashMap::new();

/// Maps indexes to node addresses; all zero where an index is free. Written by the agent.
#[btf_map(name = "npl_nodeidx_v4")]
pub static NODE_ADDRESS_INDEX_V4: Array<NodeAddressV4, { MAX_LOCAL_ADDRESSES as usize }> = Array::new();

/// Maps frontends to backends. Written by the agent. A hash table, because its elements are replaced atomically.
#[btf_map(name = "npl_mapping_v4")]
pub static MAPPING_V4: HashMap<Frontend, BackendV4, { MAX_MAPPINGS as usize }> = HashMap::new();

/// Source allow-lists, looked up for restricted mappings only. Written by the agent.
#[btf_map(name = "npl_allow_v4")]
pub static ALLOW_V4: LpmTrie<SourceV4, u32, { MAX_SOURCE_RANGES as usize }> = LpmTrie::new();

/// Pod endpoints of mappings, by which replies are recognized. Written by the agent.
#[btf_map(name = "npl_endpoint_v4")]
pub static ENDPOINT_V4: HashMap<EndpointV4, Endpoint, { MAX_MAPPINGS as usize }> = HashMap::new();

/// Established flows. Written by the kernel programs; the agent removes expired entries.
#[btf_map(name = "npl_flow_v4")]
pub static FLOW_V4: LruHashMap<FlowKeyV4, FlowV4, { MAX_FLOWS as usize }> = LruHashMap::new();

/// Half-open flows. Written by the kernel programs; the agent removes expired entries through `mmap`.
#[btf_map(name = "npl_halfopen_v4")]
pub static HALF_OPEN_V4: Array<u64, { half_open::WORDS as usize }, { half_open::MAP_FLAGS as usize }> = Array::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_frag_v4")]
pub static FRAGMENT_V4: Array<u64, { fragment::SLOTS as usize }> = Array::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_hostconn_v4")]
pub static HOST_CONNECTION_V4: Array<u64, { host_connection::SLOTS as usize }> = Array::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_sk_rnat_v4")]
pub static SOCKET_RNAT_V4: LruHashMap<SocketRnatKeyV4, SocketRnatV4, { MAX_SOCKET_RNAT as usize }> = LruHashMap::new();

/// Written by the kernel programs, and by the agent when it removes a mapping.
#[btf_map(name = "npl_unmap_v4")]
pub static UNMAPPED_V4: Array<u64, { unmapped::PORTS as usize }> = Array::new();

/// Next hops of Pods to which packets are redirected. Written by the agent, which follows the routes.
#[btf_map(name = "npl_nexthop_v4")]
pub static NEXT_HOP_V4: HashMap<PodAddressV4, PodNextHop, { MAX_NEXT_HOPS as usize }> = HashMap::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_lcache_v4")]
pub static LOOKUP_CACHE_V4: Array<CachedMappingV4, { CACHED_MAPPINGS as usize }> = Array::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_rcache_v4")]
pub static REPLY_CACHE_V4: Array<CachedReply, { half_open::WORDS as usize }> = Array::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_stkseen_v4")]
pub static STACK_SEEN_V4: Array<StackSeen, { offload::SLOTS as usize }> = Array::new();

/// Maps node addresses to their indexes. Written by the agent.
#[btf_map(name = "npl_nodeip_v6")]
pub static NODE_ADDRESS_V6: HashMap<NodeAddressV6, LocalAddress, { MAX_LOCAL_ADDRESSES as usize }> = HashMap::new();

/// Maps indexes to node addresses; all zero where an index is free. Written by the agent.
#[btf_map(name = "npl_nodeidx_v6")]
pub static NODE_ADDRESS_INDEX_V6: Array<NodeAddressV6, { MAX_LOCAL_ADDRESSES as usize }> = Array::new();

/// Maps frontends to backends. Written by the agent. A hash table, because its elements are replaced atomically.
#[btf_map(name = "npl_mapping_v6")]
pub static MAPPING_V6: HashMap<Frontend, BackendV6, { MAX_MAPPINGS as usize }> = HashMap::new();

/// Source allow-lists, looked up for restricted mappings only. Written by the agent.
#[btf_map(name = "npl_allow_v6")]
pub static ALLOW_V6: LpmTrie<SourceV6, u32, { MAX_SOURCE_RANGES as usize }> = LpmTrie::new();

/// Pod endpoints of mappings, by which replies are recognized. Written by the agent.
#[btf_map(name = "npl_endpoint_v6")]
pub static ENDPOINT_V6: HashMap<EndpointV6, Endpoint, { MAX_MAPPINGS as usize }> = HashMap::new();

/// Established flows. Written by the kernel programs; the agent removes expired entries.
#[btf_map(name = "npl_flow_v6")]
pub static FLOW_V6: LruHashMap<FlowKeyV6, FlowV6, { MAX_FLOWS as usize }> = LruHashMap::new();

/// Half-open flows. Written by the kernel programs; the agent removes expired entries through `mmap`.
#[btf_map(name = "npl_halfopen_v6")]
pub static HALF_OPEN_V6: Array<u64, { half_open::WORDS as usize }, { half_open::MAP_FLAGS as usize }> = Array::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_frag_v6")]
pub static FRAGMENT_V6: Array<u64, { fragment::SLOTS as usize }> = Array::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_hostconn_v6")]
pub static HOST_CONNECTION_V6: Array<u64, { host_connection::SLOTS as usize }> = Array::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_sk_rnat_v6")]
pub static SOCKET_RNAT_V6: LruHashMap<SocketRnatKeyV6, SocketRnatV6, { MAX_SOCKET_RNAT as usize }> = LruHashMap::new();

/// Written by the kernel programs, and by the agent when it removes a mapping.
#[btf_map(name = "npl_unmap_v6")]
pub static UNMAPPED_V6: Array<u64, { unmapped::PORTS as usize }> = Array::new();

/// Next hops of Pods to which packets are redirected. Written by the agent, which follows the routes.
#[btf_map(name = "npl_nexthop_v6")]
pub static NEXT_HOP_V6: HashMap<PodAddressV6, PodNextHop, { MAX_NEXT_HOPS as usize }> = HashMap::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_lcache_v6")]
pub static LOOKUP_CACHE_V6: Array<CachedMappingV6, { CACHED_MAPPINGS as usize }> = Array::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_rcache_v6")]
pub static REPLY_CACHE_V6: Array<CachedReply, { half_open::WORDS as usize }> = Array::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_stkseen_v6")]
pub static STACK_SEEN_V6: Array<StackSeen, { offload::SLOTS as usize }> = Array::new();

/// Slow-path programs, tail-called by the fast path. Written by the agent.
#[btf_map(name = "npl_slow")]
pub static SLOW_PATH: ProgramArray<{ SLOW_PATH_PROGRAMS.len() }> = ProgramArray::new();

/// Written once by the agent. An element is one word. With larger elements the program would add a variable offset to
/// the pointer, and without `CAP_PERFMON` the verifier would check the rest of the program once for each offset.
#[btf_map(name = "npl_crc")]
pub static CRC: Array<u32, { crc::ELEMENTS }> = Array::new();

/// Uplinks to which replies are redirected, by ifindex. Written by the agent, which follows the Node's devices.
#[btf_map(name = "npl_uplink")]
pub static UPLINK: HashMap<u32, u32, { MAX_UPLINKS as usize }> = HashMap::new();

/// Devices that run the XDP program, by ifindex. Written by the agent. Looked up only where
/// [`npl_common::config::FLAG_XDP`] is set.
#[btf_map(name = "npl_xdp_dev")]
pub static XDP_DEVICE: HashMap<u32, u32, { MAX_XDP_DEVICES as usize }> = HashMap::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_fragbuf")]
pub static FRAGMENT_BUFFER: PerCpuArray<SavedFrame, { fragment_buffer::ELEMENTS as usize }> = PerCpuArray::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_sctpbuf")]
pub static SCTP_BUFFER: Array<SavedFrame, { fragment_buffer::SCTP_FRAGMENTS as usize }> = Array::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_stats")]
pub static STATS: PerCpuArray<MappingStats, { MAX_STATS as usize }> = PerCpuArray::new();

/// Written by the kernel programs.
#[btf_map(name = "npl_reason")]
pub static REASONS: PerCpuArray<u64, { MAX_REASONS as usize }> = PerCpuArray::new();
