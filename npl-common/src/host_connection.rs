// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Host connections: the Node's own and masqueraded connections whose packets leave from a port of the node port range,
//! and connections to node ports that kernel conntrack translates because of other software's rules. When the kernel
//! masquerades a connection, the kernel may choose any source port, even a port that a socket or a mapping uses. NPL
//! does not translate the packets that a remote host sends on a host connection.
//!
//! The entry of a host connection is one 64-bit word in a slot of an array, as in [`crate::half_open`]. Each connection
//! has two candidate slots, so that two connections with the same first slot can both have an entry. The fields of an
//! entry are:
//!
//! ```text
//! 63            26 25      24 23       0
//! [ tag: 38 bits ][ duration ][ time    ]
//! ```
//!
//! The duration is the time between the first and the last packet in units of 1.07 s ([`crate::fragment::time`]), at
//! most [`STREAM`].

use crate::mapping::protocol;

/// Number of slots for host connections per IP family, a power of two. The slots of a family take 512 KiB.
pub const SLOTS: u32 = 65_536;

/// Lifetime of the entry of a UDP host connection, in units of 1.07 s ([`crate::fragment::time`]): 28 s to 29 s after
/// the last packet that left the Node. Kernel conntrack removes its entry 30 s after the last packet of either
/// direction (`nf_conntrack_udp_timeout`). The entries of TCP and SCTP host connections do not expire.
pub const LIFETIME: u64 = 26;

/// Like [`LIFETIME`], but for a stream: 118 s to 119 s. Kernel conntrack removes the entry of a stream after 120 s
/// (`nf_conntrack_udp_timeout_stream`).
pub const STREAM_LIFETIME: u64 = 110;

/// The duration from which a UDP host connection is a stream: 1.1 s to 2.1 s. For kernel conntrack, a stream has lasted
/// for more than 2 s.
pub const STREAM: u64 = 2;

/// Age, in units of 1.07 s, at which the 24-bit time of an entry wraps. From this age on, the entry looks younger than
/// it is.
const AGES: u64 = TIME_MASK + 1;

const TIME_MASK: u64 = (1 << 24) - 1;
const DURATION_SHIFT: u32 = 24;
const DURATION_MASK: u64 = 0b11 << DURATION_SHIFT;
const TAG_MASK: u64 = !(DURATION_MASK | TIME_MASK);

/// Packs the entry of a host connection with this hash. `time` is the [`crate::fragment::time`] of the connection's
/// last packet, and `duration` is at most [`STREAM`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn entry(hash: u64, duration: u64, time: u64) -> u64 {
    hash & TAG_MASK | duration << DURATION_SHIFT | time & TIME_MASK
}

/// Returns the entry of a host connection after a packet that leaves the Node. `word` is the content of the
/// connection's slot, which may be the entry of another connection.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn renewed(word: u64, hash: u64, protocol: u8, time: u64) -> u64 {
    if !is_alive(word, hash, protocol, time) {
        return entry(hash, 0, time);
    }
    let lasted = duration(word) + age(word, time);
    entry(hash, if lasted < STREAM { lasted } else { STREAM }, time)
}

/// Returns the entry of a host connection after a packet of the remote host. The packet does not renew the entry.
/// Otherwise, the entry would never expire while the remote host keeps sending, so the remote host could not reach a
/// Pod at the same port after the host connection has ended.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn answered(word: u64, time: u64) -> u64 {
    if duration(word) + age(word, time) < STREAM { word } else { word & !DURATION_MASK | STREAM << DURATION_SHIFT }
}

/// Returns the entry of a host connection whose entry in kernel conntrack is removed after `remaining` units of
/// [`crate::fragment::time`] without a packet. The returned entry expires one unit earlier, and never later than a new
/// entry would. A flow that is not yet a stream may have lasted for up to 2 s, so the returned entry has the longest
/// duration below that of a stream. The flow's next packet therefore makes the flow a stream, unless the packet arrives
/// in the same unit of time.
pub const fn expiring(hash: u64, is_stream: bool, time: u64, remaining: u64) -> u64 {
    let duration = if is_stream { STREAM } else { STREAM - 1 };
    let age = lifetime(duration).saturating_sub(remaining.saturating_sub(1));
    entry(hash, duration, time.wrapping_sub(age))
}

/// Returns whether an entry belongs to a host connection with this hash.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn matches(word: u64, hash: u64) -> bool {
    word != 0 && (word ^ hash) & TAG_MASK == 0
}

/// Returns whether an entry belongs to a host connection with this hash and has not expired.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn is_alive(word: u64, hash: u64, protocol: u8, time: u64) -> bool {
    matches(word, hash) && (protocol != protocol::UDP || age(word, time) <= lifetime(duration(word)))
}

/// Returns whether a connection uses its second slot. If one of its slots contains the connection's entry, the
/// connection uses this slot. Otherwise, its new entry is written to an empty slot or, if both slots are occupied, over
/// the older entry.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn is_second(first: u64, second: u64, hash: u64, time: u64) -> bool {
    !matches(first, hash) && (matches(second, hash) || age(first, time) < age(second, time))
}

/// Returns the time for which the entry of a UDP host connection stays valid, in units of [`crate::fragment::time`].
pub const fn remaining(word: u64, time: u64) -> u64 {
    lifetime(duration(word)).saturating_sub(age(word, time))
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
const fn lifetime(duration: u64) -> u64 {
    if duration < STREAM { LIFETIME } else { STREAM_LIFETIME }
}

/// Returns the time since an entry was written. For an empty slot, the result is larger than the age of any entry.
/// Another processor may have written the entry after this processor has read the time, so an entry whose time is one
/// unit later than `time` has the age 0.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
const fn age(word: u64, time: u64) -> u64 {
    match time.wrapping_sub(word) & TIME_MASK {
        _ if word == 0 => AGES,
        TIME_MASK => 0,
        age => age,
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
const fn duration(word: u64) -> u64 {
    (word & DURATION_MASK) >> DURATION_SHIFT
}

/// Returns a copy of an entry whose time is earlier by `units`. Tests use such a copy instead of waiting until an entry
/// expires.
pub const fn aged(word: u64, units: u64) -> u64 {
    word & !TIME_MASK | word.wrapping_sub(units) & TIME_MASK
}

/// Returns the first candidate slot for a host connection with this hash. The slot depends only on bits of the hash
/// that are not part of the tag.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
#[expect(clippy::cast_possible_truncation, reason = "the mask limits the value to the number of slots")]
pub const fn slot(hash: u64) -> u32 {
    (hash as u32) & (SLOTS - 1)
}

/// Returns the second candidate slot for a host connection with this hash.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
#[expect(clippy::cast_possible_truncation, reason = "the mask limits the value to the number of slots")]
pub const fn second_slot(hash: u64) -> u32 {
    (hash >> SECOND_SHIFT) as u32 & (SLOTS - 1)
}

/// Position of the hash bits that choose the second slot. The bits that choose the first slot are at another position,
/// so that connections with the same first slot usually have different second slots.
const SECOND_SHIFT: u32 = 24;

const _: () = assert!(SLOTS.is_power_of_two(), "slots are chosen by a mask");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        LIFETIME, SLOTS, STREAM, STREAM_LIFETIME, answered, entry, expiring, is_alive, is_second, remaining, renewed,
        second_slot, slot,
    };
    use crate::mapping::protocol::{SCTP, TCP, UDP};

    proptest! {
        #[test]
        fn entries_of_datagrams_are_valid_for_their_lifetime(hash in 1_u64 << 26.., time in 1_u64..1 << 40) {
            for (duration, lifetime) in [(0, LIFETIME), (1, LIFETIME), (STREAM, STREAM_LIFETIME)] {
                let word = entry(hash, duration, time);
                for protocol in [TCP, SCTP, UDP] {
                    prop_assert!(is_alive(word, hash, protocol, time));
                    prop_assert!(is_alive(word, hash, protocol, time + lifetime));
                    prop_assert_eq!(is_alive(word, hash, protocol, time + lifetime + 1), protocol != UDP);
                }
            }
        }

        #[test]
        fn an_entry_expires_with_that_of_kernel_conntrack(
            hash in 1_u64 << 26..,
            is_stream: bool,
            units in 0_u64..200,
            time in 1_u64..1 << 40,
        ) {
            let longest = if is_stream { STREAM_LIFETIME } else { LIFETIME };
            let left = units.saturating_sub(1).min(longest);
            let (word, end) = (expiring(hash, is_stream, time, units), time + left);
            prop_assert_eq!(remaining(word, time), left);
            prop_assert!(is_alive(word, hash, UDP, end));
            prop_assert!(!is_alive(word, hash, UDP, end + 1));
            if left > 0 {
                prop_assert_eq!(renewed(word, hash, UDP, time + 1), entry(hash, STREAM, time + 1));
            }
        }

        #[test]
        fn a_connection_becomes_a_stream_after_two_units(
            hash in 1_u64 << 26..,
            other: u64,
            pauses in prop::collection::vec(0..=LIFETIME, 0..9),
            time in 1_u64..1 << 40,
        ) {
            let (mut word, mut now) = (renewed(other & 0xFFFF, hash, UDP, time), time);
            for pause in pauses {
                now += pause;
                word = renewed(word, hash, UDP, now);
            }
            prop_assert_eq!(word, entry(hash, STREAM.min(now - time), now));
            let expired = now + STREAM_LIFETIME + 1;
            prop_assert_eq!(renewed(word, hash, UDP, expired), entry(hash, 0, expired));
            prop_assert_eq!(renewed(word, hash, TCP, expired), entry(hash, STREAM, expired));
        }

        #[test]
        fn an_answer_makes_a_stream_and_does_not_renew(hash in 1_u64 << 26.., time in 1_u64..1 << 40, pause in 0..=LIFETIME) {
            let word = renewed(0, hash, UDP, time);
            let expected = if pause < STREAM { word } else { entry(hash, STREAM, time) };
            prop_assert_eq!(answered(word, time + pause), expected);
        }

        #[test]
        fn an_entry_of_another_processor_may_be_newer_than_the_read_time(hash in 1_u64 << 26.., time in 1_u64..1 << 40) {
            let word = entry(hash, STREAM, time + 1);
            prop_assert!(is_alive(word, hash, UDP, time));
            prop_assert_eq!(renewed(word, hash, UDP, time), entry(hash, STREAM, time));
        }

        #[test]
        fn a_value_matches_only_hashes_with_its_tag(hash: u64, other: u64, time: u64) {
            prop_assert_eq!(is_alive(entry(hash | 1 << 63, 0, time), other, TCP, time), (hash | 1 << 63) >> 26 == other >> 26);
        }
    }

    proptest! {
        #[test]
        fn an_entry_is_found_where_it_was_written(hash in 1_u64 << 26.., others: [u64; 2], time in 1_u64..1 << 40) {
            let mut slots = others;
            let index = usize::from(is_second(slots[0], slots[1], hash, time));
            slots[index] = entry(hash, 0, time);
            prop_assert_eq!(usize::from(is_second(slots[0], slots[1], hash, time + 1)), index);
        }
    }

    #[test]
    fn a_new_entry_takes_the_empty_slot_then_the_older_one() {
        let (hash, time) = (7 << 26, 1000);
        let [old, new] = [entry(1 << 26, 0, time - 9), entry(2 << 26, 0, time - 1)];
        for (first, second, expected) in
            [(0, 0, false), (0, new, false), (new, 0, true), (old, new, false), (new, old, true)]
        {
            assert_eq!(is_second(first, second, hash, time), expected, "{first:#x} {second:#x}");
        }
    }

    #[test]
    fn connections_that_share_the_first_slot_have_different_second_ones() {
        let same_first = |number: u64| number << 24 | 5;
        assert!((0..u64::from(SLOTS)).all(|number| slot(same_first(number)) == 5));
        assert!((0..u64::from(SLOTS) - 1).all(|n| second_slot(same_first(n)) != second_slot(same_first(n + 1))));
    }

    #[test]
    fn an_empty_slot_matches_no_connection() {
        assert!(!is_alive(0, 0, TCP, 0));
    }
}
