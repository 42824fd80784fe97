// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! What local clients asked for, and which Pod they were led to. Only answers need it, and only for the address that
//! they seem to come from: a lost entry shows the Pod's own address and breaks no connection.

/// Conversations of local clients per family that are remembered at once; 16 Ki of them take less than 2 MiB.
pub const MAX_PEERS: u32 = 16_384;

map_type! {
    /// One socket of a local client, and the Pod that it talks to.
    pub struct PeerKeyV4: 16, align 8 {
        /// The kernel's name of the socket, never given twice.
        pub socket: u64,
        /// Network order.
        pub pod_addr: [u8; 4],
        /// Host order.
        pub pod_port: u16,
        /// Always zero.
        pub pad: u16,
    }
}

map_type! {
    /// As [`PeerKeyV4`], IPv6.
    pub struct PeerKeyV6: 32, align 8 {
        /// As in [`PeerKeyV4`].
        pub socket: u64,
        /// Network order.
        pub pod_addr: [u8; 16],
        /// Host order.
        pub pod_port: u16,
        /// Always zero.
        pub pad: u16,
        /// Always zero.
        pub pad_to_word: u32,
    }
}

map_type! {
    /// What the client asked for when it last sent to this Pod through a mapping.
    pub struct PeerV4: 8, align 4 {
        /// An address of the Node, or of its loopback device; network order.
        pub node_addr: [u8; 4],
        /// Host order.
        pub node_port: u16,
        /// Always zero.
        pub pad: u16,
    }
}

map_type! {
    /// As [`PeerV4`], IPv6.
    pub struct PeerV6: 20, align 4 {
        /// As in [`PeerV4`].
        pub node_addr: [u8; 16],
        /// Host order.
        pub node_port: u16,
        /// Always zero.
        pub pad: u16,
    }
}
