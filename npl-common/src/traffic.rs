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

/// Low bits of a random client's address that are drawn; the others are the first packet's.
pub const RANDOM_ADDRESS_BITS: u32 = 28;

/// The XDP program that makes every run of itself a packet.
pub const PROG_GENERATE: &str = "npl_generate";
/// The TC program that only returns: what running any program costs.
pub const PROG_IDLE: &str = "npl_idle";
/// The TC program that only redirects: the least that any way past the host's stack costs.
pub const PROG_SHORTCUT: &str = "npl_shortcut";
/// The XDP program that only returns.
pub const PROG_IDLE_XDP: &str = "npl_idle_xdp";
/// The TC program that counts at the Pod.
pub const PROG_COUNT: &str = "npl_count";

/// Of a random client's address and port together.
const CLIENT_BITS: u32 = RANDOM_ADDRESS_BITS + u16::BITS;
const CLIENT_MASK: u64 = (1 << CLIENT_BITS) - 1;

/// Address bits and port of the random client of a packet, by the packet's number.
///
/// The first 2^44 numbers have as many different clients: each step below can be undone.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call costs more than the body")]
#[expect(clippy::cast_possible_truncation, reason = "the port is the low 16 bits")]
pub const fn random_client(number: u64) -> (u32, u16) {
    // Odd, and so a factor that can be undone; see `hash::flow`.
    let mut drawn = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) & CLIENT_MASK;
    drawn ^= drawn >> (CLIENT_BITS / 2);
    drawn = drawn.wrapping_mul(0x6a09_e667_f3bc_c909) & CLIENT_MASK;
    drawn ^= drawn >> (CLIENT_BITS / 2);
    ((drawn >> u16::BITS) as u32, drawn as u16)
}

map_type! {
    /// What the generator sends.
    pub struct Traffic: 80, align 8 {
        /// Number of the next packet; the generator counts it up, so that no flow is ever sent twice.
        pub next: u64,
        /// Client ports per client address; 0 sends the frame as it is, all of one flow, unless clients are random.
        pub ports: u32,
        /// Mappings that flows are spread over, one after the other.
        pub mappings: u32,
        /// The first packet. Its IPv4 identification is the pod port at which it has to arrive.
        pub frame: [u8; FRAME_BYTES],
        /// Not zero: each client has another address, of [`RANDOM_ADDRESS_BITS`] random bits, and a random port.
        pub random: u16,
        /// What becomes of each, one of [`fate`].
        pub fate: u16,
    }
}

/// What becomes of a packet that the generator has made.
pub mod fate {
    /// The device that the generator runs for receives it.
    pub const RECEIVED: u16 = 0;
    /// That device sends it, so that the other end of its wire receives it.
    pub const SENT: u16 = 1;
    /// It goes from that device's driver to the one that leads to the Pod, as a frame.
    pub const REDIRECTED: u16 = 2;
}

map_type! {
    /// Where packets have to arrive to count.
    pub struct Target: 12, align 4 {
        /// Network order.
        pub pod_addr: [u8; 4],
        /// First pod port, host order.
        pub port_min: u16,
        /// Last pod port, host order, inclusive.
        pub port_max: u16,
        /// Kernel index of the Node's end of the Pod's device, for what only redirects.
        pub ifindex: u32,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{RANDOM_ADDRESS_BITS, random_client};

    #[test]
    fn random_clients_differ_and_come_from_everywhere() {
        let clients: BTreeSet<_> = (0..100_000).map(random_client).collect();
        assert_eq!(clients.len(), 100_000);
        let networks: BTreeSet<_> = clients.iter().map(|(address, _)| address >> (RANDOM_ADDRESS_BITS - 8)).collect();
        let ports: BTreeSet<_> = clients.iter().map(|(_, port)| port >> 8).collect();
        assert_eq!((networks.len(), ports.len()), (256, 256));
    }
}
