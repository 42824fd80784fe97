// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! The half-open cache, an array of 64-bit words. A word is the conntrack entry of a flow whose handshake or first
//! exchange of packets is not complete, or a copy of an established flow's entry.
//!
//! The cache is never full: a flood of packets overwrites slots, but allocates no memory and evicts no entries of the
//! flow table. Programs read and write each word atomically. The fields of a word are:
//!
//! ```text
//! 63            26 25  24 23        16 15        0
//! [ tag: 38 bits ][ phase ][ address # ][ node port ]
//! ```
//!
//! The array has three regions, so that a flood of SYNs or datagrams overwrites no entries of established flows:
//!
//! 1. [`SLOTS`] slots of established flows. An entry with [`Phase::ESTABLISHED`] is a copy of the flow table's entry.
//!    Requests that match the copy need no look-up in the flow table.
//! 2. [`HANDSHAKE_SLOTS`] slots of handshakes and mid-stream entries. This region is small enough to stay in the
//!    processor's cache during a SYN flood.
//! 3. [`DATAGRAM_SLOTS`] slots of half-open UDP flows. A SYN flood overwrites none of these slots.
//!
//! An established flow has one slot. A handshake or half-open UDP flow has two candidate slots. A new entry is written
//! to the second slot only if the first slot contains another entry that waits for the Pod's first reply.

use crate::conntrack::Phase;

/// Number of slots for established flows per IP family, a power of two. The slots take 512 KiB.
pub const SLOTS: u32 = 65_536;
/// Number of slots for handshakes per IP family, a power of two. The slots for handshakes take 128 KiB.
pub const HANDSHAKE_SLOTS: u32 = 16_384;
/// Number of slots per IP family for half-open UDP flows. The slots take 512 KiB. The position of a flow's first
/// candidate slot in this region equals the position of the flow's slot in the region of established flows.
pub const DATAGRAM_SLOTS: u32 = SLOTS;
/// Number of elements of the reply cache: one for each slot of an established flow or handshake.
pub const REPLY_CACHE_ELEMENTS: u32 = SLOTS + HANDSHAKE_SLOTS;
/// Number of elements of the half-open cache: the slots of all three regions.
pub const WORDS: u32 = REPLY_CACHE_ELEMENTS + DATAGRAM_SLOTS;
/// `BPF_F_MMAPABLE`: the agent maps the array into its memory. If the agent read each slot by a system call, the system
/// calls would take most of the time of a sweep.
pub const MAP_FLAGS: u32 = 1 << 10;

const PHASE_SHIFT: u32 = 24;
const ADDRESS_SHIFT: u32 = 16;
const TAG_SHIFT: u32 = 26;
const PHASE_MASK: u64 = 0b11 << PHASE_SHIFT;
const TAG_MASK: u64 = u64::MAX << TAG_SHIFT;

/// Returns the slot of an established flow.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
#[expect(clippy::cast_possible_truncation, reason = "the mask limits the value to the number of slots")]
pub const fn slot(hash: u64) -> u32 {
    (hash as u32) & (SLOTS - 1)
}

/// Returns a second slot for a hash, which differs from the first ([`slot`]). Both slots are in the same aligned group
/// of eight slots: 64 bytes, the size of a cache line on most processors. The hash chooses one of four slots of the
/// group.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
const fn second_slot(hash: u64) -> u32 {
    slot(hash) ^ (slot(hash >> SLOTS.trailing_zeros()) & 0b111 | 1)
}

/// Returns the first candidate slot of a handshake.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn handshake_slot(hash: u64) -> u32 {
    SLOTS | slot(hash) & (HANDSHAKE_SLOTS - 1)
}

/// Returns the second candidate slot of a handshake.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn second_handshake_slot(hash: u64) -> u32 {
    SLOTS | second_slot(hash) & (HANDSHAKE_SLOTS - 1)
}

/// Returns the first candidate slot of a half-open UDP flow.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn datagram_slot(hash: u64) -> u32 {
    REPLY_CACHE_ELEMENTS + slot(hash)
}

/// Returns the second candidate slot of a half-open UDP flow.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn second_datagram_slot(hash: u64) -> u32 {
    REPLY_CACHE_ELEMENTS + second_slot(hash)
}

/// Packs a half-open entry into one word. `address_index` is the index of the node address, and `node_port` is in host
/// byte order.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn entry(hash: u64, phase: Phase, address_index: u8, node_port: u16) -> u64 {
    (hash & TAG_MASK) | phase.bits() << PHASE_SHIFT | (address_index as u64) << ADDRESS_SHIFT | node_port as u64
}

/// Returns whether an entry belongs to a flow with this hash. An empty slot has node port 0 and matches no flow.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn matches(entry: u64, hash: u64) -> bool {
    (entry ^ hash) & TAG_MASK == 0 && node_port(entry) != 0
}

/// Returns whether the flow of an entry waits for the Pod's first reply. The programs avoid overwriting such an entry,
/// because the first reply could then not be translated.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn is_waiting(entry: u64) -> bool {
    node_port(entry) != 0 && phase(entry).is(Phase::REQUESTED)
}

/// Returns the phase of an entry.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn phase(entry: u64) -> Phase {
    Phase::from_bits((entry & PHASE_MASK) >> PHASE_SHIFT)
}

/// Returns a copy of an entry with another phase.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn with_phase(entry: u64, phase: Phase) -> u64 {
    (entry & !PHASE_MASK) | phase.bits() << PHASE_SHIFT
}

/// Returns the node port of an entry, in host byte order.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
#[expect(clippy::cast_possible_truncation, reason = "the low 16 bits are the port")]
pub const fn node_port(entry: u64) -> u16 {
    entry as u16
}

/// Returns whether two entries have the same NAT address.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn has_same_nat_address(entry: u64, other: u64) -> bool {
    address_index(entry) == address_index(other) && node_port(entry) == node_port(other)
}

/// Returns the index of an entry's node address.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
#[expect(clippy::cast_possible_truncation, reason = "the eight bits above the port are the index")]
pub const fn address_index(entry: u64) -> u8 {
    (entry >> ADDRESS_SHIFT) as u8
}

const _: () = assert!(crate::mapping::MAX_LOCAL_ADDRESSES == 256, "an address index has eight bits in an entry");
const _: () = assert!(SLOTS.is_power_of_two() && HANDSHAKE_SLOTS.is_power_of_two(), "slots are chosen by a mask");
const _: () = assert!(REPLY_CACHE_ELEMENTS.is_multiple_of(8), "both candidate slots of a flow are in one cache line");
const _: () =
    assert!(HANDSHAKE_SLOTS <= SLOTS, "the slot of a handshake is computed from the slot of a flow by a mask");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        HANDSHAKE_SLOTS, REPLY_CACHE_ELEMENTS, SLOTS, WORDS, address_index, datagram_slot, entry, handshake_slot,
        has_same_nat_address, is_waiting, matches, node_port, phase, second_datagram_slot, second_handshake_slot,
        second_slot, slot, with_phase,
    };
    use crate::{
        conntrack::Phase,
        hash::{absorb_both, flow as hash},
    };

    proptest! {
        #[test]
        fn a_packed_entry_is_unpacked_unchanged(h: u64, bits in 0_u64..4, index: u8, port in 1_u16..) {
            let p = Phase::from_bits(bits);
            let e = entry(h, p, index, port);
            prop_assert!(matches(e, h));
            prop_assert_eq!((phase(e), address_index(e), node_port(e)), (p, index, port));
            prop_assert!(has_same_nat_address(e, with_phase(e, Phase::REFUSED)));
            prop_assert!(!has_same_nat_address(e, entry(h, p, index ^ 1, port)));
            prop_assert!(!has_same_nat_address(e, entry(h, p, index, port ^ 1)));
            let promoted = with_phase(e, Phase::ESTABLISHED);
            prop_assert!(matches(promoted, h));
            let fields = (phase(promoted), address_index(promoted), node_port(promoted));
            prop_assert_eq!(fields, (Phase::ESTABLISHED, index, port));
        }

        #[test]
        fn an_empty_slot_matches_no_flow(h: u64) {
            prop_assert!(!matches(0, h));
            prop_assert!(!is_waiting(0));
        }
    }

    /// Flows of clients with consecutive addresses and ports, like the connections of a load balancer, spread over the
    /// slots as evenly as random flows.
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

    /// The second candidate slot is one of four other slots of the same cache line, each with the same probability.
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

    #[test]
    fn handshakes_spread_over_slots_of_their_own() {
        let mut taken = vec![0_u32; HANDSHAKE_SLOTS as usize];
        for h in hashes(HANDSHAKE_SLOTS) {
            let (first, second) = (handshake_slot(h), second_handshake_slot(h));
            let region = SLOTS..REPLY_CACHE_ELEMENTS;
            assert!(region.contains(&first) && region.contains(&second));
            assert!(first / 8 == second / 8 && first != second);
            assert!(slot(h).max(second_slot(h)) < SLOTS);
            taken[(first - SLOTS) as usize] += 1;
        }
        let used = taken.iter().filter(|n| **n > 0).count();
        assert!((10_000..10_750).contains(&used), "{used} slots used");
    }

    #[test]
    fn datagram_flows_have_slots_of_their_own() {
        for h in hashes(SLOTS) {
            let (first, second) = (datagram_slot(h), second_datagram_slot(h));
            let region = REPLY_CACHE_ELEMENTS..WORDS;
            assert!(region.contains(&first) && region.contains(&second));
            assert!(first / 8 == second / 8 && first != second);
        }
    }

    /// With 4096 waiting flows in 65 536 slots and one slot per flow, 1 of 30 flows would lose its slot. With a second
    /// candidate slot, about 1 of 1000 does; the test permits 1 of 256.
    #[test]
    fn few_waiting_flows_lose_their_slot() {
        let mut slots = vec![0_u64; SLOTS as usize];
        let lost = hashes(SLOTS / 16).filter(|h| {
            let first = slot(*h) as usize;
            let at = if is_waiting(slots[first]) { second_slot(*h) as usize } else { first };
            is_waiting(std::mem::replace(&mut slots[at], entry(*h, Phase::REQUESTED, 0, 61_000)))
        });
        let lost = lost.count();
        assert!(lost < 16, "{lost} of {}", SLOTS / 16);
    }

    /// Returns the hashes of `count` flows of one client to one Pod.
    fn hashes(count: u32) -> impl Iterator<Item = u64> {
        (0..u64::from(count)).map(|port| hash(7, 0xc000_0200 << 32 | 0x0a00_0005, port << 32 | 8080 << 8 | 6))
    }

    #[test]
    fn every_word_of_an_ipv6_address_influences_the_slot() {
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
        // If 65 536 flows choose among 65 536 slots at random, 63 % of the slots are used, and hardly any slot by more
        // than eight flows.
        let used = taken.iter().filter(|n| **n > 0).count();
        let fullest = taken.iter().max().unwrap();
        assert!((40_000..43_000).contains(&used), "{used} slots used");
        assert!(*fullest <= 11, "{fullest} flows in one slot");
    }
}
