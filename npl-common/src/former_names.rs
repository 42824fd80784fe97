// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Lists the names that maps had in earlier builds. If an upgrade changes the ABI version, the agent copies entries of
//! the earlier version's maps. Within one ABI version, the maps keep their entries, and the agent only renames the
//! pins.

use crate::names::{
    MAP_ALLOW_V4, MAP_ALLOW_V6, MAP_FLOW_V4, MAP_FLOW_V6, MAP_FRAGMENT_BUFFER, MAP_LOOKUP_CACHE_V4,
    MAP_LOOKUP_CACHE_V6, MAP_MAPPING_V4, MAP_MAPPING_V6, MAP_NEXT_HOP_V4, MAP_NEXT_HOP_V6,
    MAP_NODE_ADDRESS_BY_INDEX_V4, MAP_NODE_ADDRESS_BY_INDEX_V6, MAP_NODE_ADDRESS_V4, MAP_NODE_ADDRESS_V6,
    MAP_PRE_TC_DEVICE, MAP_REASON, MAP_REPLY_CACHE_V4, MAP_REPLY_CACHE_V6, MAP_SCTP_BUFFER, MAP_SOCKET_RNAT_V4,
    MAP_SOCKET_RNAT_V6, MAP_STATS, MAP_UNMAPPED_V4, MAP_UNMAPPED_V6, MAP_UPLINK,
};

/// Maps whose keys and values have the same layout in ABI 1 as in this ABI: today's name, and the name in ABI 1. In the
/// flow tables of ABI 1, the bytes of [`crate::flow::FlowState::pod_acknowledgement`] contain an interface index, so
/// the agent does not copy this field.
pub const ABI_1: [(&str, &str); 8] = [
    (MAP_MAPPING_V4, "npl_map_v4"),
    (MAP_MAPPING_V6, "npl_map_v6"),
    (MAP_ALLOW_V4, "npl_allow_v4"),
    (MAP_ALLOW_V6, "npl_allow_v6"),
    (MAP_FLOW_V4, "npl_flow_v4"),
    (MAP_FLOW_V6, "npl_flow_v6"),
    (MAP_SOCKET_RNAT_V4, "npl_peer_v4"),
    (MAP_SOCKET_RNAT_V6, "npl_peer_v6"),
];

/// Maps that had another name, but the same layout, in earlier builds of ABI 2: today's name, and the former name. If a
/// map had several former names, the most recent former name comes last.
pub const ABI_2: [(&str, &str); 23] = [
    (MAP_UNMAPPED_V4, "npl_unmap_v4"),
    (MAP_UNMAPPED_V6, "npl_unmap_v6"),
    (MAP_UNMAPPED_V4, "npl_unmapped_v4"),
    (MAP_UNMAPPED_V6, "npl_unmapped_v6"),
    (MAP_NEXT_HOP_V4, "npl_nexthop_v4"),
    (MAP_NEXT_HOP_V6, "npl_nexthop_v6"),
    (MAP_SCTP_BUFFER, "npl_sctpbuf"),
    (MAP_SCTP_BUFFER, "npl_sctp_reasm"),
    (MAP_PRE_TC_DEVICE, "npl_xdp_dev"),
    (MAP_PRE_TC_DEVICE, "npl_xdp_devices"),
    (MAP_NODE_ADDRESS_V4, "npl_nodeip_v4"),
    (MAP_NODE_ADDRESS_V6, "npl_nodeip_v6"),
    (MAP_NODE_ADDRESS_BY_INDEX_V4, "npl_nodeidx_v4"),
    (MAP_NODE_ADDRESS_BY_INDEX_V6, "npl_nodeidx_v6"),
    (MAP_LOOKUP_CACHE_V4, "npl_lcache_v4"),
    (MAP_LOOKUP_CACHE_V6, "npl_lcache_v6"),
    (MAP_REPLY_CACHE_V4, "npl_rcache_v4"),
    (MAP_REPLY_CACHE_V6, "npl_rcache_v6"),
    (MAP_FRAGMENT_BUFFER, "npl_fragbuf"),
    (MAP_FRAGMENT_BUFFER, "npl_frag_buf"),
    (MAP_UPLINK, "npl_uplink"),
    (MAP_STATS, "npl_stats"),
    (MAP_REASON, "npl_reason"),
];
