// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! The half-open cache: one word per slot for flows that have not completed an exchange.
//!
//! A flow has two slots to choose from, and takes the one where nobody waits for a reply: a datagram whose slot is taken
//! before its reply comes is lost to a client that asks once. The cache is never full: a flood overwrites slots and
//! cannot take memory, time or established flows.
//! A slot is one aligned 64-bit word, so that a reader sees an old or a new one and never a mixture:
//!
//! ```text
//! 63            26 25  24 23        16 15        0
//! [ tag: 38 bits ][ state ][ address # ][ node port ]
//! ```
//!
//! A slot also spares the flow table: once its flow has been promoted, requests that match it need no second look-up.
//!
//! Connections that are asked for, and not established yet, have slots apart behind the others: so few that the processor's
//! caches hold them under a flood, which takes no other flow's word then.

/// Slots, a power of two: 512 KiB.
pub const SLOTS: u32 = 65_536;
/// Slots of connections that are asked for, a power of two: 128 KiB.
pub const ATTEMPTS: u32 = 16_384;
/// All of them.
pub const WORDS: u32 = SLOTS + ATTEMPTS;
/// How the kernel makes the map, `BPF_F_MMAPABLE`: the agent looks through all slots every few seconds, and to copy each of them
/// out would take most of its time.
pub const MAP_FLAGS: u32 = 1 << 10;

const STATE_SHIFT: u32 = 24;
const ADDRESS_SHIFT: u32 = 16;
const TAG_SHIFT: u32 = 26;
const STATE_MASK: u64 = 0b11 << STATE_SHIFT;
const TAG_MASK: u64 = u64::MAX << TAG_SHIFT;

/// How far the slot's flow has come.
pub mod state {
    /// Only the client has sent.
    pub const REQUESTED: u64 = 0;
    /// The Pod has replied; the client's next packet establishes the flow.
    pub const REPLIED: u64 = 1;
    /// The flow is in the flow table.
    pub const ESTABLISHED: u64 = 2;
    /// Either side has broken the attempt off: what is left to be said is translated, but nobody opens it any more.
    pub const CLOSED: u64 = 3;
}

/// Mixes a flow's identity into 64 bits: the low ones choose the slot, the high ones are its tag.
///
/// Two rounds of multiply and xor-shift with a secret seed: cheap for the verifier and the processor, and an outsider
/// who does not know the seed cannot choose which flows meet.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn hash(seed: u64, addresses: u64, ports_and_protocol: u64) -> u64 {
    // Odd constants with well-spread bits (the fractional parts of the golden ratio and of the square root of two).
    let mut h = (addresses ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^= h >> 32;
    h = (h ^ ports_and_protocol).wrapping_mul(0x6a09_e667_f3bc_c909);
    h ^= h >> 29;
    h = h.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^ (h >> 32)
}

/// Takes another word of a longer identity into the seed, so that [`hash`] depends on it: an IPv6 client can choose half
/// of its address, and must not be able to choose one that meets another's flow.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn absorb(seed: u64, word: u64) -> u64 {
    let h = (seed ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^ (h >> 32)
}

/// As [`absorb`], of two words that outsiders may choose both of.
///
/// The highest bit of a product by a constant is that of what is multiplied: whoever changes it in the first word would know
/// two bits of the second one that make up for that, whatever the seed. So the second product is by a number that the first
/// one tells.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn absorb_both(seed: u64, first: u64, second: u64) -> u64 {
    let seed = absorb(seed, first);
    let h = (seed ^ second).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed << 1);
    h ^ (h >> 32)
}

/// The slot of a hash.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
#[expect(clippy::cast_possible_truncation, reason = "masked to the number of slots")]
pub const fn slot(hash: u64) -> u32 {
    (hash as u32) & (SLOTS - 1)
}

/// The slot that a flow takes when another one waits for its reply in [`slot`]: one of the seven beside it, which the
/// processor has most likely loaded with it.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn second_slot(hash: u64) -> u32 {
    slot(hash) ^ (slot(hash >> SLOTS.trailing_zeros()) & 0b111 | 1)
}

/// As [`slot`], of a connection that is asked for.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn attempt_slot(hash: u64) -> u32 {
    SLOTS | slot(hash) & (ATTEMPTS - 1)
}

/// As [`second_slot`], of a connection that is asked for.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn second_attempt_slot(hash: u64) -> u32 {
    SLOTS | second_slot(hash) & (ATTEMPTS - 1)
}

/// The word for a flow. `address_index` is the local address's, `node_port` in host order.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn word(hash: u64, state: u64, address_index: u8, node_port: u16) -> u64 {
    (hash & TAG_MASK) | (state << STATE_SHIFT) | ((address_index as u64) << ADDRESS_SHIFT) | node_port as u64
}

/// Whether a word was written for a flow of this hash. An empty slot has node port 0 and belongs to nobody.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn matches(word: u64, hash: u64) -> bool {
    (word ^ hash) & TAG_MASK == 0 && node_port(word) != 0
}

/// Whether a word's flow waits for the Pod's first reply, and would lose it with its slot.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn waits(word: u64) -> bool {
    node_port(word) != 0 && state(word) == state::REQUESTED
}

/// Whether a word's flow is being opened.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn opens(word: u64) -> bool {
    state(word) < state::ESTABLISHED
}

/// Which [`mod@state`] a word is in.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn state(word: u64) -> u64 {
    (word & STATE_MASK) >> STATE_SHIFT
}

/// The same word in another state.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn with_state(word: u64, state: u64) -> u64 {
    (word & !STATE_MASK) | (state << STATE_SHIFT)
}

/// The node port of a word, host order.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
#[expect(clippy::cast_possible_truncation, reason = "the low 16 bits are the port")]
pub const fn node_port(word: u64) -> u16 {
    word as u16
}

/// Whether two words name the same end of the Node.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn is_same_end(word: u64, other: u64) -> bool {
    address_index(word) == address_index(other) && node_port(word) == node_port(other)
}

/// The local address's index of a word.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
#[expect(clippy::cast_possible_truncation, reason = "eight bits above the port are the index")]
pub const fn address_index(word: u64) -> u8 {
    (word >> ADDRESS_SHIFT) as u8
}

const _: () = assert!(crate::mapping::MAX_LOCAL_ADDRESSES == 256, "an address index has eight bits in a slot");
const _: () = assert!(SLOTS.is_power_of_two() && ATTEMPTS.is_power_of_two(), "a slot is chosen by a mask");
const _: () = assert!(ATTEMPTS <= SLOTS, "a slot among the attempts is one that a flow has, cut short");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        ATTEMPTS, SLOTS, WORDS, absorb_both, address_index, attempt_slot, hash, is_same_end, matches, node_port,
        second_attempt_slot, second_slot, slot, state, waits, with_state, word,
    };

    proptest! {
        #[test]
        fn a_word_gives_back_what_went_in(h: u64, s in 0_u64..4, index: u8, port in 1_u16..) {
            let w = word(h, s, index, port);
            prop_assert!(matches(w, h));
            prop_assert_eq!((state(w), address_index(w), node_port(w)), (s, index, port));
            prop_assert!(is_same_end(w, with_state(w, state::CLOSED)));
            prop_assert!(!is_same_end(w, word(h, s, index ^ 1, port)) && !is_same_end(w, word(h, s, index, port ^ 1)));
            let promoted = with_state(w, state::ESTABLISHED);
            prop_assert!(matches(promoted, h));
            prop_assert_eq!((state(promoted), address_index(promoted), node_port(promoted)), (state::ESTABLISHED, index, port));
        }

        /// Whoever has the one address would have the flows of the other.
        #[test]
        fn no_bits_of_an_address_make_up_for_others(seed: u64, first: u64, second: u64) {
            let other = absorb_both(seed, first ^ 1 << 63, second ^ (1 << 63 | 1 << 31));
            prop_assert_ne!(absorb_both(seed, first, second), other);
        }

        #[test]
        fn an_empty_slot_matches_no_flow(h: u64) {
            prop_assert!(!matches(0, h));
            prop_assert!(!waits(0));
        }
    }

    /// Sequential clients, as a load balancer's are, must not crowd into few slots.
    #[test]
    fn neighbouring_flows_spread_over_the_slots() {
        let mut taken = vec![0_u32; SLOTS as usize];
        for client in 0..64_u64 {
            for port in 0..1024_u64 {
                let h = hash(7, (0xc000_0200 + client) << 32 | 0x0a00_0005, (1024 + port) << 32 | 8080 << 8 | 6);
                taken[slot(h) as usize] += 1;
            }
        }
        assert_spread(&taken);
    }

    /// The second slot is in the first one's line, another one, and one of four with the same chance.
    #[test]
    fn flows_of_one_slot_spread_over_the_second() {
        let mut taken = [0_u32; 8];
        for h in hashes(65_536) {
            assert_eq!(slot(h) / 8, second_slot(h) / 8);
            taken[((slot(h) ^ second_slot(h)) & 7) as usize] += 1;
        }
        for (distance, count) in taken.into_iter().enumerate() {
            let expected = if distance % 2 == 1 { 15_000..18_000 } else { 0..1 };
            assert!(expected.contains(&count), "{count} at {distance}");
        }
    }

    /// As of flows; and no flow that is not attempted has a slot among them.
    #[test]
    fn attempts_spread_over_slots_of_their_own() {
        let mut taken = vec![0_u32; ATTEMPTS as usize];
        for h in hashes(ATTEMPTS) {
            let (first, second) = (attempt_slot(h), second_attempt_slot(h));
            assert!((SLOTS..WORDS).contains(&first) && (SLOTS..WORDS).contains(&second));
            assert!(first / 8 == second / 8 && first != second);
            assert!(slot(h).max(second_slot(h)) < SLOTS);
            taken[(first - SLOTS) as usize] += 1;
        }
        let used = taken.iter().filter(|n| **n > 0).count();
        assert!((10_000..10_750).contains(&used), "{used} slots used");
    }

    /// With a sixteenth of all slots taken, one flow in a thousand takes another's, where one slot alone would be one in
    /// thirty.
    #[test]
    fn few_of_many_that_wait_lose_their_slot() {
        let mut slots = vec![0_u64; SLOTS as usize];
        let lost = hashes(SLOTS / 16).filter(|h| {
            let first = slot(*h) as usize;
            let at = if waits(slots[first]) { second_slot(*h) as usize } else { first };
            waits(std::mem::replace(&mut slots[at], word(*h, state::REQUESTED, 0, 61_000)))
        });
        let lost = lost.count();
        assert!(lost < 16, "{lost} of {}", SLOTS / 16);
    }

    /// Of the flows of one client to one Pod.
    fn hashes(count: u32) -> impl Iterator<Item = u64> {
        (0..u64::from(count)).map(|port| hash(7, 0xc000_0200 << 32 | 0x0a00_0005, port << 32 | 8080 << 8 | 6))
    }

    /// Clients that share a network and clients that share an interface identifier are as different as any.
    #[test]
    fn every_word_of_a_long_address_matters() {
        let mut taken = vec![0_u32; SLOTS as usize];
        for network in 0..256_u64 {
            for interface in 0..256_u64 {
                let seed = absorb_both(7, 0x2001_0db8_0000_0000 + network, interface);
                taken[slot(hash(seed, 5, 1024 << 32 | 8080 << 8 | 6)) as usize] += 1;
            }
        }
        assert_spread(&taken);
    }

    fn assert_spread(taken: &[u32]) {
        // 65 536 balls into 65 536 bins: 63 % of the bins are hit, and hardly any more than eight times.
        let used = taken.iter().filter(|n| **n > 0).count();
        let fullest = taken.iter().max().unwrap();
        assert!((40_000..43_000).contains(&used), "{used} slots used");
        assert!(*fullest <= 11, "{fullest} flows in one slot");
    }
}
