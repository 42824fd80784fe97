// SPDX-License-Identifier: Apache-2.0
//! Attempts to open a flow that nothing came of: their words in the half-open cache have no time, and would stay until other
//! flows take their slots.

use npl_common::syn::state;

/// An attempt that the Pod has not answered: looks, each ten seconds after the one before. As connection tracking waits for
/// the answer to a datagram; whoever asks again has the slot again.
const UNANSWERED: u8 = 4;
/// One that it has answered once, as a datagram may be that is pushed some minutes later.
const ANSWERED: u8 = 31;

/// What the last looks at a family's half-open cache have found.
#[derive(Debug, Default)]
pub struct Attempts {
    /// Slot, its word, and in how many looks it was the same; by slot.
    seen: Vec<(u32, u64, u8)>,
}

impl Attempts {
    /// Notes what another look has found, by slot, and says what is over: slots, and the words that they are to have still.
    pub fn look(&mut self, words: impl IntoIterator<Item = (u32, u64)>) -> Vec<(u32, u64)> {
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
    fn an_attempt_is_over_when_it_is_the_same_for_long_enough() {
        for (state, limit) in [(state::REQUESTED, UNANSWERED), (state::REPLIED, ANSWERED)] {
            let (mut attempts, slots) = (Attempts::default(), [(3, word(1 << 40, state)), (7, word(2 << 40, state))]);
            for _look in 1..limit {
                assert_eq!(attempts.look(slots), []);
            }
            assert_eq!(attempts.look(slots), slots);
            assert_eq!(attempts.look([]), []);
        }
    }

    #[test]
    fn an_attempt_that_goes_on_or_another_one_in_its_slot_is_not_over() {
        let mut attempts = Attempts::default();
        for number in 0..u64::from(ANSWERED) * 2 {
            assert_eq!(attempts.look([(3, word(number << 40, state::REQUESTED))]), []);
        }
    }

    #[test]
    fn what_is_no_attempt_is_left_alone() {
        let mut attempts = Attempts::default();
        let others = [(0, 0), (1, word(1 << 40, state::ESTABLISHED)), (2, word(1 << 40, state::CLOSED))];
        for _look in 0..=ANSWERED {
            assert_eq!(attempts.look(others), []);
        }
        assert!(attempts.seen.is_empty());
    }

    /// Slots come and go in between.
    #[test]
    fn each_attempt_is_told_from_its_neighbours() {
        let (mut attempts, stays) = (Attempts::default(), (5, word(5 << 40, state::REQUESTED)));
        let others = [vec![], vec![(2, word(2 << 40, 0))], vec![(9, word(9 << 40, 0))]];
        for mut slots in others {
            slots.push(stays);
            slots.sort_unstable();
            assert_eq!(attempts.look(slots), []);
        }
        assert_eq!(attempts.look([stays, (9, word(9 << 40, 0))]), [stays]);
    }
}
