// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! The Node's own connections from ports of the range: `nf_nat` may masquerade a connection to any source port, also
//! one that a socket or a mapping reserves. Replies to such a connection are not translated.
//!
//! One 64-bit word per slot, as in [`crate::half_open`]:
//!
//! ```text
//! 63            24 23       0
//! [ tag: 40 bits ][ seconds ]
//! ```

use crate::mapping::protocol;

/// Slots, a power of two: 512 KiB.
pub const SLOTS: u32 = 65_536;

/// Lifetime of a UDP entry in [`crate::fragment::time`]'s unit, as `nf_conntrack_udp_timeout_stream`. Entries of other
/// protocols do not expire.
pub const LIFETIME: u64 = 120;

const TIME_MASK: u64 = (1 << 24) - 1;

/// Packs the entry of a connection with this hash, seen at this [`crate::fragment::time`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn entry(hash: u64, time: u64) -> u64 {
    hash & !TIME_MASK | time & TIME_MASK
}

/// Whether an entry is of a connection with this hash and has not expired.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn is_alive(word: u64, hash: u64, protocol: u8, time: u64) -> bool {
    let is_of_this = word != 0 && (word ^ hash) & !TIME_MASK == 0;
    is_of_this && (protocol != protocol::UDP || time.wrapping_sub(word) & TIME_MASK <= LIFETIME)
}

/// The slot of a hash, from bits that the tag does not have.
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

    use super::{LIFETIME, entry, is_alive};
    use crate::mapping::protocol::{SCTP, TCP, UDP};

    proptest! {
        #[test]
        fn datagrams_are_alive_for_their_lifetime(hash in 1_u64 << 24.., time in 1_u64..1 << 40) {
            let word = entry(hash, time);
            for protocol in [TCP, SCTP, UDP] {
                prop_assert!(is_alive(word, hash, protocol, time));
                prop_assert!(is_alive(word, hash, protocol, time + LIFETIME));
                prop_assert_eq!(is_alive(word, hash, protocol, time + LIFETIME + 1), protocol != UDP);
            }
        }

        #[test]
        fn a_word_is_of_one_tag(hash: u64, other: u64, time: u64) {
            prop_assert_eq!(is_alive(entry(hash | 1 << 63, time), other, TCP, time), (hash | 1 << 63) >> 24 == other >> 24);
        }
    }

    #[test]
    fn an_empty_slot_matches_no_connection() {
        assert!(!is_alive(0, 0, TCP, 0));
    }
}
