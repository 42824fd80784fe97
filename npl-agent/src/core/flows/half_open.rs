// SPDX-License-Identifier: Apache-2.0
//! Attempts to open a flow that nothing came of: their words in the half-open cache have no time, and would stay until other
//! flows take their slots.

use npl_common::half_open::state;

/// An attempt that the Pod has not answered: looks, each ten seconds after the one before. As connection tracking waits for
/// the answer to a datagram; whoever asks again has the slot again.
const UNANSWERED: u8 = 4;
/// One that it has answered once, as a datagram may be that is pushed some minutes later.
const ANSWERED: u8 = 31;

/// What the last looks at a family's half-open cache have found.
#[derive(Debug, Default)]
pub struct HalfOpenExpiry {
    /// Slot, its word, and in how many looks it was the same; by slot.
    seen: Vec<(u32, u64, u8)>,
}

impl HalfOpenExpiry {
    /// Notes what another look has found, by slot, and says what is over: slots, and the words that they are to have still.
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
    use npl_common::half_open;

    use super::*;

    fn word(hash: u64, state: u64) -> u64 {
        half_open::word(hash, state, 0, 61_000)
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
