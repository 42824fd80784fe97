// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Mappings of node ports to Pods, source allow-lists, and the endpoints by which replies are recognized.

/// IP protocol numbers that a mapping can have (IANA).
pub mod protocol {
    /// Transmission Control Protocol.
    pub const TCP: u8 = 6;
    /// User Datagram Protocol.
    pub const UDP: u8 = 17;
    /// Stream Control Transmission Protocol.
    pub const SCTP: u8 = 132;
}

/// Mappings per family. The largest node port range has 65 535 ports, each usable by three protocols.
pub const MAX_MAPPINGS: u32 = 16_384;
/// Ranges of allowed sources per family, of all mappings together; memory is allocated only for existing ranges.
pub const MAX_SOURCE_RANGES: u32 = 131_072;
/// Local addresses per family.
pub const MAX_LOCAL_ADDRESSES: u32 = 256;

/// Flag of a backend: only the sources of `npl_allow_v4` or `npl_allow_v6` may use the mapping.
pub const FLAG_RESTRICTED: u16 = 1;

/// The value of every range in `npl_allow_v4` and `npl_allow_v6`.
pub const ALLOWED: u32 = 1;

map_type! {
    /// An IPv4 address of this Node.
    pub struct NodeAddressV4: 4, align 4 {
        /// Network order.
        pub addr: [u8; 4],
    }
}

map_type! {
    /// An IPv6 address of this Node.
    pub struct NodeAddressV6: 16, align 4 {
        /// Network order.
        pub addr: [u8; 16],
    }
}

map_type! {
    /// The map value of a node address.
    pub struct LocalAddress: 4, align 4 {
        /// Index of the address; not reused while a conntrack entry may contain it.
        pub index: u32,
    }
}

map_type! {
    /// Node port and protocol that a client sends to, on any node address of one family.
    pub struct Frontend: 4, align 4 {
        /// Host order.
        pub node_port: u16,
        /// IP protocol number: 6 for TCP, 17 for UDP, 132 for SCTP.
        pub protocol: u8,
        /// Always zero.
        pub pad: u8,
    }
}

map_type! {
    /// The Pod behind an IPv4 mapping.
    pub struct BackendV4: 16, align 4 {
        /// Network order.
        pub pod_addr: [u8; 4],
        /// Host order.
        pub pod_port: u16,
        /// [`FLAG_RESTRICTED`] (1) if only allowed sources may use the mapping, else 0.
        pub flags: u16,
        /// The Pod's generation; a flow of another generation belongs to an earlier Pod with the same address.
        pub generation: u32,
        /// Element of the per-mapping counters.
        pub stats_index: u32,
    }
}

map_type! {
    /// The Pod behind an IPv6 mapping.
    pub struct BackendV6: 28, align 4 {
        /// Network order.
        pub pod_addr: [u8; 16],
        /// Host order.
        pub pod_port: u16,
        /// As in [`BackendV4`].
        pub flags: u16,
        /// As in [`BackendV4`].
        pub generation: u32,
        /// As in [`BackendV4`].
        pub stats_index: u32,
    }
}

map_type! {
    /// Source allow-list entry, IPv4: the part of the key after the prefix length. All bits of the frontend must match,
    /// and the source address's prefix.
    pub struct SourceV4: 8, align 4 {
        /// The mapping.
        pub frontend: Frontend,
        /// Network order; bits beyond the prefix are zero.
        pub addr: [u8; 4],
    }
}

map_type! {
    /// As [`SourceV4`], IPv6.
    pub struct SourceV6: 20, align 4 {
        /// The mapping.
        pub frontend: Frontend,
        /// Network order; bits beyond the prefix are zero.
        pub addr: [u8; 16],
    }
}

/// Bits of a frontend: the prefix length of an allow-list entry is this number plus the range's prefix length.
pub const FRONTEND_BITS: u32 = 32;

const _: () = assert!(size_of::<Frontend>() * u8::BITS as usize == FRONTEND_BITS as usize, "all of a frontend counts");

map_type! {
    /// The Pod's address and port of a mapping: only packets from such an endpoint can be replies.
    pub struct EndpointV4: 8, align 4 {
        /// Network order.
        pub pod_addr: [u8; 4],
        /// Host order.
        pub pod_port: u16,
        /// IP protocol number: 6 for TCP, 17 for UDP, 132 for SCTP.
        pub protocol: u8,
        /// Always zero.
        pub pad: u8,
    }
}

map_type! {
    /// As [`EndpointV4`], IPv6.
    pub struct EndpointV6: 20, align 4 {
        /// Network order.
        pub pod_addr: [u8; 16],
        /// Host order.
        pub pod_port: u16,
        /// IP protocol number: 6 for TCP, 17 for UDP, 132 for SCTP.
        pub protocol: u8,
        /// Always zero.
        pub pad: u8,
    }
}

map_type! {
    /// The map value of an endpoint.
    pub struct Endpoint: 8, align 4 {
        /// As in [`BackendV4`]; all mappings of one Pod port have the same generation.
        pub generation: u32,
        /// Element of the per-mapping counters.
        pub stats_index: u32,
    }
}
