// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Socket reverse NAT: the address that a local client connected to, for `getpeername` and `recvmsg`. If an entry is
//! lost, the client sees the Pod's address; its connection continues.
//!
//! Each socket has one more entry, whose key has Pod port 0, and whose value is the socket's last Pod. The kernel program
//! that runs when a socket is closed reads this entry and frees both. A datagram socket that has sent to several Pods
//! leaves the entries of the earlier ones, until newer entries evict them.
//!
//! A sender with a node address and a port of the range has an entry whose key and value name the same address: the
//! socket received a datagram from a client that the Node masquerades, and its answer must not be translated. For a
//! socket that has sent through a mapping, no such entry is written, so that a forged datagram cannot end the
//! translation of the socket's datagrams.

/// Entries per family, of which each open socket uses two; `--max-flows` may raise the number. 16 Ki entries take less
/// than 2 MiB.
pub const MAX_SOCKET_RNAT: u32 = 16_384;

map_type! {
    /// A local client's socket and the Pod that it is connected to.
    pub struct SocketRnatKeyV4: 16, align 8 {
        /// The kernel's cookie of the socket, which is never reused.
        pub socket: u64,
        /// Network order; a part of the cookie in the entry that names the last Pod.
        pub pod_addr: [u8; 4],
        /// Host order; 0 in the entry that names the last Pod.
        pub pod_port: u16,
        /// Always zero.
        pub pad: u16,
    }
}

map_type! {
    /// As [`SocketRnatKeyV4`], IPv6.
    pub struct SocketRnatKeyV6: 32, align 8 {
        /// As in [`SocketRnatKeyV4`].
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
    /// The NAT address that the client connected or sent to last; or the socket's last Pod.
    pub struct SocketRnatV4: 8, align 4 {
        /// A node address, a loopback address, or the last Pod's address; network order.
        pub node_addr: [u8; 4],
        /// Host order.
        pub node_port: u16,
        /// Always zero.
        pub pad: u16,
    }
}

map_type! {
    /// As [`SocketRnatV4`], IPv6.
    pub struct SocketRnatV6: 20, align 4 {
        /// As in [`SocketRnatV4`].
        pub node_addr: [u8; 16],
        /// Host order.
        pub node_port: u16,
        /// Always zero.
        pub pad: u16,
    }
}
