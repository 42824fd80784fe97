// SPDX-License-Identifier: Apache-2.0
//! Timeouts of half-open entries. They have no time stamp, and would stay until other handshakes need their slots. So
//! an entry times out when several scans in a row find it unchanged.

use npl_common::syn::state;

/// Scans, 10 s apart, until an entry that the Pod has not answered times out: as long as the kernel's conntrack waits
/// for the answer to a datagram.
const UNANSWERED: u8 = 4;
/// Scans until an entry that the Pod has answered once times out: a server may push a datagram minutes later.
const ANSWERED: u8 = 31;

/// The half-open entries of a family in the last scans.
#[derive(Debug, Default)]
pub struct HalfOpenExpiry {
    /// Slot, entry, and the number of scans that found it unchanged; ordered by slot.
    seen: Vec<(u32, u64, u8)>,
}

impl HalfOpenExpiry {
    /// Records a scan, ordered by slot, and returns the expired slots with the entries that they must still have.
    pub fn observe(&mut self, words: impl IntoIterator<Item = (u32, u64)>) -> Vec<(u32, u64)> {
        let mut before = std::mem::take(&mut self.seen).into_iter().peekable();
        let mut over = Vec::new();
        for (slot, word) in words {
            let limit = match (word, state(word)) {
                (0, _) => continue,
                (_, state::REQUESTED) => UNANSWERED,
                (_, state::REPLIED) => ANSWERED,
                _ => continue,
            };
            while before.next_if(|(other, ..)| *other < slot).is_some() {}
            let looks = before.next_if(|(other, ..)| *other == slot).filter(|(_, same, _)| *same == word);
            let looks = looks.map_or(1, |(.., looks)| looks.saturating_add(1));
            if looks >= limit {
                over.push((slot, word));
            } else {
                self.seen.push((slot, word, looks));
            }
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use npl_common::syn;

    use super::*;

    fn word(hash: u64, state: u64) -> u64 {
        syn::word(hash, state, 0, 61_000)
    }

    #[test]
    fn an_unchanged_half_open_entry_times_out() {
        for (state, limit) in [(state::REQUESTED, UNANSWERED), (state::REPLIED, ANSWERED)] {
            let (mut expiry, slots) =
                (HalfOpenExpiry::default(), [(3, word(1 << 40, state)), (7, word(2 << 40, state))]);
            for _look in 1..limit {
                assert_eq!(expiry.observe(slots), []);
            }
            assert_eq!(expiry.observe(slots), slots);
            assert_eq!(expiry.observe([]), []);
        }
    }

    #[test]
    fn a_half_open_entry_that_changes_or_is_replaced_does_not_time_out() {
        let mut expiry = HalfOpenExpiry::default();
        for number in 0..u64::from(ANSWERED) * 2 {
            assert_eq!(expiry.observe([(3, word(number << 40, state::REQUESTED))]), []);
        }
    }

    #[test]
    fn entries_that_are_not_half_open_do_not_time_out() {
        let mut expiry = HalfOpenExpiry::default();
        let others = [(0, 0), (1, word(1 << 40, state::ESTABLISHED)), (2, word(1 << 40, state::CLOSED))];
        for _look in 0..=ANSWERED {
            assert_eq!(expiry.observe(others), []);
        }
        assert!(expiry.seen.is_empty());
    }

    /// Slots come and go in between.
    #[test]
    fn half_open_entries_in_other_slots_do_not_interfere() {
        let (mut expiry, stays) = (HalfOpenExpiry::default(), (5, word(5 << 40, state::REQUESTED)));
        let others = [vec![], vec![(2, word(2 << 40, 0))], vec![(9, word(9 << 40, 0))]];
        for mut slots in others {
            slots.push(stays);
            slots.sort_unstable();
            assert_eq!(expiry.observe(slots), []);
        }
        assert_eq!(expiry.observe([stays, (9, word(9 << 40, 0))]), [stays]);
    }
}
