// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Flows that completed an exchange. Only replies need them: a request's destination follows from the mapping alone.

/// Flows per family that are remembered at once; 128 Ki of them take about 14 MiB.
pub const MAX_FLOWS: u32 = 131_072;

/// How often a flow's time is written at most, and how long a reply may go by a [`crate::hint::ReplyHint`], in jiffies: writing
/// on each packet would share a cache line between the two directions' processors. 256 jiffies are between 0.25 s and 2.6 s,
/// as the kernel was built.
pub const TOUCH_INTERVAL_JIFFIES: u32 = 256;

/// TCP flags in the byte at offset 13 (RFC 9293), as [`FlowState`] has them; what chunks of SCTP say is told by the same.
pub mod tcp_flag {
    /// No more data from the sender.
    pub const FIN: u8 = 0x01;
    /// First packet of a direction.
    pub const SYN: u8 = 0x02;
    /// The connection is over.
    pub const RST: u8 = 0x04;
    /// All but a connection's first packet have it.
    pub const ACK: u8 = 0x10;
    /// Any of what opens or ends a connection.
    pub const OPENS_OR_ENDS: u8 = SYN | FIN | RST;
}

map_type! {
    /// A flow as the Pod sees it: from the client to the Pod.
    pub struct FlowKeyV4: 16, align 4 {
        /// Network order.
        pub client_addr: [u8; 4],
        /// Network order.
        pub pod_addr: [u8; 4],
        /// Host order.
        pub client_port: u16,
        /// Host order.
        pub pod_port: u16,
        /// [`crate::mapping::protocol`]; as wide as the rest of the word, so that nothing is left over.
        pub protocol: u32,
    }
}

map_type! {
    /// A flow as the Pod sees it, IPv6.
    pub struct FlowKeyV6: 40, align 4 {
        /// Network order.
        pub client_addr: [u8; 16],
        /// Network order.
        pub pod_addr: [u8; 16],
        /// Host order.
        pub client_port: u16,
        /// Host order.
        pub pod_port: u16,
        /// [`crate::mapping::protocol`]; as wide as the rest of the word, so that nothing is left over.
        pub protocol: u32,
    }
}

map_type! {
    /// How a flow is doing, of either family.
    ///
    /// Both directions write `last_seen_ns` and `touched`; a lost update costs a moment of age and nothing else.
    pub struct FlowState: 24, align 8 {
        /// When a packet of the flow was last written down, nanoseconds of `CLOCK_MONOTONIC`.
        pub last_seen_ns: u64,
        /// The endpoint's generation when the flow was made.
        pub generation: u32,
        /// Low half of `jiffies` at `last_seen_ns`.
        pub touched: u32,
        /// The device that the client's packets come in by.
        pub ifindex: u32,
        /// The node port that the client uses, host order.
        pub node_port: u16,
        /// TCP flags that the client has sent, together.
        pub client_tcp_flags: u8,
        /// TCP flags that the Pod has sent, together.
        pub pod_tcp_flags: u8,
    }
}

map_type! {
    /// What the client believes it talks to, and how the flow is doing.
    pub struct FlowV4: 32, align 8 {
        /// All that does not depend on the family, the node port among it.
        pub state: FlowState,
        /// The Node's address that the client uses, network order.
        pub node_addr: [u8; 4],
        /// Always zero.
        pub pad: u32,
    }
}

map_type! {
    /// As [`FlowV4`], IPv6.
    pub struct FlowV6: 40, align 8 {
        /// As in [`FlowV4`].
        pub state: FlowState,
        /// As in [`FlowV4`].
        pub node_addr: [u8; 16],
    }
}
