// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Defines the settings of the packet generator and packet counter of `npl-bench`. The maps with these settings are
//! never pinned, and are not part of the agent's ABI.

/// Length in bytes of a generated frame, without the frame check sequence. With the frame check sequence of four bytes,
/// the frame has 64 bytes on the wire.
pub const FRAME_BYTES: usize = 60;

/// The map with the settings of the packet generator: array of one [`Traffic`].
pub const MAP_TRAFFIC: &str = "npl_traffic";
/// The map with the destination whose packets are counted: array of one [`Target`].
pub const MAP_TARGET: &str = "npl_target";
/// The map with the number of counted packets: per-CPU array of one `u64`.
pub const MAP_ARRIVED: &str = "npl_arrived";

/// Number of random low bits in a client's address. The high bits are those of the first packet's source address.
pub const RANDOM_ADDRESS_BITS: u32 = 28;

/// The XDP program that generates one packet in each run.
pub const PROG_GENERATE: &str = "npl_generate";
/// The TC program that passes every packet unchanged, to measure the cost of running a program.
pub const PROG_IDLE: &str = "npl_idle";
/// The TC program that redirects every packet, to measure the minimal cost of bypassing the host's stack.
pub const PROG_SHORTCUT: &str = "npl_shortcut";
/// The XDP program that passes every packet unchanged.
pub const PROG_IDLE_XDP: &str = "npl_idle_xdp";
/// The TC program that counts the packets that arrive at the Pod's device.
pub const PROG_COUNT: &str = "npl_count";

/// Number of random bits in a client's address and port together.
const CLIENT_BITS: u32 = RANDOM_ADDRESS_BITS + u16::BITS;
const CLIENT_MASK: u64 = (1 << CLIENT_BITS) - 1;

/// Returns the random address bits and the port of the client of packet `number`.
///
/// The first 2^44 numbers give 2^44 different clients, because each step of the computation is invertible.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call costs more than the function's body")]
#[expect(clippy::cast_possible_truncation, reason = "the port is the low 16 bits")]
pub const fn random_client(number: u64) -> (u32, u16) {
    // Multiplication by an odd factor is invertible modulo a power of two. The factors are those of `hash::flow`.
    let mut drawn = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) & CLIENT_MASK;
    drawn ^= drawn >> (CLIENT_BITS / 2);
    drawn = drawn.wrapping_mul(0x6a09_e667_f3bc_c909) & CLIENT_MASK;
    drawn ^= drawn >> (CLIENT_BITS / 2);
    ((drawn >> u16::BITS) as u32, drawn as u16)
}

map_type! {
    /// Settings of the generator.
    pub struct Traffic: 80, align 8 {
        /// Number of the next packet. The generator increments the number, so that consecutive packets belong to
        /// different flows if `ports` or `random` is nonzero.
        pub next: u64,
        /// Number of client ports per client address. With 0, all frames belong to one flow, unless `random` is
        /// nonzero.
        pub ports: u32,
        /// Number of mappings that flows are distributed over in round-robin order.
        pub mappings: u32,
        /// Template of the first packet. The template's IPv4 identification is the Pod port at which the packet must
        /// arrive.
        pub frame: [u8; FRAME_BYTES],
        /// If nonzero, each client has a random port and an address with [`RANDOM_ADDRESS_BITS`] random bits.
        pub random: u16,
        /// The generator's action on each packet, one of [`fate`].
        pub fate: u16,
    }
}

/// Actions of the generator on a packet.
pub mod fate {
    /// The generator's device receives the packet (`XDP_PASS`).
    pub const RECEIVED: u16 = 0;
    /// The generator's device sends the packet to the other end of the link (`XDP_TX`).
    pub const SENT: u16 = 1;
    /// The generator redirects the packet to the Pod's device (`XDP_REDIRECT`).
    pub const REDIRECTED: u16 = 2;
}

map_type! {
    /// Selects the packets that are counted: packets to this address and these ports and, if `source_port` is nonzero,
    /// from this source.
    pub struct Target: 20, align 4 {
        /// Destination address, network order.
        pub addr: [u8; 4],
        /// First destination port, host order.
        pub port_min: u16,
        /// Last destination port, host order, inclusive.
        pub port_max: u16,
        /// Interface index of the Node's end of the Pod's device, to which [`PROG_SHORTCUT`] redirects packets.
        pub ifindex: u32,
        /// Source address, network order.
        pub source_addr: [u8; 4],
        /// Source port, host order. If the port is 0, packets from every source are counted.
        pub source_port: u16,
        /// Always zero.
        pub reserved: u16,
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
