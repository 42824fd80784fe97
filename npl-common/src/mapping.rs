// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Defines mappings of node ports to Pods, the source allow-lists of mappings, and the endpoints by which programs
//! recognize replies.

/// IANA numbers of the transport protocols that a mapping can have.
pub mod protocol {
    /// Transmission Control Protocol.
    pub const TCP: u8 = 6;
    /// User Datagram Protocol.
    pub const UDP: u8 = 17;
    /// Stream Control Transmission Protocol.
    pub const SCTP: u8 = 132;
}

/// Maximum number of mappings per IP family. A node port range may allow more mappings than this number: up to 65 535
/// ports, each for three protocols.
pub const MAX_MAPPINGS: u32 = 16_384;
/// Maximum number of source ranges per IP family, of all mappings together. The kernel allocates memory only for
/// existing ranges.
pub const MAX_SOURCE_RANGES: u32 = 131_072;
/// Maximum number of node addresses per IP family.
pub const MAX_LOCAL_ADDRESSES: u32 = 256;

/// Flag of a backend: only sources in the mapping's allow-list (`npl_allow_v4` or `npl_allow_v6`) may use the mapping.
pub const FLAG_RESTRICTED: u16 = 1;

/// The value of each element of `npl_allow_v4` and `npl_allow_v6`. Only the key has a meaning: a mapping and a source
/// range.
pub const ALLOWED: u32 = 1;

map_type! {
    /// A node address: an address of this Node on which clients reach node ports.
    pub struct NodeAddressV4: 4, align 4 {
        /// The node address, in network byte order.
        pub addr: [u8; 4],
    }
}

map_type! {
    /// Like [`NodeAddressV4`], for IPv6.
    pub struct NodeAddressV6: 16, align 4 {
        /// The node address, in network byte order.
        pub addr: [u8; 16],
    }
}

map_type! {
    /// The value of a node address in `npl_addr2idx_v4` and `npl_addr2idx_v6`.
    pub struct LocalAddress: 4, align 4 {
        /// Index of the node address. The agent does not reuse an index while a conntrack entry may contain the index.
        pub index: u32,
    }
}

map_type! {
    /// Node port and protocol of a mapping. The mapping applies to all node addresses of the map's IP family.
    pub struct Frontend: 4, align 4 {
        /// The node port, in host byte order.
        pub node_port: u16,
        /// IP protocol number: 6 for TCP, 17 for UDP, 132 for SCTP.
        pub protocol: u8,
        /// Always zero.
        pub pad: u8,
    }
}

map_type! {
    /// The Pod address and Pod port to which a mapping translates requests, and the properties of the mapping.
    pub struct BackendV4: 16, align 4 {
        /// The Pod's address, in network byte order.
        pub pod_addr: [u8; 4],
        /// The Pod port, in host byte order.
        pub pod_port: u16,
        /// [`FLAG_RESTRICTED`] (1) if only allowed sources may use the mapping, else 0.
        pub flags: u16,
        /// The Pod's generation, a hash of the Pod's UID. A flow with another generation belongs to an earlier Pod with
        /// the same address.
        pub generation: u32,
        /// Index of the mapping's element in `npl_cnt_mapping`.
        pub stats_index: u32,
    }
}

map_type! {
    /// Like [`BackendV4`], for IPv6.
    pub struct BackendV6: 28, align 4 {
        /// The Pod's address, in network byte order.
        pub pod_addr: [u8; 16],
        /// The Pod port, in host byte order.
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
    /// The key of a source range in an allow-list, without the prefix length that precedes it. In a look-up, all bits
    /// of the frontend and the prefix of the source address must match.
    pub struct SourceV4: 8, align 4 {
        /// The node port and protocol of the mapping.
        pub frontend: Frontend,
        /// Address of the source range, in network byte order; the bits after the prefix are zero.
        pub addr: [u8; 4],
    }
}

map_type! {
    /// Like [`SourceV4`], for IPv6.
    pub struct SourceV6: 20, align 4 {
        /// As in [`SourceV4`].
        pub frontend: Frontend,
        /// Address of the source range, in network byte order; the bits after the prefix are zero.
        pub addr: [u8; 16],
    }
}

/// Number of bits of a [`Frontend`] in the key of an allow-list entry. The prefix length in the key is this number plus
/// the prefix length of the source range.
pub const FRONTEND_BITS: u32 = 32;

const _: () = assert!(
    size_of::<Frontend>() * u8::BITS as usize == FRONTEND_BITS as usize,
    "the prefix must cover all bits of a frontend"
);

map_type! {
    /// An endpoint: the Pod address, Pod port and protocol of a mapping. Only packets from endpoints can be replies.
    pub struct EndpointV4: 8, align 4 {
        /// The Pod's address, in network byte order.
        pub pod_addr: [u8; 4],
        /// The Pod port, in host byte order.
        pub pod_port: u16,
        /// IP protocol number: 6 for TCP, 17 for UDP, 132 for SCTP.
        pub protocol: u8,
        /// Always zero.
        pub pad: u8,
    }
}

map_type! {
    /// Like [`EndpointV4`], for IPv6.
    pub struct EndpointV6: 20, align 4 {
        /// The Pod's address, in network byte order.
        pub pod_addr: [u8; 16],
        /// The Pod port, in host byte order.
        pub pod_port: u16,
        /// IP protocol number: 6 for TCP, 17 for UDP, 132 for SCTP.
        pub protocol: u8,
        /// Always zero.
        pub pad: u8,
    }
}

map_type! {
    /// The value of an endpoint in `npl_endpoint_v4` and `npl_endpoint_v6`.
    pub struct Endpoint: 8, align 4 {
        /// The Pod's generation, as in [`BackendV4`]; all mappings of one Pod port have the same generation.
        pub generation: u32,
        /// Index of the element in `npl_cnt_mapping` that counts the endpoint's replies: the element of one of the
        /// endpoint's mappings.
        pub stats_index: u32,
    }
}
