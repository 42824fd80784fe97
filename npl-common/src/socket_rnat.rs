// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Socket reverse NAT for local clients, which run on the Node or in its Pods: `getpeername` and `recvmsg` return the
//! address that the client connected to, in place of the Pod's address. If the entry of a socket is lost, the
//! connection continues, but the client sees the Pod's address.
//!
//! For each socket, the map also contains a list of the socket's peers, in entries with Pod port 0 in their keys. The
//! first entry of the list has the socket's most recent Pod as value. If the socket has further peers, each other entry
//! has one of them as value: an earlier Pod, or a masqueraded client. The program that runs when a socket is closed
//! reads the list, and removes all entries of the socket. If a datagram socket has more than [`LISTED_PEERS`] further
//! peers, the entries of the others remain until new entries evict them.
//!
//! If a socket receives a datagram from a node address and a port of the node port range, the Node has masqueraded the
//! sender, and the socket's answer must not be translated. The program for `recvmsg` then writes an entry that has the
//! sender's address in both key and value. For a socket that has sent through a mapping, the program does not write
//! this entry, so that a forged datagram cannot end the translation of the socket's datagrams.

/// Position of the entry with the socket's most recent Pod in the list of a socket's peers.
pub const LAST_POD: u32 = 0;

/// Maximum number of peers in the list of a socket's peers, without the most recent Pod. The positions of these peers
/// begin with 1. The programs contain the code for each position, so a larger number makes the programs longer.
pub const LISTED_PEERS: u32 = 15;

/// Maximum number of socket reverse NAT entries per IP family; a high `--max-flows` raises the number. Each open socket
/// of a local client uses at least two entries. 16 384 entries take less than 2 MiB.
pub const MAX_SOCKET_RNAT: u32 = 16_384;

map_type! {
    /// The key of a socket reverse NAT entry: a socket on this Node, and the socket's peer. The peer is the Pod to
    /// which the socket is connected or sends, or a client that the Node masquerades and whose datagram the socket has
    /// received.
    pub struct SocketRnatKeyV4: 16, align 8 {
        /// The kernel's cookie of the socket, which is never reused.
        pub socket: u64,
        /// The peer's address in network byte order. In an entry of the list of peers, each 32-bit word of this field
        /// contains the lower half of the cookie plus the entry's position, in native byte order.
        pub pod_addr: [u8; 4],
        /// The peer's port in host byte order; 0 in an entry of the list of peers.
        pub pod_port: u16,
        /// Always zero.
        pub pad: u16,
    }
}

map_type! {
    /// Like [`SocketRnatKeyV4`], for IPv6.
    pub struct SocketRnatKeyV6: 32, align 8 {
        /// As in [`SocketRnatKeyV4`].
        pub socket: u64,
        /// As in [`SocketRnatKeyV4`].
        pub pod_addr: [u8; 16],
        /// As in [`SocketRnatKeyV4`].
        pub pod_port: u16,
        /// Always zero.
        pub pad: u16,
        /// Always zero.
        pub pad_to_word: u32,
    }
}

map_type! {
    /// The value of a socket reverse NAT entry: an address and a port. If the peer is a Pod, the value is the NAT
    /// address to which the socket last connected or sent. If the peer is a masqueraded client, the value is the same
    /// address and port as in the key, and the socket's answers to this client are not translated. If the key has port
    /// 0, the value is a peer in the list of the socket's peers.
    pub struct SocketRnatV4: 8, align 4 {
        /// A node address, a loopback address, the masqueraded client's address, or the address of a peer in the list;
        /// network order.
        pub node_addr: [u8; 4],
        /// The port that belongs to `node_addr`, in host byte order.
        pub node_port: u16,
        /// Always zero.
        pub pad: u16,
    }
}

map_type! {
    /// Like [`SocketRnatV4`], for IPv6.
    pub struct SocketRnatV6: 20, align 4 {
        /// As in [`SocketRnatV4`].
        pub node_addr: [u8; 16],
        /// The port that belongs to `node_addr`, in host byte order.
        pub node_port: u16,
        /// Always zero.
        pub pad: u16,
    }
}
