// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Mappings: which node port leads to which Pod, and what a reply is recognised by.

/// IP protocol numbers that a mapping can have (IANA).
pub mod protocol {
    /// Transmission Control Protocol.
    pub const TCP: u8 = 6;
    /// User Datagram Protocol.
    pub const UDP: u8 = 17;
    /// Stream Control Transmission Protocol.
    pub const SCTP: u8 = 132;
}

/// Mappings per family; a node port range of the whole port space has 65 535 ports, of which three protocols share one.
pub const MAX_MAPPINGS: u32 = 16_384;
/// Local addresses per family.
pub const MAX_LOCAL_ADDRESSES: u32 = 256;

map_type! {
    /// An IPv4 address of this Node.
    pub struct LocalAddressV4: 4, align 4 {
        /// Network order.
        pub addr: [u8; 4],
    }
}

map_type! {
    /// An IPv6 address of this Node.
    pub struct LocalAddressV6: 16, align 4 {
        /// Network order.
        pub addr: [u8; 16],
    }
}

map_type! {
    /// What the kernel knows of a local address.
    pub struct LocalAddress: 4, align 4 {
        /// Position in the address index map; never given to another address while flows may name it.
        pub index: u32,
    }
}

map_type! {
    /// Where a client sends to, on any address of the Node of one family.
    pub struct Frontend: 4, align 4 {
        /// Host order.
        pub node_port: u16,
        /// [`protocol`].
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
        /// Bit set of `FLAG_*`; none is defined yet.
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
        /// Bit set of `FLAG_*`; none is defined yet.
        pub flags: u16,
        /// As in [`BackendV4`].
        pub generation: u32,
        /// As in [`BackendV4`].
        pub stats_index: u32,
    }
}

map_type! {
    /// The sender of a reply: one lookup tells the egress program that a packet is nobody's of ours.
    pub struct EndpointV4: 8, align 4 {
        /// Network order.
        pub pod_addr: [u8; 4],
        /// Host order.
        pub pod_port: u16,
        /// [`protocol`].
        pub protocol: u8,
        /// Always zero.
        pub pad: u8,
    }
}

map_type! {
    /// The sender of a reply, IPv6.
    pub struct EndpointV6: 20, align 4 {
        /// Network order.
        pub pod_addr: [u8; 16],
        /// Host order.
        pub pod_port: u16,
        /// [`protocol`].
        pub protocol: u8,
        /// Always zero.
        pub pad: u8,
    }
}

map_type! {
    /// What a reply of an endpoint needs to be judged.
    pub struct Endpoint: 8, align 4 {
        /// As in [`BackendV4`]; all mappings of one Pod's port share it.
        pub generation: u32,
        /// Element of the per-mapping counters.
        pub stats_index: u32,
    }
}
