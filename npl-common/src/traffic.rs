// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! What the bench tells its packet generator and its counter. No part of the agent's ABI: these maps are never pinned.

/// Bytes of a generated frame: 64 on the wire, where the frame check sequence adds four.
pub const FRAME_BYTES: usize = 60;

/// The generator's settings: array of one [`Traffic`].
pub const MAP_TRAFFIC: &str = "npl_traffic";
/// The counter's settings: array of one [`Target`].
pub const MAP_TARGET: &str = "npl_target";
/// Packets that arrived: per-processor array of one `u64`.
pub const MAP_ARRIVED: &str = "npl_arrived";

/// The XDP program that makes every run of itself a packet.
pub const PROG_GENERATE: &str = "npl_generate";
/// The TC program that counts at the Pod.
pub const PROG_COUNT: &str = "npl_count";

map_type! {
    /// What the generator sends.
    pub struct Traffic: 80, align 8 {
        /// Number of the next packet; the generator counts it up, so that no flow is ever sent twice.
        pub next: u64,
        /// Client ports per client address; 0 sends the frame as it is, all of one flow.
        pub ports: u32,
        /// Mappings that flows are spread over, one after the other.
        pub mappings: u32,
        /// The first packet. Its IPv4 identification is the pod port at which it has to arrive.
        pub frame: [u8; FRAME_BYTES],
        /// Always zero.
        pub pad: [u8; 4],
    }
}

map_type! {
    /// Where packets have to arrive to count.
    pub struct Target: 8, align 4 {
        /// Network order.
        pub pod_addr: [u8; 4],
        /// First pod port, host order.
        pub port_min: u16,
        /// Last pod port, host order, inclusive.
        pub port_max: u16,
    }
}
