// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! The flow tables contain the conntrack entries of established flows. Reverse NAT of replies needs these entries. The
//! translation of requests needs no entry, because the mapping alone determines the destination of a request.
//!
//! TCP, UDP and SCTP have separate tables, so that a flood of one protocol evicts no entries of the other protocols. A
//! sender of forged UDP datagrams can establish flows if the Pod answers, but these flows cannot evict the entries of
//! TCP connections.

use crate::hash;

/// Maximum number of entries of TCP's flow table per IP family, as declared in the kernel object; `--max-flows` changes
/// this number. 131 072 entries take about 14 MiB for IPv4, and 18 MiB for IPv6.
pub const MAX_FLOWS: u32 = 131_072;
/// Like [`MAX_FLOWS`], for UDP.
pub const MAX_UDP_FLOWS: u32 = udp_flows(MAX_FLOWS);
/// Like [`MAX_FLOWS`], for SCTP.
pub const MAX_SCTP_FLOWS: u32 = sctp_flows(MAX_FLOWS);

/// Returns the number of entries of UDP's flow table if TCP's has `flows` entries.
pub const fn udp_flows(flows: u32) -> u32 {
    flows / 2
}

/// Returns the number of entries of SCTP's flow table if TCP's has `flows` entries. An SCTP association carries many
/// streams, so there are far fewer associations than TCP connections.
pub const fn sctp_flows(flows: u32) -> u32 {
    flows / 16
}

/// Programs update the time in a flow table entry at most once per interval of this many jiffies: 0.25 s (HZ=1000) to
/// 2.6 s (HZ=100). If every packet wrote the time, the entry's cache line would move between processors with every
/// packet. A [`crate::lookup_cache::CachedReply`] is valid for at most this interval.
pub const REFRESH_INTERVAL_JIFFIES: u32 = 256;

/// TCP flags, in the byte at offset 13 of the TCP header (RFC 9293). SCTP chunks are recorded as the TCP flags with the
/// same meaning.
pub mod tcp_flag {
    /// FIN: the sender sends no more data.
    pub const FIN: u8 = 0x01;
    /// SYN: the sender opens its direction of the connection.
    pub const SYN: u8 = 0x02;
    /// RST: the sender aborts the connection.
    pub const RST: u8 = 0x04;
    /// ACK: the acknowledgement number is valid. Only the SYN that opens a connection and some RSTs lack this flag.
    pub const ACK: u8 = 0x10;
    /// The flags that open or end a connection.
    pub const OPENS_OR_ENDS: u8 = SYN | FIN | RST;
}

map_type! {
    /// The key of a flow in the flow table: the addresses and ports of the client and of the Pod, and the protocol.
    pub struct FlowKeyV4: 16, align 4 {
        /// The client's address, in network byte order.
        pub client_addr: [u8; 4],
        /// The Pod's address, in network byte order.
        pub pod_addr: [u8; 4],
        /// The client's port, in host byte order.
        pub client_port: u16,
        /// The Pod port, in host byte order.
        pub pod_port: u16,
        /// IP protocol number, widened to 32 bits, so that the key has no padding.
        pub protocol: u32,
    }
}

map_type! {
    /// Like [`FlowKeyV4`], for IPv6.
    pub struct FlowKeyV6: 40, align 4 {
        /// The client's address, in network byte order.
        pub client_addr: [u8; 16],
        /// The Pod's address, in network byte order.
        pub pod_addr: [u8; 16],
        /// The client's port, in host byte order.
        pub client_port: u16,
        /// The Pod port, in host byte order.
        pub pod_port: u16,
        /// IP protocol number, widened to 32 bits, so that the key has no padding.
        pub protocol: u32,
    }
}

map_type! {
    /// State of an established flow, common to IPv4 and IPv6: see [`crate::conntrack`].
    ///
    /// The programs write `last_seen_ns` and `refreshed` for packets of both directions, without a lock. If one of two
    /// concurrent updates is lost, the recorded time is slightly too old.
    pub struct FlowState: 24, align 8 {
        /// Time of the last refresh, nanoseconds of `CLOCK_MONOTONIC`.
        pub last_seen_ns: u64,
        /// Generation of the endpoint at the time when the entry was created.
        pub generation: u32,
        /// Low 32 bits of the kernel's `jiffies` at the time `last_seen_ns`.
        pub refreshed: u32,
        /// For TCP, the acknowledgement number of the Pod's packet that last refreshed the entry, host order. Before
        /// the first such refresh, the field contains the sequence number of the client's segment that established the
        /// flow. A client's FIN or RST counts only if its sequence number is near the number in this field. For SCTP,
        /// the field contains the verification tag of the client's packet that established the flow; a client's ABORT,
        /// SHUTDOWN or SHUTDOWN ACK counts only with a tag near this tag. If the packet that established the
        /// association had no proof, the field contains half of the flow's hash. For UDP, the field is 0.
        pub pod_acknowledgement: u32,
        /// Node port of the NAT address, host order.
        pub node_port: u16,
        /// All TCP flags that the client has sent; FIN and RST only from segments whose sequence number or tag
        /// matched the connection.
        pub client_tcp_flags: u8,
        /// All TCP flags that the Pod has sent, without the ACK of its SYN-ACK.
        pub pod_tcp_flags: u8,
    }
}

map_type! {
    /// A flow table entry: the NAT address (the node address and node port that the client uses) and the flow's state.
    pub struct FlowV4: 32, align 8 {
        /// The part of the entry that does not depend on the IP family.
        pub state: FlowState,
        /// Node address of the NAT address, network order.
        pub node_addr: [u8; 4],
        /// Always zero.
        pub pad: u32,
    }
}

map_type! {
    /// Like [`FlowV4`], for IPv6.
    pub struct FlowV6: 40, align 8 {
        /// As in [`FlowV4`].
        pub state: FlowState,
        /// As in [`FlowV4`].
        pub node_addr: [u8; 16],
    }
}

impl FlowKeyV4 {
    /// Returns the flow's seeded hash, as the kernel programs compute it: the hash chooses the flow's slots in the
    /// half-open cache.
    pub const fn hash(&self, seed: u64) -> u64 {
        let ports_and_protocol = hash::ports_and_protocol(self.client_port, self.pod_port, self.protocol);
        let [client, pod] = [u32::from_ne_bytes(self.client_addr), u32::from_ne_bytes(self.pod_addr)];
        hash::flow_v4(seed, client, pod, ports_and_protocol)
    }
}

impl FlowKeyV6 {
    /// Like [`FlowKeyV4::hash`].
    pub const fn hash(&self, seed: u64) -> u64 {
        let ports_and_protocol = hash::ports_and_protocol(self.client_port, self.pod_port, self.protocol);
        hash::flow_v6(seed, halves(self.client_addr), halves(self.pod_addr), ports_and_protocol)
    }
}

impl FlowV4 {
    /// Creates a flow table entry. `node_addr` is in network byte order.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn new(state: FlowState, node_addr: [u8; 4]) -> Self {
        Self { state, node_addr, pad: 0 }
    }
}

impl FlowV6 {
    /// Like [`FlowV4::new`].
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn new(state: FlowState, node_addr: [u8; 16]) -> Self {
        Self { state, node_addr }
    }
}

/// Returns the two halves of an IPv6 address in the form that [`hash::flow_v6`] expects. The form is that of the
/// programs, which load an address from a packet as four 32-bit words and keep the byte order of the words.
const fn halves(addr: [u8; 16]) -> [u64; 2] {
    let bits = u128::from_be_bytes(addr);
    [word_pair(bits >> u64::BITS), word_pair(bits)]
}

/// Returns the two low 32-bit words of `bits` as one 64-bit number. Each word has the value that a program gets when
/// the program loads the word's bytes from a packet.
#[expect(clippy::cast_possible_truncation, reason = "only the low bits are used")]
const fn word_pair(bits: u128) -> u64 {
    (u32::from_be((bits >> u32::BITS) as u32) as u64) << u32::BITS | u32::from_be(bits as u32) as u64
}

// Programs cast a pointer to an entry to a pointer to the entry's state, so the state must be the first field.
const _: () = assert!(core::mem::offset_of!(FlowV4, state) == 0 && core::mem::offset_of!(FlowV6, state) == 0);
