// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Recognizes the SCTP packet of a Pod that answers a client's packet in the middle of an association.

use crate::{
    conntrack::{Numbers, is_near},
    hash::absorb,
};

/// The bits of the acknowledgement number in [`Numbers`].
const LOW: u64 = u32::MAX as u64;

impl Numbers {
    /// The largest accepted distance between the transmission sequence number (TSN) of a chunk and the TSN that the
    /// other side acknowledges, in chunks.
    pub const TSN_WINDOW: u32 = 1 << 14;

    /// Returns whether the Pod's SCTP packet with the numbers `reply` answers the client's packet with these numbers.
    /// For this comparison:
    ///
    /// * the sequence number is the TSN of the packet's data, or a hash of its HEARTBEAT;
    /// * the acknowledgement number is the TSN that the packet's SACK or SHUTDOWN acknowledges, or a hash of the HEARTBEAT
    ///   that the packet answers;
    /// * a number is 0 if the packet has no such chunk; the number 0 matches no number.
    ///
    /// One side's sequence number must be within [`Self::TSN_WINDOW`] of the other side's acknowledgement number.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn are_answered_by(self, reply: Self) -> bool {
        is_answer(reply.acknowledgement(), self.sequence()) || is_answer(self.acknowledgement(), reply.sequence())
    }

    /// Returns these numbers; in place of a number that is 0, the number of `earlier`.
    #[must_use]
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn or_missing(self, earlier: Self) -> Self {
        let high = if self.0 & !LOW == 0 { earlier.0 & !LOW } else { self.0 & !LOW };
        let low = if self.0 & LOW == 0 { earlier.0 & LOW } else { self.0 & LOW };
        Self(high | low)
    }

    /// Returns the word that the reply cache stores beside the numbers of a client's SCTP packet. The high half is one
    /// half of a checksum over the numbers, the key, the entry and the verification tag. The low half is the
    /// verification tag.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
    pub const fn checksum_with_tag(self, key: u64, entry: u64, tag: u32) -> u64 {
        let checksum = self.checksum(absorb(key, tag as u64), entry);
        checksum >> u32::BITS << u32::BITS | tag as u64
    }
}

/// Returns whether `acknowledgement` is near the TSN `sequence`. The value 0 means that a packet has no such number,
/// and is near no number.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
const fn is_answer(acknowledgement: u32, sequence: u32) -> bool {
    acknowledgement != 0 && sequence != 0 && is_near(acknowledgement, sequence, Numbers::TSN_WINDOW)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::conntrack::{Numbers, Segment};

    const fn numbers(sequence: u32, acknowledgement: u32) -> Numbers {
        Segment::new(sequence, acknowledgement, 0).numbers
    }

    #[test]
    fn an_sctp_packet_without_numbers_answers_nothing() {
        for (client, pod) in [((0, 0), (0, 0)), ((5, 0), (5, 0)), ((0, 5), (0, 5)), ((5, 0), (0, 0)), ((0, 0), (5, 5))]
        {
            assert!(!numbers(client.0, client.1).are_answered_by(numbers(pod.0, pod.1)), "{client:?} {pod:?}");
        }
        assert!(numbers(5, 0).are_answered_by(numbers(0, 5)), "the Pod acknowledges the client's data");
        assert!(numbers(0, 5).are_answered_by(numbers(5, 0)), "the client acknowledges the Pod's data");
    }

    #[test]
    fn a_missing_number_is_taken_from_the_earlier_packet() {
        for (later, expected) in [((0, 0), (7, 8)), ((5, 0), (5, 8)), ((0, 6), (7, 6)), ((5, 6), (5, 6))] {
            assert_eq!(numbers(later.0, later.1).or_missing(numbers(7, 8)), numbers(expected.0, expected.1));
        }
    }

    proptest! {
        /// The Pod's SCTP packet answers the client's packet if and only if the number of one side is within
        /// [`Numbers::TSN_WINDOW`] of the number of the other side.
        #[test]
        fn sctp_answers_within_the_window_count_and_no_others(
            tsn in 1..=u32::MAX, near in 0..Numbers::TSN_WINDOW, far in Numbers::TSN_WINDOW..u32::MAX - Numbers::TSN_WINDOW,
        ) {
            let data = numbers(tsn, 0);
            let sack = |distance: u32| numbers(0, tsn.wrapping_add(distance));
            for number in [tsn.wrapping_add(near), tsn.wrapping_sub(near)] {
                prop_assert_eq!(data.are_answered_by(numbers(0, number)), number != 0);
                prop_assert_eq!(numbers(0, number).are_answered_by(data), number != 0);
                prop_assert!(!data.are_answered_by(numbers(number, 0)));
            }
            prop_assert!(!data.are_answered_by(sack(far)) && !sack(far).are_answered_by(data));
        }

        /// The stored word contains the verification tag. The word is valid only for the same key, entry, tag and
        /// numbers.
        #[test]
        fn a_stored_sctp_packet_is_valid_only_for_its_entry(key: u64, entry: u64, value: u64, tag: u32, change in 1..=u32::MAX) {
            let word = Numbers(value).checksum_with_tag(key, entry, tag);
            prop_assert_eq!(word & u64::from(u32::MAX), u64::from(tag));
            let wide = u64::from(change);
            prop_assert_ne!(word, Numbers(value).checksum_with_tag(key ^ wide << 32, entry, tag));
            prop_assert_ne!(word, Numbers(value).checksum_with_tag(key, entry ^ wide << 32, tag));
            prop_assert_ne!(word, Numbers(value ^ wide).checksum_with_tag(key, entry, tag));
            prop_assert_ne!(word, Numbers(value).checksum_with_tag(key, entry, tag ^ change));
        }
    }
}
