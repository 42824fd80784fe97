// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Defines the names of maps, programs and pins. The kernel programs, the agent, the tests and `bpftool` use these
//! names.

/// The ABI version, which identifies the layout of all maps. The version is part of the path of the pins, so that
/// agents of different ABI versions never share a map.
pub const ABI_VERSION: u32 = 2;

/// Directory below the BPF file system that contains the pins of every ABI version of NPL.
pub const PIN_ROOT: &str = "npl";

/// Directory below `<bpffs>/npl/v<ABI>/` with the pinned BPF links.
pub const LINK_DIR: &str = "links";

/// Directory below `<bpffs>/npl/v<ABI>/` with the pinned programs, in one subdirectory for each build.
pub const PROGRAM_DIR: &str = "programs";

/// Maximum length in bytes of a map's or program's name in the kernel, without the terminating zero.
pub const MAX_NAME: usize = 15;

/// The configuration of the kernel programs: array of one [`crate::config::Config`].
pub const MAP_CONFIG: &str = "npl_config";
/// IPv4 node addresses: map from [`crate::mapping::NodeAddressV4`] to [`crate::mapping::LocalAddress`].
pub const MAP_NODE_ADDRESS_V4: &str = "npl_addr2idx_v4";
/// IPv4 node addresses by the index that half-open entries and fragment records contain: array of
/// [`crate::mapping::NodeAddressV4`].
pub const MAP_NODE_ADDRESS_BY_INDEX_V4: &str = "npl_idx2addr_v4";
/// IPv4 mappings: map from [`crate::mapping::Frontend`] to [`crate::mapping::BackendV4`].
pub const MAP_MAPPING_V4: &str = "npl_mapping_v4";
/// LPM trie with the source allow-lists of IPv4 mappings: from a prefix length and a [`crate::mapping::SourceV4`] to
/// [`crate::mapping::ALLOWED`].
pub const MAP_ALLOW_V4: &str = "npl_allow_v4";
/// IPv4 endpoints, the Pod side of mappings: map from [`crate::mapping::EndpointV4`] to [`crate::mapping::Endpoint`].
pub const MAP_ENDPOINT_V4: &str = "npl_endpoint_v4";
/// Conntrack entries of established TCP connections over IPv4: map from [`crate::flow::FlowKeyV4`] to
/// [`crate::flow::FlowV4`].
pub const MAP_FLOW_V4: &str = "npl_flow_v4";
/// Like [`MAP_FLOW_V4`], for UDP flows.
pub const MAP_UDP_FLOW_V4: &str = "npl_udpflow_v4";
/// Like [`MAP_FLOW_V4`], for SCTP associations.
pub const MAP_SCTP_FLOW_V4: &str = "npl_sctpflow_v4";
/// Half-open cache of IPv4, with the conntrack entries of half-open flows and copies of the entries of established
/// flows: array of `u64`, see [`crate::half_open`].
pub const MAP_HALF_OPEN_V4: &str = "npl_halfopen_v4";
/// Fragment records of IPv4 datagrams: array of `u64`, see [`crate::fragment`].
pub const MAP_FRAGMENT_V4: &str = "npl_frag_v4";
/// Like [`MAP_NODE_ADDRESS_V4`], for IPv6.
pub const MAP_NODE_ADDRESS_V6: &str = "npl_addr2idx_v6";
/// Like [`MAP_NODE_ADDRESS_BY_INDEX_V4`], for IPv6.
pub const MAP_NODE_ADDRESS_BY_INDEX_V6: &str = "npl_idx2addr_v6";
/// Like [`MAP_MAPPING_V4`], for IPv6.
pub const MAP_MAPPING_V6: &str = "npl_mapping_v6";
/// Like [`MAP_ALLOW_V4`], for IPv6.
pub const MAP_ALLOW_V6: &str = "npl_allow_v6";
/// Like [`MAP_ENDPOINT_V4`], for IPv6.
pub const MAP_ENDPOINT_V6: &str = "npl_endpoint_v6";
/// Like [`MAP_FLOW_V4`], for IPv6.
pub const MAP_FLOW_V6: &str = "npl_flow_v6";
/// Like [`MAP_UDP_FLOW_V4`], for IPv6.
pub const MAP_UDP_FLOW_V6: &str = "npl_udpflow_v6";
/// Like [`MAP_SCTP_FLOW_V4`], for IPv6.
pub const MAP_SCTP_FLOW_V6: &str = "npl_sctpflow_v6";
/// Like [`MAP_HALF_OPEN_V4`], for IPv6.
pub const MAP_HALF_OPEN_V6: &str = "npl_halfopen_v6";
/// Like [`MAP_FRAGMENT_V4`], for IPv6.
pub const MAP_FRAGMENT_V6: &str = "npl_frag_v6";
/// Socket reverse NAT for local clients, IPv4: map from [`crate::socket_rnat::SocketRnatKeyV4`] to
/// [`crate::socket_rnat::SocketRnatV4`].
pub const MAP_SOCKET_RNAT_V4: &str = "npl_sk_rnat_v4";
/// Like [`MAP_SOCKET_RNAT_V4`], for IPv6.
pub const MAP_SOCKET_RNAT_V6: &str = "npl_sk_rnat_v6";
/// Fragment buffer, for fragments that arrived before the first fragment of their datagram: per-CPU array of
/// [`crate::fragment_buffer::SavedFrame`].
pub const MAP_FRAGMENT_BUFFER: &str = "npl_early_frags";
/// SCTP reassembly buffer, for first fragments that wait for the last fragment: array of
/// [`crate::fragment_buffer::SavedFrame`].
pub const MAP_SCTP_BUFFER: &str = "npl_sctp_frags";
/// IPv4 host connections: array of `u64`, see [`crate::host_connection`].
pub const MAP_HOST_CONNECTION_V4: &str = "npl_hostconn_v4";
/// Like [`MAP_HOST_CONNECTION_V4`], for IPv6.
pub const MAP_HOST_CONNECTION_V6: &str = "npl_hostconn_v6";
/// For each node port, the time of the last IPv4 packet that matched no mapping, or of the last removal of an IPv4
/// mapping: array of `u64`, indexed by the port, see [`crate::unmapped`].
pub const MAP_UNMAPPED_V4: &str = "npl_unmap_ts_v4";
/// Like [`MAP_UNMAPPED_V4`], for IPv6.
pub const MAP_UNMAPPED_V6: &str = "npl_unmap_ts_v6";
/// The slow-path programs, for tail calls: program array with the programs of [`SLOW_PATH_PROGRAMS`].
pub const MAP_SLOW_PATH: &str = "npl_slow";
/// `CRC32c` table for SCTP checksums: array of `u32` with the elements of [`crate::crc::TABLE`].
pub const MAP_CRC: &str = "npl_crc";
/// Uplinks to which the programs may redirect replies: map from interface index to [`crate::next_hop::UPLINK`].
pub const MAP_UPLINK: &str = "npl_rd_uplinks";
/// Devices whose packets may already be translated when NPL's TC program runs. These are devices with the XDP program
/// and, before Linux 6.6, devices with NPL's temporary second filter, which exists while the agent moves NPL's filter
/// ahead of all other filters. Map from interface index to [`crate::config::PRE_TC_DEVICE_VALUE`].
pub const MAP_PRE_TC_DEVICE: &str = "npl_pre_tc_devs";
/// Next hops of Pods in redirect and offload mode, IPv4: map from [`crate::next_hop::PodAddressV4`] to
/// [`crate::next_hop::PodNextHop`].
pub const MAP_NEXT_HOP_V4: &str = "npl_pod_dev_v4";
/// Like [`MAP_NEXT_HOP_V4`], for IPv6.
pub const MAP_NEXT_HOP_V6: &str = "npl_pod_dev_v6";
/// Cached next hops of replies in redirect and offload mode: per-CPU array of [`crate::next_hop::CachedNextHop`].
pub const MAP_CACHED_NEXT_HOP: &str = "npl_rd_nexthops";
/// The route look-up that the running program makes: per-CPU array of one `struct bpf_fib_lookup`.
pub const MAP_ROUTE_LOOKUP: &str = "npl_rd_lookup";
/// Lookup cache of IPv4 mappings: array of [`crate::lookup_cache::CachedMappingV4`].
pub const MAP_LOOKUP_CACHE_V4: &str = "npl_reqcache_v4";
/// Like [`MAP_LOOKUP_CACHE_V4`], for IPv6.
pub const MAP_LOOKUP_CACHE_V6: &str = "npl_reqcache_v6";
/// Lookup cache of IPv4 replies: array of [`crate::lookup_cache::CachedReply`], with the same indexes as
/// [`MAP_HALF_OPEN_V4`].
pub const MAP_REPLY_CACHE_V4: &str = "npl_repcache_v4";
/// Like [`MAP_REPLY_CACHE_V4`], for IPv6.
pub const MAP_REPLY_CACHE_V6: &str = "npl_repcache_v6";
/// Stack observations of IPv4 flows: array of [`crate::offload::StackSeen`].
pub const MAP_STACK_SEEN_V4: &str = "npl_stkseen_v4";
/// Like [`MAP_STACK_SEEN_V4`], for IPv6.
pub const MAP_STACK_SEEN_V6: &str = "npl_stkseen_v6";
/// Counters per mapping: per-CPU array of [`crate::stats::MappingStats`], indexed by a backend's `stats_index`.
pub const MAP_STATS: &str = "npl_cnt_mapping";
/// Counters per reason: per-CPU array of `u64`, indexed by [`crate::reason::Reason`].
pub const MAP_REASON: &str = "npl_cnt_reason";

/// The filter of packet tracing: array of one [`crate::packet_trace::TraceFilter`].
pub const MAP_TRACE_FILTER: &str = "npl_tracefilter";
/// The packet tracing record that the running program fills in: per-CPU array of one [`crate::packet_trace::TraceCpu`].
pub const MAP_TRACE_CPU: &str = "npl_trace_cpu";
/// The ring buffer of packet tracing, with records of the type [`crate::packet_trace::TraceRecord`].
pub const MAP_TRACE_RING: &str = "npl_trace_ring";

/// The names of the flow tables for IPv4: of TCP, UDP and SCTP.
pub const FLOW_TABLES_V4: [&str; 3] = [MAP_FLOW_V4, MAP_UDP_FLOW_V4, MAP_SCTP_FLOW_V4];
/// Like [`FLOW_TABLES_V4`], for IPv6.
pub const FLOW_TABLES_V6: [&str; 3] = [MAP_FLOW_V6, MAP_UDP_FLOW_V6, MAP_SCTP_FLOW_V6];

/// The names of all maps that the agent pins.
pub const PINNED_MAPS: &[&str] = &[
    MAP_CONFIG,
    MAP_NODE_ADDRESS_V4,
    MAP_NODE_ADDRESS_BY_INDEX_V4,
    MAP_MAPPING_V4,
    MAP_ALLOW_V4,
    MAP_ENDPOINT_V4,
    MAP_FLOW_V4,
    MAP_UDP_FLOW_V4,
    MAP_SCTP_FLOW_V4,
    MAP_HALF_OPEN_V4,
    MAP_FRAGMENT_V4,
    MAP_NODE_ADDRESS_V6,
    MAP_NODE_ADDRESS_BY_INDEX_V6,
    MAP_MAPPING_V6,
    MAP_ALLOW_V6,
    MAP_ENDPOINT_V6,
    MAP_FLOW_V6,
    MAP_UDP_FLOW_V6,
    MAP_SCTP_FLOW_V6,
    MAP_HALF_OPEN_V6,
    MAP_FRAGMENT_V6,
    MAP_SOCKET_RNAT_V4,
    MAP_SOCKET_RNAT_V6,
    MAP_FRAGMENT_BUFFER,
    MAP_SCTP_BUFFER,
    MAP_HOST_CONNECTION_V4,
    MAP_HOST_CONNECTION_V6,
    MAP_UNMAPPED_V4,
    MAP_UNMAPPED_V6,
    MAP_SLOW_PATH,
    MAP_CRC,
    MAP_UPLINK,
    MAP_PRE_TC_DEVICE,
    MAP_NEXT_HOP_V4,
    MAP_NEXT_HOP_V6,
    MAP_CACHED_NEXT_HOP,
    MAP_ROUTE_LOOKUP,
    MAP_LOOKUP_CACHE_V4,
    MAP_LOOKUP_CACHE_V6,
    MAP_REPLY_CACHE_V4,
    MAP_REPLY_CACHE_V6,
    MAP_STACK_SEEN_V4,
    MAP_STACK_SEEN_V6,
    MAP_STATS,
    MAP_REASON,
    MAP_TRACE_FILTER,
    MAP_TRACE_CPU,
    MAP_TRACE_RING,
];

/// A one-byte constant of the kernel object, which the loader sets. If the constant is 1, the programs read packets
/// through pointers; if the constant is 0, through a kernel helper.
///
/// Before Linux 6.6, only a loader with `CAP_PERFMON` may load programs that compare packet pointers. Some earlier
/// stable kernels contain a backport of the change that removes this restriction.
pub const GLOBAL_DIRECT_READS: &str = "NPL_DIRECT_READS";

/// Translates requests at TC ingress of a device with Ethernet headers.
pub const PROG_INGRESS: &str = "npl_ingress";
/// Translates replies at TC egress of a device with Ethernet headers.
pub const PROG_EGRESS: &str = "npl_egress";
/// Translates requests at TC ingress of a device without link-layer header (tun, ipip, wireguard).
pub const PROG_INGRESS_L3: &str = "npl_ingress_l3";
/// Translates replies at TC egress of a device without link-layer header.
pub const PROG_EGRESS_L3: &str = "npl_egress_l3";

/// Like [`PROG_INGRESS`], but for `--forwarding redirect`.
pub const PROG_INGRESS_REDIRECT: &str = "npl_rd_ingress";
/// Translates replies at TC ingress of a Pod-facing device, for `--forwarding redirect`.
pub const PROG_PODS_REDIRECT: &str = "npl_rd_pods";

/// Like [`PROG_INGRESS`], but for `--forwarding offload`.
pub const PROG_INGRESS_OFFLOAD: &str = "npl_off_ingress";
/// Like [`PROG_EGRESS`], but for `--forwarding offload`: also records stack observations of replies.
pub const PROG_EGRESS_OFFLOAD: &str = "npl_off_egress";
/// Like [`PROG_PODS_REDIRECT`], but for `--forwarding offload`.
pub const PROG_PODS_OFFLOAD: &str = "npl_off_pods";
/// Records stack observations of requests at TC egress of a Pod-facing device, for `--forwarding offload`.
pub const PROG_TO_PODS: &str = "npl_off_to_pods";

/// The names of all programs that the agent attaches to TC hooks. The list does not contain the slow-path programs.
pub const PROGRAMS: &[&str] = &[
    PROG_INGRESS,
    PROG_EGRESS,
    PROG_INGRESS_L3,
    PROG_EGRESS_L3,
    PROG_INGRESS_REDIRECT,
    PROG_PODS_REDIRECT,
    PROG_INGRESS_OFFLOAD,
    PROG_EGRESS_OFFLOAD,
    PROG_PODS_OFFLOAD,
    PROG_TO_PODS,
];

/// Translates fast-path requests at the XDP hook of a device with Ethernet headers.
pub const PROG_XDP: &str = "npl_xdp";
/// Like [`PROG_XDP`], but also for frames that consist of several buffers (since Linux 5.18).
pub const PROG_XDP_FRAGS: &str = "npl_xdp_frags";

/// The names of all XDP programs. The agent attaches [`PROG_XDP_FRAGS`] if the kernel supports frames that consist of
/// several buffers, and otherwise [`PROG_XDP`].
pub const XDP_PROGRAMS: &[&str] = &[PROG_XDP, PROG_XDP_FRAGS];

/// The names of all slow-path programs. The position in this list is the program's index in [`MAP_SLOW_PATH`], see
/// [`SlowPath::index`]. Each address family has programs of its own: the verifier of Linux 5.10 visits nearly twice as
/// many instructions of a program for both families, and gives up after a million visited instructions.
pub const SLOW_PATH_PROGRAMS: &[&str] = &[
    "npl_in_slow4",
    "npl_in_slow6",
    "npl_out_slow4",
    "npl_out_slow6",
    "npl_inl3_slow4",
    "npl_inl3_slow6",
    "npl_outl3_slow4",
    "npl_outl3_slow6",
    "npl_rdin_slow4",
    "npl_rdin_slow6",
    "npl_rdpod_slow4",
    "npl_rdpod_slow6",
];

/// The slow path of a fast-path program: one slow-path program for IPv4 packets, and one for IPv6 packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlowPath {
    /// The slow path of [`PROG_INGRESS`] and [`PROG_INGRESS_OFFLOAD`].
    Ingress,
    /// The slow path of [`PROG_EGRESS`] and [`PROG_EGRESS_OFFLOAD`].
    Egress,
    /// The slow path of [`PROG_INGRESS_L3`].
    IngressL3,
    /// The slow path of [`PROG_EGRESS_L3`].
    EgressL3,
    /// The slow path of [`PROG_INGRESS_REDIRECT`].
    IngressRedirect,
    /// The slow path of [`PROG_PODS_REDIRECT`].
    PodsRedirect,
}

impl SlowPath {
    /// Returns the slow path that `program` tail-calls; `None` if `program` has no slow path.
    fn of(program: &str) -> Option<Self> {
        match program {
            PROG_INGRESS | PROG_INGRESS_OFFLOAD => Some(Self::Ingress),
            PROG_INGRESS_REDIRECT => Some(Self::IngressRedirect),
            PROG_PODS_REDIRECT => Some(Self::PodsRedirect),
            PROG_EGRESS | PROG_EGRESS_OFFLOAD => Some(Self::Egress),
            PROG_INGRESS_L3 => Some(Self::IngressL3),
            PROG_EGRESS_L3 => Some(Self::EgressL3),
            _ => None,
        }
    }

    /// Returns the index in [`MAP_SLOW_PATH`] and in [`SLOW_PATH_PROGRAMS`] of the program for one address family.
    #[inline]
    pub const fn index(self, is_ipv6: bool) -> u32 {
        2 * self as u32 + is_ipv6 as u32
    }

    /// Returns the slow-path programs that `program` tail-calls: the index and name of each. Empty if `program` has no
    /// slow path.
    pub fn programs_of(program: &str) -> impl Iterator<Item = (u32, &'static str)> {
        let indexes = Self::of(program).into_iter().flat_map(|path| [path.index(false), path.index(true)]);
        indexes.map(|index| (index, SLOW_PATH_PROGRAMS[index as usize]))
    }
}

/// All cgroup programs, in the order in which the agent attaches them. Programs that translate the addresses that a
/// client sees (`recvmsg`, `getpeername`) are attached before programs that translate destinations (`connect`,
/// `sendmsg`), so that no client sees the Pod's address.
pub const SOCKET_PROGRAMS: &[SocketProgram] = &[
    SocketProgram { name: "npl_release", hook: RELEASE_HOOK },
    SocketProgram { name: "npl_recvmsg4", hook: "recvmsg4" },
    SocketProgram { name: "npl_recvmsg6", hook: "recvmsg6" },
    SocketProgram { name: "npl_getpeer4", hook: "getpeername4" },
    SocketProgram { name: "npl_getpeer6", hook: "getpeername6" },
    SocketProgram { name: "npl_connect4", hook: "connect4" },
    SocketProgram { name: "npl_connect6", hook: "connect6" },
    SocketProgram { name: "npl_sendmsg4", hook: "sendmsg4" },
    SocketProgram { name: "npl_sendmsg6", hook: "sendmsg6" },
];

/// The hook of the program that runs when a socket is closed. The program at this hook has another BPF program type
/// than the other cgroup programs.
pub const RELEASE_HOOK: &str = "sock_release";

/// A cgroup program that runs in system calls of sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketProgram {
    /// The program's name in the kernel object file and in the kernel.
    pub name: &'static str,
    /// The hook's name, such as `connect4`. The name is a part of the name of the program's ELF section
    /// (`cgroup/connect4`) and of the name of the link's pin.
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

const _: () = assert!(all_sockets_fit(SOCKET_PROGRAMS), "a name in the kernel has at most 15 bytes");
const _: () = assert!(all_fit(PINNED_MAPS), "a name in the kernel has at most 15 bytes");
const _: () = assert!(
    all_fit(PROGRAMS) && all_fit(SLOW_PATH_PROGRAMS) && all_fit(XDP_PROGRAMS),
    "a name in the kernel has at most 15 bytes"
);
