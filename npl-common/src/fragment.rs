// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Defines the records of fragment tracking. Only the first fragment of a datagram has ports. The programs therefore
//! record how they translated the first fragment, and translate the later fragments of the datagram according to this
//! record.
//!
//! A record is one 64-bit word in a slot of an array, as in [`crate::half_open`]: a flood of fragments overwrites
//! records, but allocates no memory.
//!
//! ```text
//! 63        34 33       33 32      26 25      24 23        16 15        0
//! [ tag: 30 b ][ by stack ][ time    ][ protocol ][ address # ][ node port ]
//! ```

use crate::mapping::protocol;

/// Number of slots for fragment records per IP family, a power of two. The slots of a family take 512 KiB.
pub const SLOTS: u32 = 65_536;

/// Lifetime of a record in the unit of [`time`]: about 32 s, near the kernel's IPv4 reassembly timeout of 30 s
/// (`net.ipv4.ipfrag_time`). A record is not used for longer, because the sender may then reuse the IP identification
/// for another datagram.
pub const LIFETIME: u64 = 30;

const NODE_PORT_MASK: u64 = 0xffff;
const ADDRESS_SHIFT: u32 = 16;
const PROTOCOL_SHIFT: u32 = 24;
const TIME_SHIFT: u32 = 26;
/// Flag of a record: the program did not redirect the first fragment, so the host's stack forwarded the fragment. Only
/// programs of redirect and offload mode read this flag.
const BY_STACK: u64 = 1 << 33;
const TAG_SHIFT: u32 = 34;
const TAG_MASK: u64 = u64::MAX << TAG_SHIFT;
const PROTOCOL_MASK: u64 = 0x3;
const TIME_MASK: u64 = 0x7f;

// Codes of the transport protocol in a record; the code of UDP is 0.
const TCP: u64 = 1;
const SCTP: u64 = 2;

/// How a datagram's first fragment was translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// The mapping's node port, in host byte order; 0 if the first fragment was not translated.
    pub node_port: u16,
    /// Index of the node address that the client uses.
    pub address_index: u8,
    /// The datagram's transport protocol, which later IPv6 fragments need not name.
    pub protocol: u8,
}

impl Record {
    /// The record of a datagram whose first fragment was not translated.
    pub const UNTRANSLATED: Self = Self { node_port: 0, address_index: 0, protocol: protocol::UDP };

    /// Packs the record into the word of a slot. `hash` is the datagram's hash, and `time` is the [`time`] at which the
    /// record is written.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
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

    /// Unpacks the record in a slot. `None` if the record belongs to a datagram with another hash, or has expired at
    /// this [`time`].
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
    #[expect(clippy::cast_possible_truncation, reason = "the code extracts each field from the word")]
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

/// Returns whether the record in a slot has not expired at this [`time`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
const fn is_young(word: u64, time: u64) -> bool {
    time.wrapping_sub(word >> TIME_SHIFT) & TIME_MASK <= LIFETIME
}

/// Returns whether the record in a slot belongs to a datagram with this hash. The record may have expired.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
pub const fn is_of(word: u64, hash: u64) -> bool {
    (word ^ hash) & TAG_MASK == 0
}

/// Returns whether a slot contains a record that translates a datagram and has not expired at this [`time`]. The
/// programs do not overwrite such a record with the record of another, untranslated datagram.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
pub const fn translates(word: u64, time: u64) -> bool {
    word & NODE_PORT_MASK != 0 && is_young(word, time)
}

/// Returns the record with the flag which says that the host's stack forwarded the first fragment. The stack must then
/// forward all fragments of the datagram, because kernel conntrack reassembles a datagram only from fragments that pass
/// through the stack.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
pub const fn by_stack(word: u64) -> u64 {
    word | BY_STACK
}

/// Returns whether a record has the flag that [`by_stack`] sets.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
pub const fn is_by_stack(word: u64) -> bool {
    word & BY_STACK != 0
}

/// Returns a copy of a record whose time is earlier by `units`, in the unit of [`time`]. Tests use such a copy instead
/// of waiting until a record expires.
pub const fn aged(word: u64, units: u64) -> u64 {
    let time = (word >> TIME_SHIFT).wrapping_sub(units) & TIME_MASK;
    word & !(TIME_MASK << TIME_SHIFT) | time << TIME_SHIFT
}

/// Returns whether a [`time`] is more than [`LIFETIME`] in the past.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
pub const fn is_over(time: u64, now: u64) -> bool {
    now.wrapping_sub(time) > LIFETIME
}

/// Returns the slot for the record of a datagram with this hash. The slot depends only on bits of the hash that are not
/// part of the tag.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
#[expect(clippy::cast_possible_truncation, reason = "the mask limits the value to the number of slots")]
pub const fn slot(hash: u64) -> u32 {
    (hash as u32) & (SLOTS - 1)
}

/// Converts nanoseconds to units of 2^30 ns (1.07 s). A record contains the low seven bits of the result.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
pub const fn time(nanoseconds: u64) -> u64 {
    nanoseconds >> 30
}

const _: () = assert!(SLOTS.is_power_of_two(), "slots are chosen by a mask");
const _: () = assert!(crate::mapping::MAX_LOCAL_ADDRESSES == 256, "an address index has eight bits in a slot");
const _: () = assert!(LIFETIME < TIME_MASK / 2, "an expired record must not look like a new one");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::{LIFETIME, Record, TAG_SHIFT, by_stack, is_by_stack, time, translates};
    use crate::mapping::protocol::{SCTP, TCP, UDP};

    proptest! {
        #[test]
        fn a_packed_record_is_unpacked_unchanged(
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
            prop_assert_eq!(translates(word, now + LIFETIME), node_port != 0);
            prop_assert!(!translates(word, now + LIFETIME + 1));
            prop_assert_eq!(Record::from_word(word, hash, now + LIFETIME), Some(record));
            prop_assert_eq!(Record::from_word(word, hash, now + LIFETIME + 1), None);
        }

        #[test]
        fn a_value_matches_only_hashes_with_its_tag(hash: u64, other: u64) {
            let word = Record::UNTRANSLATED.to_word(hash, 0);
            prop_assert_eq!(Record::from_word(word, other, 0).is_some(), hash >> TAG_SHIFT == other >> TAG_SHIFT);
        }
    }
}
