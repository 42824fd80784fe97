// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Records of fragmented datagrams. Only the first fragment has ports; what became of it is written down for the others.
//!
//! One word per slot, as in [`crate::syn`] and for the same reason: a flood of fragments overwrites words, and takes
//! neither memory nor time. A record has to last for as long as its datagram is on the wire.
//!
//! ```text
//! 63        34 33       33 32      26 25      24 23        16 15        0
//! [ tag: 30 b ][ by stack ][ seconds ][ protocol ][ address # ][ node port ]
//! ```

use crate::mapping::protocol;

/// Slots, a power of two: 512 KiB.
pub const SLOTS: u32 = 65_536;

/// How long a record counts, in [`time`]'s unit: as long as the kernel waits for the fragments of a datagram. Their
/// numbers come again.
pub const LIFETIME: u64 = 30;

const NODE_PORT_MASK: u64 = 0xffff;
const ADDRESS_SHIFT: u32 = 16;
const PROTOCOL_SHIFT: u32 = 24;
const TIME_SHIFT: u32 = 26;
/// The first fragment took the host's stack, where others may go past it.
const BY_STACK: u64 = 1 << 33;
const TAG_SHIFT: u32 = 34;
const TAG_MASK: u64 = u64::MAX << TAG_SHIFT;
const PROTOCOL_MASK: u64 = 0x3;
const TIME_MASK: u64 = 0x7f;

/// What stands for a protocol in a word; every other is UDP.
const TCP: u64 = 1;
const SCTP: u64 = 2;

/// What became of a datagram's first fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// The node port that it was translated by, host order; 0 if it was not.
    pub node_port: u16,
    /// Position of the Node's address among the local ones.
    pub address_index: u8,
    /// The datagram's protocol, of those that mappings have: a later fragment of IPv6 does not tell.
    pub protocol: u8,
}

impl Record {
    /// The first fragment was not ours.
    pub const NOT_OURS: Self = Self { node_port: 0, address_index: 0, protocol: protocol::UDP };

    /// As it is kept, for a datagram of this hash, at this [`time`].
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "kernel programs have no call budget to give away")]
    pub const fn to_word(&self, hash: u64, time: u64) -> u64 {
        let protocol = match self.protocol {
            protocol::TCP => TCP,
            protocol::SCTP => SCTP,
            _ => 0,
        };
        (hash & TAG_MASK)
            | (time & TIME_MASK) << TIME_SHIFT
            | protocol << PROTOCOL_SHIFT
            | (self.address_index as u64) << ADDRESS_SHIFT
            | self.node_port as u64
    }

    /// Reads a slot's word, if it is of a datagram of this hash, and not too old at this [`time`].
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "kernel programs have no call budget to give away")]
    #[expect(clippy::cast_possible_truncation, reason = "each field is cut out of the word")]
    pub const fn from_word(word: u64, hash: u64, time: u64) -> Option<Self> {
        if !is_of(word, hash) || !is_young(word, time) {
            return None;
        }
        Some(Self {
            node_port: word as u16,
            address_index: (word >> ADDRESS_SHIFT) as u8,
            protocol: match word >> PROTOCOL_SHIFT & PROTOCOL_MASK {
                TCP => protocol::TCP,
                SCTP => protocol::SCTP,
                _ => protocol::UDP,
            },
        })
    }
}

/// Whether a word still counts at this [`time`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "kernel programs have no call budget to give away")]
const fn is_young(word: u64, time: u64) -> bool {
    time.wrapping_sub(word >> TIME_SHIFT) & TIME_MASK <= LIFETIME
}

/// Whether a word was written for a datagram of this hash, however long ago.
#[inline(always)]
#[expect(clippy::inline_always, reason = "kernel programs have no call budget to give away")]
pub const fn is_of(word: u64, hash: u64) -> bool {
    (word ^ hash) & TAG_MASK == 0
}

/// Whether a word leads the later fragments of some datagram to a mapping, at this [`time`]: whoever has nothing to say but that
/// another datagram is not ours does not take its slot.
#[inline(always)]
#[expect(clippy::inline_always, reason = "kernel programs have no call budget to give away")]
pub const fn leads(word: u64, time: u64) -> bool {
    word & NODE_PORT_MASK != 0 && is_young(word, time)
}

/// The same word, of a datagram whose first fragment took the host's stack: the others have to as well, since whoever gets some
/// of them can make nothing of those.
#[inline(always)]
#[expect(clippy::inline_always, reason = "kernel programs have no call budget to give away")]
pub const fn by_stack(word: u64) -> u64 {
    word | BY_STACK
}

/// Whether a word is one of [`by_stack`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "kernel programs have no call budget to give away")]
pub const fn is_by_stack(word: u64) -> bool {
    word & BY_STACK != 0
}

/// The same word, written `units` of [`time`] earlier.
pub const fn aged(word: u64, units: u64) -> u64 {
    let time = (word >> TIME_SHIFT).wrapping_sub(units) & TIME_MASK;
    word & !(TIME_MASK << TIME_SHIFT) | time << TIME_SHIFT
}

/// Whether a whole [`time`] is too long ago.
#[inline(always)]
#[expect(clippy::inline_always, reason = "kernel programs have no call budget to give away")]
pub const fn is_over(time: u64, now: u64) -> bool {
    now.wrapping_sub(time) > LIFETIME
}

/// The slot of a hash; its tag does not depend on it.
#[inline(always)]
#[expect(clippy::inline_always, reason = "kernel programs have no call budget to give away")]
#[expect(clippy::cast_possible_truncation, reason = "masked to the number of slots")]
pub const fn slot(hash: u64) -> u32 {
    (hash as u32) & (SLOTS - 1)
}

/// The time of a record, from nanoseconds: in units of 1.07 seconds, of which a word keeps the last 128.
#[inline(always)]
#[expect(clippy::inline_always, reason = "kernel programs have no call budget to give away")]
pub const fn time(nanoseconds: u64) -> u64 {
    nanoseconds >> 30
}

const _: () = assert!(SLOTS.is_power_of_two(), "a slot is chosen by a mask");
const _: () = assert!(crate::mapping::MAX_LOCAL_ADDRESSES == 256, "an address index has eight bits in a slot");
const _: () = assert!(LIFETIME < TIME_MASK / 2, "an old record is not taken for a new one");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::{LIFETIME, Record, TAG_SHIFT, by_stack, is_by_stack, leads, time};
    use crate::mapping::protocol::{SCTP, TCP, UDP};

    proptest! {
        #[test]
        fn a_word_gives_back_what_went_in(
            hash: u64,
            nanoseconds: u64,
            node_port: u16,
            address_index: u8,
            protocol in select(&[TCP, UDP, SCTP][..]),
        ) {
            let record = Record { node_port, address_index, protocol };
            let now = time(nanoseconds);
            let word = record.to_word(hash, now);
            prop_assert_eq!(Record::from_word(word, hash, now), Some(record));
            prop_assert_eq!(Record::from_word(by_stack(word), hash, now), Some(record));
            prop_assert_eq!((is_by_stack(word), is_by_stack(by_stack(word))), (false, true));
            prop_assert_eq!(leads(word, now + LIFETIME), node_port != 0);
            prop_assert!(!leads(word, now + LIFETIME + 1));
            prop_assert_eq!(Record::from_word(word, hash, now + LIFETIME), Some(record));
            prop_assert_eq!(Record::from_word(word, hash, now + LIFETIME + 1), None);
        }

        #[test]
        fn a_word_is_of_one_tag(hash: u64, other: u64) {
            let word = Record::NOT_OURS.to_word(hash, 0);
            prop_assert_eq!(Record::from_word(word, other, 0).is_some(), hash >> TAG_SHIFT == other >> TAG_SHIFT);
        }
    }
}
