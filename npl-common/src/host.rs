// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Notes of what the host itself has under way by node ports: a connection that it masquerades may be given any port, and
//! neither a mapping nor a socket that holds a port keeps `nf_nat` from it. What comes back on it is the host's.
//!
//! One word per slot, as in [`crate::syn`] and for the same reason:
//!
//! ```text
//! 63            24 23       0
//! [ tag: 40 bits ][ seconds ]
//! ```

use crate::mapping::protocol;

/// Slots, a power of two: 512 KiB.
pub const SLOTS: u32 = 65_536;

/// How long datagrams may be answered, in [`crate::fragment::time`]'s unit: as connection tracking waits for them. A
/// connection may be silent for as long as its ends like.
pub const LIFETIME: u64 = 120;

const TIME_MASK: u64 = (1 << 24) - 1;

/// The word for what has this hash, seen at this [`crate::fragment::time`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn word(hash: u64, time: u64) -> u64 {
    hash & !TIME_MASK | time & TIME_MASK
}

/// Whether a word was written for what has this hash, and counts still.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn counts(word: u64, hash: u64, protocol: u8, time: u64) -> bool {
    let is_of_this = word != 0 && (word ^ hash) & !TIME_MASK == 0;
    is_of_this && (protocol != protocol::UDP || time.wrapping_sub(word) & TIME_MASK <= LIFETIME)
}

/// The slot of a hash; its tag does not depend on it.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
#[expect(clippy::cast_possible_truncation, reason = "masked to the number of slots")]
pub const fn slot(hash: u64) -> u32 {
    (hash as u32) & (SLOTS - 1)
}

const _: () = assert!(SLOTS.is_power_of_two(), "a slot is chosen by a mask");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{LIFETIME, counts, word};
    use crate::mapping::protocol::{SCTP, TCP, UDP};

    proptest! {
        #[test]
        fn datagrams_count_for_as_long_as_they_may_be_answered(hash in 1_u64 << 24.., time in 1_u64..1 << 40) {
            let word = word(hash, time);
            for protocol in [TCP, SCTP, UDP] {
                prop_assert!(counts(word, hash, protocol, time));
                prop_assert!(counts(word, hash, protocol, time + LIFETIME));
                prop_assert_eq!(counts(word, hash, protocol, time + LIFETIME + 1), protocol != UDP);
            }
        }

        #[test]
        fn a_word_is_of_one_tag(hash: u64, other: u64, time: u64) {
            prop_assert_eq!(counts(word(hash | 1 << 63, time), other, TCP, time), (hash | 1 << 63) >> 24 == other >> 24);
        }
    }

    #[test]
    fn an_empty_slot_is_nobodys() {
        assert!(!counts(0, 0, TCP, 0));
    }
}
