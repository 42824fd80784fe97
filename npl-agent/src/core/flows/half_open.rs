// SPDX-License-Identifier: Apache-2.0
//! Decides which half-open entries have timed out. A half-open entry has no time stamp, so the agent counts the sweeps
//! in which the entry has not changed.

use npl_common::{
    conntrack::{Action, Event, State, step},
    half_open::{matches, phase, with_phase},
    mapping::protocol,
};

/// The interval between two sweeps of the half-open cache, in nanoseconds.
pub const SWEEP_INTERVAL_NS: u64 = 10_000_000_000;

/// The entries in the phases "requested" and "replied" that the last sweep found, except those that had timed out.
#[derive(Debug, Default)]
pub struct HalfOpenExpiry {
    /// The slot, the entry in this slot, and the number of sweeps in which the entry was unchanged; sorted by slot.
    seen: Vec<(u32, u64, u32)>,
    used: usize,
}

impl HalfOpenExpiry {
    /// The number of slots of the half-open cache that had an entry at the last sweep, including entries of established
    /// flows.
    pub const fn used(&self) -> usize {
        self.used
    }

    /// Records the entries of one sweep, by slot, and returns the entries that have timed out. The caller removes a
    /// returned entry only if the slot still contains the same entry.
    pub fn observe(&mut self, entries: impl IntoIterator<Item = (u32, u64)>) -> Vec<(u32, u64)> {
        let mut before = std::mem::take(&mut self.seen).into_iter().peekable();
        let mut expired = Vec::new();
        self.used = 0;
        for (slot, entry) in entries {
            self.used += usize::from(entry != 0);
            if entry == 0 || !phase(entry).is_opening() {
                continue;
            }
            while before.next_if(|(other, ..)| *other < slot).is_some() {}
            let sweeps = before.next_if(|(other, ..)| *other == slot).filter(|(_, same, _)| *same == entry);
            let sweeps = sweeps.map_or(1, |(.., sweeps)| sweeps.saturating_add(1));
            if has_timed_out(entry, sweeps) {
                expired.push((slot, entry));
            } else {
                self.seen.push((slot, entry, sweeps));
            }
        }
        expired
    }
}

/// The entry that replaces a flow's half-open entry after the flow was removed from the flow table; `None` if the
/// half-open entry does not change. `word` is the present half-open entry.
///
/// A half-open entry with the phase "established" never expires, because packets of an established flow do not change
/// the half-open entry. Although the flow table has no entry, the programs would therefore translate the Pod's packets
/// by the half-open entry until another flow overwrites the slot. An entry with the phase "replied" expires, and the
/// client's next packet establishes the flow again.
pub fn after_removal(word: u64, hash: u64) -> Option<u64> {
    let (state, action) = step(State::half_open(phase(word)), Event::TableRemoval);
    (matches(word, hash) && action == Action::Store).then(|| with_phase(word, state.phase))
}

fn has_timed_out(entry: u64, sweeps: u32) -> bool {
    let ns = u64::from(sweeps.saturating_sub(1)) * SWEEP_INTERVAL_NS;
    let silence = Event::Silence { ns, protocol: protocol::TCP, is_crowded: false };
    step(State::half_open(phase(entry)), silence).1 == Action::Remove
}

#[cfg(test)]
mod tests {
    use npl_common::{conntrack::Phase, half_open};

    use super::*;

    /// The number of sweeps until an unanswered request times out: the timeout of 30 s is three sweep intervals, so
    /// four sweeps take place from the start to the end of the timeout.
    const UNANSWERED: u32 = 4;
    /// The number of sweeps until an answered request times out: the timeout of 300 s is 30 sweep intervals, so 31
    /// sweeps take place from the start to the end of the timeout.
    const ANSWERED: u32 = 31;

    fn entry(hash: u64, phase: Phase) -> u64 {
        half_open::entry(hash, phase, 0, 61_000)
    }

    #[test]
    fn an_unchanged_half_open_entry_times_out() {
        for (phase, limit) in [(Phase::REQUESTED, UNANSWERED), (Phase::REPLIED, ANSWERED)] {
            let (mut expiry, slots) =
                (HalfOpenExpiry::default(), [(3, entry(1 << 40, phase)), (7, entry(2 << 40, phase))]);
            for _sweep in 1..limit {
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
            assert_eq!(expiry.observe([(3, entry(number << 40, Phase::REQUESTED))]), []);
        }
    }

    #[test]
    fn only_an_established_entry_of_a_removed_flow_becomes_replied() {
        let (hash, other) = (1 << 40, 2 << 40);
        let replied = entry(hash, Phase::REPLIED);
        assert_eq!(after_removal(entry(hash, Phase::ESTABLISHED), hash), Some(replied));
        for word in [0, entry(hash, Phase::REQUESTED), replied, entry(hash, Phase::REFUSED)] {
            assert_eq!(after_removal(word, hash), None);
        }
        assert_eq!(after_removal(entry(other, Phase::ESTABLISHED), hash), None);
    }

    #[test]
    fn entries_that_are_not_half_open_do_not_time_out() {
        let mut expiry = HalfOpenExpiry::default();
        let others = [(0, 0), (1, entry(1 << 40, Phase::ESTABLISHED)), (2, entry(1 << 40, Phase::REFUSED))];
        for _sweep in 0..=ANSWERED {
            assert_eq!(expiry.observe(others), []);
        }
        assert!(expiry.seen.is_empty());
    }

    #[test]
    fn half_open_entries_in_other_slots_do_not_interfere() {
        let (mut expiry, stays) = (HalfOpenExpiry::default(), (5, entry(5 << 40, Phase::REQUESTED)));
        let others = [vec![], vec![(2, entry(2 << 40, Phase::REQUESTED))], vec![(9, entry(9 << 40, Phase::REQUESTED))]];
        for mut slots in others {
            slots.push(stays);
            slots.sort_unstable();
            assert_eq!(expiry.observe(slots), []);
        }
        assert_eq!(expiry.observe([stays, (9, entry(9 << 40, Phase::REQUESTED))]), [stays]);
    }

    #[test]
    fn slots_with_any_entry_are_counted() {
        let mut expiry = HalfOpenExpiry::default();
        for _sweep in 0..2 {
            expiry.observe([(0, 0), (1, entry(1 << 40, Phase::ESTABLISHED)), (2, entry(2 << 40, Phase::REQUESTED))]);
            assert_eq!(expiry.used(), 2);
        }
    }
}
