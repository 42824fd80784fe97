// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Computes the seeded hash that chooses a flow's slots in arrays, and the flow's tag in these slots. A sender who does
//! not know the seed cannot predict which flows share a slot.

/// Hashes a flow's addresses, ports and protocol to 64 bits: the low bits choose a slot, and the high bits are the
/// flow's tag.
///
/// The hash has only three rounds of multiplication and xor-shift, so that the processor executes, and the verifier
/// checks, few instructions.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn flow(seed: u64, addresses: u64, ports_and_protocol: u64) -> u64 {
    // The factors are odd constants with well-spread bits: the fractional parts of the golden ratio and of the square
    // root of two.
    let mut h = (addresses ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^= h >> 32;
    h = (h ^ ports_and_protocol).wrapping_mul(0x6a09_e667_f3bc_c909);
    h ^= h >> 29;
    h = h.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^ (h >> 32)
}

/// Combines a flow's ports, in host byte order, and its protocol for [`flow_v4`] and [`flow_v6`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn ports_and_protocol(client_port: u16, pod_port: u16, protocol: u32) -> u64 {
    (client_port as u64) << 32 | (pod_port as u64) << 8 | protocol as u64
}

/// Returns the hash of an IPv4 flow. The addresses are in network byte order as loaded from a packet.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn flow_v4(seed: u64, client: u32, pod: u32, ports_and_protocol: u64) -> u64 {
    flow(seed, (client as u64) << u32::BITS | pod as u64, ports_and_protocol)
}

/// Returns the hash of an IPv6 flow. Each half of an address consists of two 32-bit words in network byte order as
/// loaded from a packet; the first word is the high half of the 64-bit word.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn flow_v6(seed: u64, client: [u64; 2], pod: [u64; 2], ports_and_protocol: u64) -> u64 {
    let seed = absorb(absorb_both(seed, client[0], client[1]), pod[0]);
    flow(seed, pod[1], ports_and_protocol)
}

/// Mixes a further 64-bit word of input, such as a part of an IPv6 address, into the seed of [`flow`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn absorb(seed: u64, word: u64) -> u64 {
    let h = (seed ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^ (h >> 32)
}

/// Like [`absorb`], for two words that a sender can choose. For example, an IPv6 client can choose the interface
/// identifier of its address.
///
/// The factor of the second word depends on the first word. With two constant factors, a sender could change both words
/// so that the effects on the hash add up to zero for every seed.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn absorb_both(seed: u64, first: u64, second: u64) -> u64 {
    let seed = absorb(seed, first);
    let h = (seed ^ second).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed << 1);
    h ^ (h >> 32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::absorb_both;

    proptest! {
        /// The test flips bits in both words. With constant factors, the effects of these bits on the hash would add up
        /// to zero. Two client addresses with the same hash would share their slots and tags, and therefore their
        /// half-open entries.
        #[test]
        fn no_bits_of_one_word_cancel_out_those_of_the_other(seed: u64, first: u64, second: u64) {
            let other = absorb_both(seed, first ^ 1 << 63, second ^ (1 << 63 | 1 << 31));
            prop_assert_ne!(absorb_both(seed, first, second), other);
        }
    }
}
