// SPDX-License-Identifier: GPL-2.0-only
//! All maps. The agent pins them; their names are `npl_common::names`'s.

use aya_ebpf::{
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, ProgramArray},
    macros::btf_map,
};
use npl_common::{
    config::{Config, MAX_XDP_DEVICES},
    crc,
    direct::{MAX_PODS, MAX_UPLINKS, PodV4, PodV6, PodWay},
    flow::{FlowKeyV4, FlowKeyV6, FlowV4, FlowV6, MAX_FLOWS},
    fragment,
    hint::{HINTS, HintV4, HintV6, ReplyHint},
    hold::{self, Held},
    host,
    mapping::{
        BackendV4, BackendV6, Endpoint, EndpointV4, EndpointV6, Frontend, LocalAddress, LocalAddressV4, LocalAddressV6,
        MAX_LOCAL_ADDRESSES, MAX_MAPPINGS, MAX_SOURCE_RANGES, SourceV4, SourceV6,
    },
    names::REST_PROGRAMS,
    offload::{self, Passed},
    peer::{MAX_PEERS, PeerKeyV4, PeerKeyV6, PeerV4, PeerV6},
    reason::MAX_REASONS,
    stats::{MAX_STATS, MappingStats},
    stray,
    syn::{self, SLOTS},
};

/// Written by the agent.
#[btf_map(name = "npl_config")]
pub static CONFIG: Array<Config, 1> = Array::new();

/// Written by the agent, which follows the Node's addresses.
#[btf_map(name = "npl_local_v4")]
pub static LOCAL_V4: HashMap<LocalAddressV4, LocalAddress, { MAX_LOCAL_ADDRESSES as usize }> = HashMap::new();

/// Written by the agent; all zero where an index is free.
#[btf_map(name = "npl_laddr_v4")]
pub static LOCAL_ADDRESS_V4: Array<LocalAddressV4, { MAX_LOCAL_ADDRESSES as usize }> = Array::new();

/// Written by the agent. A hash, because replacing an element of one is atomic for its readers.
#[btf_map(name = "npl_map_v4")]
pub static MAPPING_V4: HashMap<Frontend, BackendV4, { MAX_MAPPINGS as usize }> = HashMap::new();

/// Written by the agent: who may use the mappings that not everybody may. Looked up for those alone.
#[btf_map(name = "npl_allow_v4")]
pub static ALLOW_V4: LpmTrie<SourceV4, u32, { MAX_SOURCE_RANGES as usize }> = LpmTrie::new();

/// Written by the agent.
#[btf_map(name = "npl_ep_v4")]
pub static ENDPOINT_V4: HashMap<EndpointV4, Endpoint, { MAX_MAPPINGS as usize }> = HashMap::new();

/// Written by the programs, purged by the agent. LRU, because the network chooses the keys.
#[btf_map(name = "npl_flow_v4")]
pub static FLOW_V4: LruHashMap<FlowKeyV4, FlowV4, { MAX_FLOWS as usize }> = LruHashMap::new();

/// Written by the programs, one aligned word at a time, and by the agent, in its own memory.
#[btf_map(name = "npl_syn_v4")]
pub static SYN_V4: Array<u64, { syn::WORDS as usize }, { syn::MAP_FLAGS as usize }> = Array::new();

/// Written by the programs, one aligned word at a time.
#[btf_map(name = "npl_frag_v4")]
pub static FRAGMENT_V4: Array<u64, { fragment::SLOTS as usize }> = Array::new();

/// Written by the agent, which follows the Node's addresses.
#[btf_map(name = "npl_local_v6")]
pub static LOCAL_V6: HashMap<LocalAddressV6, LocalAddress, { MAX_LOCAL_ADDRESSES as usize }> = HashMap::new();

/// Written by the agent; all zero where an index is free.
#[btf_map(name = "npl_laddr_v6")]
pub static LOCAL_ADDRESS_V6: Array<LocalAddressV6, { MAX_LOCAL_ADDRESSES as usize }> = Array::new();

/// Written by the agent. A hash, because replacing an element of one is atomic for its readers.
#[btf_map(name = "npl_map_v6")]
pub static MAPPING_V6: HashMap<Frontend, BackendV6, { MAX_MAPPINGS as usize }> = HashMap::new();

/// Written by the agent: who may use the mappings that not everybody may. Looked up for those alone.
#[btf_map(name = "npl_allow_v6")]
pub static ALLOW_V6: LpmTrie<SourceV6, u32, { MAX_SOURCE_RANGES as usize }> = LpmTrie::new();

/// Written by the agent.
#[btf_map(name = "npl_ep_v6")]
pub static ENDPOINT_V6: HashMap<EndpointV6, Endpoint, { MAX_MAPPINGS as usize }> = HashMap::new();

/// Written by the programs, purged by the agent. LRU, because the network chooses the keys.
#[btf_map(name = "npl_flow_v6")]
pub static FLOW_V6: LruHashMap<FlowKeyV6, FlowV6, { MAX_FLOWS as usize }> = LruHashMap::new();

/// Written by the programs, one aligned word at a time, and by the agent, in its own memory.
#[btf_map(name = "npl_syn_v6")]
pub static SYN_V6: Array<u64, { syn::WORDS as usize }, { syn::MAP_FLAGS as usize }> = Array::new();

/// Written by the programs, one aligned word at a time.
#[btf_map(name = "npl_frag_v6")]
pub static FRAGMENT_V6: Array<u64, { fragment::SLOTS as usize }> = Array::new();

/// Written by the programs, one aligned word at a time.
#[btf_map(name = "npl_host_v4")]
pub static HOST_V4: Array<u64, { host::SLOTS as usize }> = Array::new();

/// Written by the programs. LRU, because local clients choose how many sockets there are.
#[btf_map(name = "npl_peer_v4")]
pub static PEER_V4: LruHashMap<PeerKeyV4, PeerV4, { MAX_PEERS as usize }> = LruHashMap::new();

/// Written by the programs, one aligned word at a time, and by the agent as it takes mappings away.
#[btf_map(name = "npl_stray_v4")]
pub static STRAY_V4: Array<u64, { stray::PORTS as usize }> = Array::new();

/// Written by the programs, one aligned word at a time, and by the agent as it takes mappings away.
#[btf_map(name = "npl_stray_v6")]
pub static STRAY_V6: Array<u64, { stray::PORTS as usize }> = Array::new();

/// Written by the programs, one aligned word at a time.
#[btf_map(name = "npl_host_v6")]
pub static HOST_V6: Array<u64, { host::SLOTS as usize }> = Array::new();

/// Written by the programs. LRU, because local clients choose how many sockets there are.
#[btf_map(name = "npl_peer_v6")]
pub static PEER_V6: LruHashMap<PeerKeyV6, PeerV6, { MAX_PEERS as usize }> = LruHashMap::new();

/// Written by the agent: the programs for unusual packets.
#[btf_map(name = "npl_rest")]
pub static REST: ProgramArray<{ REST_PROGRAMS.len() }> = ProgramArray::new();

/// Written by the agent, once. Of single words, since to look one up is not to move a pointer: for each such move, the
/// verifier follows a way more of a program without `CAP_PERFMON`.
#[btf_map(name = "npl_crc")]
pub static CRC: Array<u32, { crc::ELEMENTS }> = Array::new();

/// Written by the agent, which follows the Node's devices.
#[btf_map(name = "npl_uplink")]
pub static UPLINK: HashMap<u32, u32, { MAX_UPLINKS as usize }> = HashMap::new();

/// Written by the agent, as it attaches the program for drivers. Looked up only where [`npl_common::config::FLAG_XDP`] is set.
#[btf_map(name = "npl_xdp_dev")]
pub static XDP_DEVICE: HashMap<u32, u32, { MAX_XDP_DEVICES as usize }> = HashMap::new();

/// Written by the agent, which follows the routes to Pods.
#[btf_map(name = "npl_pod_v4")]
pub static POD_V4: HashMap<PodV4, PodWay, { MAX_PODS as usize }> = HashMap::new();

/// Written by the agent, which follows the routes to Pods.
#[btf_map(name = "npl_pod_v6")]
pub static POD_V6: HashMap<PodV6, PodWay, { MAX_PODS as usize }> = HashMap::new();

/// Written by the programs, one aligned word at a time.
#[btf_map(name = "npl_hint_v4")]
pub static HINT_V4: Array<HintV4, { HINTS as usize }> = Array::new();

/// Written by the programs, one aligned word at a time.
#[btf_map(name = "npl_hint_v6")]
pub static HINT_V6: Array<HintV6, { HINTS as usize }> = Array::new();

/// Written by the programs, one aligned word at a time.
#[btf_map(name = "npl_rhint_v4")]
pub static REPLY_HINT_V4: Array<ReplyHint, { SLOTS as usize }> = Array::new();

/// Written by the programs, one aligned word at a time.
#[btf_map(name = "npl_rhint_v6")]
pub static REPLY_HINT_V6: Array<ReplyHint, { SLOTS as usize }> = Array::new();

/// Written by the programs, one aligned word at a time.
#[btf_map(name = "npl_passed_v4")]
pub static PASSED_V4: Array<Passed, { offload::SLOTS as usize }> = Array::new();

/// Written by the programs, one aligned word at a time.
#[btf_map(name = "npl_passed_v6")]
pub static PASSED_V6: Array<Passed, { offload::SLOTS as usize }> = Array::new();

/// Written by the programs, each processor its own.
#[btf_map(name = "npl_hold")]
pub static HOLD: PerCpuArray<Held, { hold::ELEMENTS as usize }> = PerCpuArray::new();

/// Written by the programs.
#[btf_map(name = "npl_first")]
pub static FIRST: Array<Held, { hold::FIRSTS as usize }> = Array::new();

/// Written by the programs.
#[btf_map(name = "npl_stats")]
pub static STATS: PerCpuArray<MappingStats, { MAX_STATS as usize }> = PerCpuArray::new();

/// Written by the programs.
#[btf_map(name = "npl_reason")]
pub static REASONS: PerCpuArray<u64, { MAX_REASONS as usize }> = PerCpuArray::new();
