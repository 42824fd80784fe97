// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Names that both sides, the tests and an operator with `bpftool` use.

/// Version of the layout of all maps; part of the pin path, so that agents of different versions never share a map.
pub const ABI_VERSION: u32 = 1;

/// Folder under the bpffs that holds everything of NPL's, of any ABI version.
pub const PIN_ROOT: &str = "npl";

/// Folder below `<bpffs>/npl/v<ABI>/` that holds the pinned BPF links.
pub const LINK_DIR: &str = "links";

/// Folder below `<bpffs>/npl/v<ABI>/` that holds the pinned programs, in a folder for each build.
pub const PROGRAM_DIR: &str = "programs";

/// The longest name that the kernel keeps of a map or program, in bytes, without the terminating zero.
pub const MAX_NAME: usize = 15;

/// Configuration: array of one [`crate::config::Config`].
pub const MAP_CONFIG: &str = "npl_config";
/// Local IPv4 addresses: [`crate::mapping::LocalAddressV4`] to [`crate::mapping::LocalAddress`].
pub const MAP_LOCAL_V4: &str = "npl_local_v4";
/// Index of a local IPv4 address to the address, for the half-open cache: array of [`crate::mapping::LocalAddressV4`].
pub const MAP_LOCAL_IDX_V4: &str = "npl_laddr_v4";
/// IPv4 mappings: [`crate::mapping::Frontend`] to [`crate::mapping::BackendV4`].
pub const MAP_MAPPING_V4: &str = "npl_map_v4";
/// Allowed sources of restricted IPv4 mappings: a prefix length and [`crate::mapping::SourceV4`] to
/// [`crate::mapping::ALLOWED`].
pub const MAP_ALLOW_V4: &str = "npl_allow_v4";
/// IPv4 Pod endpoints that any mapping leads to: [`crate::mapping::EndpointV4`] to [`crate::mapping::Endpoint`].
pub const MAP_ENDPOINT_V4: &str = "npl_ep_v4";
/// IPv4 flows that completed an exchange: [`crate::flow::FlowKeyV4`] to [`crate::flow::FlowV4`].
pub const MAP_FLOW_V4: &str = "npl_flow_v4";
/// Half-open IPv4 flows: array of `u64`, see [`crate::syn`].
pub const MAP_SYN_V4: &str = "npl_syn_v4";
/// Fragmented IPv4 datagrams: array of `u64`, see [`crate::fragment`].
pub const MAP_FRAGMENT_V4: &str = "npl_frag_v4";
/// As [`MAP_LOCAL_V4`], IPv6.
pub const MAP_LOCAL_V6: &str = "npl_local_v6";
/// As [`MAP_LOCAL_IDX_V4`], IPv6.
pub const MAP_LOCAL_IDX_V6: &str = "npl_laddr_v6";
/// As [`MAP_MAPPING_V4`], IPv6.
pub const MAP_MAPPING_V6: &str = "npl_map_v6";
/// As [`MAP_ALLOW_V4`], IPv6.
pub const MAP_ALLOW_V6: &str = "npl_allow_v6";
/// As [`MAP_ENDPOINT_V4`], IPv6.
pub const MAP_ENDPOINT_V6: &str = "npl_ep_v6";
/// As [`MAP_FLOW_V4`], IPv6.
pub const MAP_FLOW_V6: &str = "npl_flow_v6";
/// As [`MAP_SYN_V4`], IPv6.
pub const MAP_SYN_V6: &str = "npl_syn_v6";
/// As [`MAP_FRAGMENT_V4`], IPv6.
pub const MAP_FRAGMENT_V6: &str = "npl_frag_v6";
/// Conversations of local clients, IPv4: [`crate::peer::PeerKeyV4`] to [`crate::peer::PeerV4`].
pub const MAP_PEER_V4: &str = "npl_peer_v4";
/// As [`MAP_PEER_V4`], IPv6.
pub const MAP_PEER_V6: &str = "npl_peer_v6";
/// Copies of fragments that came too early: per-CPU array of [`crate::hold::Held`].
pub const MAP_HOLD: &str = "npl_hold";
/// First fragments of SCTP that wait for the last one: array of [`crate::hold::Held`].
pub const MAP_FIRST: &str = "npl_first";
/// What the host has under way by node ports, IPv4: array of `u64`, see [`crate::host`].
pub const MAP_HOST_V4: &str = "npl_host_v4";
/// As [`MAP_HOST_V4`], IPv6.
pub const MAP_HOST_V6: &str = "npl_host_v6";
/// When a datagram last came to a node port that led nowhere, IPv4: array of `u64`, by the port, see [`crate::stray`].
pub const MAP_STRAY_V4: &str = "npl_stray_v4";
/// As [`MAP_STRAY_V4`], IPv6.
pub const MAP_STRAY_V6: &str = "npl_stray_v6";
/// Programs that look at unusual packets: program array of [`REST_PROGRAMS`].
pub const MAP_REST: &str = "npl_rest";
/// What SCTP's checksum is changed by: array of [`crate::crc::TABLE`].
pub const MAP_CRC: &str = "npl_crc";
/// Uplinks that replies are redirected to: kernel index to [`crate::direct::UPLINK`].
pub const MAP_UPLINK: &str = "npl_uplink";
/// Devices whose drivers run the program for them: kernel index to [`crate::config::AHEAD`].
pub const MAP_XDP_DEVICE: &str = "npl_xdp_dev";
/// Pods that requests are redirected to, IPv4: [`crate::direct::PodV4`] to [`crate::direct::PodWay`].
pub const MAP_POD_V4: &str = "npl_pod_v4";
/// As [`MAP_POD_V4`], IPv6.
pub const MAP_POD_V6: &str = "npl_pod_v6";
/// Copies of IPv4 mappings that spare a look-up: array of [`crate::hint::HintV4`].
pub const MAP_HINT_V4: &str = "npl_hint_v4";
/// As [`MAP_HINT_V4`], IPv6.
pub const MAP_HINT_V6: &str = "npl_hint_v6";
/// Copies of what IPv4 replies were found to be: array of [`crate::hint::ReplyHint`], beside [`MAP_SYN_V4`].
pub const MAP_REPLY_HINT_V4: &str = "npl_rhint_v4";
/// As [`MAP_REPLY_HINT_V4`], IPv6.
pub const MAP_REPLY_HINT_V6: &str = "npl_rhint_v6";
/// When the host's stack let IPv4 flows through: array of [`crate::offload::Passed`].
pub const MAP_PASSED_V4: &str = "npl_passed_v4";
/// As [`MAP_PASSED_V4`], IPv6.
pub const MAP_PASSED_V6: &str = "npl_passed_v6";
/// Counters per mapping: per-CPU array of [`crate::stats::MappingStats`], indexed by a backend's `stats_index`.
pub const MAP_STATS: &str = "npl_stats";
/// Counters per reason: per-CPU array of `u64`, indexed by [`crate::reason::Reason`].
pub const MAP_REASON: &str = "npl_reason";

/// Every map that is pinned, by name.
pub const PINNED_MAPS: &[&str] = &[
    MAP_CONFIG,
    MAP_LOCAL_V4,
    MAP_LOCAL_IDX_V4,
    MAP_MAPPING_V4,
    MAP_ALLOW_V4,
    MAP_ENDPOINT_V4,
    MAP_FLOW_V4,
    MAP_SYN_V4,
    MAP_FRAGMENT_V4,
    MAP_LOCAL_V6,
    MAP_LOCAL_IDX_V6,
    MAP_MAPPING_V6,
    MAP_ALLOW_V6,
    MAP_ENDPOINT_V6,
    MAP_FLOW_V6,
    MAP_SYN_V6,
    MAP_FRAGMENT_V6,
    MAP_PEER_V4,
    MAP_PEER_V6,
    MAP_HOLD,
    MAP_FIRST,
    MAP_HOST_V4,
    MAP_HOST_V6,
    MAP_STRAY_V4,
    MAP_STRAY_V6,
    MAP_REST,
    MAP_CRC,
    MAP_UPLINK,
    MAP_XDP_DEVICE,
    MAP_POD_V4,
    MAP_POD_V6,
    MAP_HINT_V4,
    MAP_HINT_V6,
    MAP_REPLY_HINT_V4,
    MAP_REPLY_HINT_V6,
    MAP_PASSED_V4,
    MAP_PASSED_V6,
    MAP_STATS,
    MAP_REASON,
];

/// A constant of the object, one byte: 1 if packets are read by pointers, 0 if by a helper of the kernel.
///
/// Before 6.6, and the stable kernels that have its change, only a loader with `CAP_PERFMON` may compare packet pointers.
pub const GLOBAL_DIRECT_READS: &str = "NPL_DIRECT_READS";

/// TC ingress on a device with Ethernet headers: node port to Pod.
pub const PROG_INGRESS: &str = "npl_ingress";
/// TC egress on a device with Ethernet headers: Pod to client.
pub const PROG_EGRESS: &str = "npl_egress";
/// TC ingress on a device without link-layer header (tun, ipip, wireguard).
pub const PROG_INGRESS_L3: &str = "npl_ingress_l3";
/// TC egress on a device without link-layer header.
pub const PROG_EGRESS_L3: &str = "npl_egress_l3";

/// As [`PROG_INGRESS`], past the host's stack where that can be.
pub const PROG_INGRESS_DIRECT: &str = "npl_in_direct";
/// TC ingress on a device that leads to Pods: Pod to client, past the host's stack where that can be.
pub const PROG_PODS: &str = "npl_pods";

/// As [`PROG_INGRESS`], past the host's stack while that lets the flow through.
pub const PROG_INGRESS_OFFLOAD: &str = "npl_off_ingress";
/// As [`PROG_EGRESS`]; notes what the host's stack has let through.
pub const PROG_EGRESS_OFFLOAD: &str = "npl_off_egress";
/// As [`PROG_PODS`], past the host's stack while that lets the flow through.
pub const PROG_PODS_OFFLOAD: &str = "npl_off_pods";
/// TC egress on a device that leads to Pods: notes the requests that the host's stack has let through.
pub const PROG_TO_PODS: &str = "npl_off_to_pods";

/// Every program that devices carry.
pub const PROGRAMS: &[&str] = &[
    PROG_INGRESS,
    PROG_EGRESS,
    PROG_INGRESS_L3,
    PROG_EGRESS_L3,
    PROG_INGRESS_DIRECT,
    PROG_PODS,
    PROG_INGRESS_OFFLOAD,
    PROG_EGRESS_OFFLOAD,
    PROG_PODS_OFFLOAD,
    PROG_TO_PODS,
];

/// XDP on a device with Ethernet headers: node port to Pod, of plain packets.
pub const PROG_XDP: &str = "npl_xdp";
/// As [`PROG_XDP`], from Linux 5.18 on, where a frame may be in parts.
pub const PROG_XDP_FRAGS: &str = "npl_xdp_frags";

/// Every program that a device's driver runs; one of them per kernel.
pub const XDP_PROGRAMS: &[&str] = &[PROG_XDP, PROG_XDP_FRAGS];

/// Every program that those of [`PROGRAMS`] jump to with a packet that is unusual: an ICMP error, a fragment, SCTP, or
/// one with options or extension headers. Each at its index in [`MAP_REST`], see [`rest_of`].
pub const REST_PROGRAMS: &[&str] =
    &["npl_in_rest", "npl_out_rest", "npl_in_l3_rest", "npl_out_l3_rest", "npl_in_d_rest", "npl_pods_rest"];
/// Index of the rest of [`PROG_INGRESS`].
pub const REST_INGRESS: u32 = 0;
/// Index of the rest of [`PROG_EGRESS`].
pub const REST_EGRESS: u32 = 1;
/// Index of the rest of [`PROG_INGRESS_L3`].
pub const REST_INGRESS_L3: u32 = 2;
/// Index of the rest of [`PROG_EGRESS_L3`].
pub const REST_EGRESS_L3: u32 = 3;

/// Index of the rest of [`PROG_INGRESS_DIRECT`].
pub const REST_INGRESS_DIRECT: u32 = 4;
/// Index of the rest of [`PROG_PODS`].
pub const REST_PODS: u32 = 5;

/// The index of the program that one of [`PROGRAMS`] jumps to; nothing of any other program.
pub fn rest_of(program: &str) -> Option<u32> {
    match program {
        PROG_INGRESS | PROG_INGRESS_OFFLOAD => Some(REST_INGRESS),
        PROG_INGRESS_DIRECT => Some(REST_INGRESS_DIRECT),
        PROG_PODS => Some(REST_PODS),
        PROG_EGRESS | PROG_EGRESS_OFFLOAD => Some(REST_EGRESS),
        PROG_INGRESS_L3 => Some(REST_INGRESS_L3),
        PROG_EGRESS_L3 => Some(REST_EGRESS_L3),
        _ => None,
    }
}

/// Every program that a cgroup carries, in the order in which they are attached: answers before requests, so that no
/// client is shown an address that it did not ask for.
pub const SOCKET_PROGRAMS: &[SocketProgram] = &[
    SocketProgram { name: "npl_recvmsg4", hook: "recvmsg4" },
    SocketProgram { name: "npl_recvmsg6", hook: "recvmsg6" },
    SocketProgram { name: "npl_getpeer4", hook: "getpeername4" },
    SocketProgram { name: "npl_getpeer6", hook: "getpeername6" },
    SocketProgram { name: "npl_connect4", hook: "connect4" },
    SocketProgram { name: "npl_connect6", hook: "connect6" },
    SocketProgram { name: "npl_sendmsg4", hook: "sendmsg4" },
    SocketProgram { name: "npl_sendmsg6", hook: "sendmsg6" },
];

/// A program for the sockets of a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketProgram {
    /// Its name in the object and in the kernel.
    pub name: &'static str,
    /// The kernel's name of its hook; part of its pin's.
    pub hook: &'static str,
}

const fn all_fit(names: &[&str]) -> bool {
    let mut i = 0;
    while i < names.len() {
        if names[i].len() > MAX_NAME {
            return false;
        }
        i += 1;
    }
    true
}

const fn all_sockets_fit(programs: &[SocketProgram]) -> bool {
    let mut i = 0;
    while i < programs.len() {
        if programs[i].name.len() > MAX_NAME {
            return false;
        }
        i += 1;
    }
    true
}

const _: () = assert!(all_sockets_fit(SOCKET_PROGRAMS), "the kernel keeps 15 bytes of a name");
const _: () = assert!(all_fit(PINNED_MAPS), "the kernel keeps 15 bytes of a name");
const _: () = assert!(
    all_fit(PROGRAMS) && all_fit(REST_PROGRAMS) && all_fit(XDP_PROGRAMS),
    "the kernel keeps 15 bytes of a name"
);
