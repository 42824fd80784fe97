// SPDX-License-Identifier: Apache-2.0
//! What is away for a moment only does not count as gone: addresses and routes are taken off a device and put back when a
//! link bounces, a lease is renewed or a network manager starts again. To take the programs off in between would have the
//! host answer for the Pods, and end their connections.

use std::collections::{BTreeMap, BTreeSet};

use crate::core::model::Moment;

/// How long that moment is. A link takes seconds to come up again, and IPv6 some more to find its addresses.
pub const GRACE_MILLIS: u64 = 10_000;

/// Since when things are away that are gone on with.
#[derive(Debug)]
pub struct Absences<K> {
    since: BTreeMap<K, Moment>,
}

impl<K> Default for Absences<K> {
    fn default() -> Self {
        Self { since: BTreeMap::new() }
    }
}

impl<K: Ord + Copy> Absences<K> {
    /// Those of what is held that are away, and not for long enough to count as gone.
    pub fn awaited(&mut self, held: &BTreeSet<K>, present: &BTreeSet<K>, now: Moment) -> BTreeSet<K> {
        let since = |it: &K| (*it, self.since.get(it).copied().unwrap_or(now));
        let away: BTreeMap<K, Moment> = held.difference(present).map(since).collect();
        self.since = away.into_iter().filter(|(_, since)| now < since.plus(GRACE_MILLIS)).collect();
        self.since.keys().copied().collect()
    }

    /// When the first of them counts as gone.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.since.values().min().map(|since| since.plus(GRACE_MILLIS))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{Absences, GRACE_MILLIS};
    use crate::core::model::Moment;

    fn set(numbers: &[u32]) -> BTreeSet<u32> {
        numbers.iter().copied().collect()
    }

    #[test]
    fn what_comes_back_in_time_was_never_gone() {
        let mut absences = Absences::default();
        let held = set(&[1, 2]);
        assert_eq!(absences.awaited(&held, &set(&[1, 2, 3]), Moment(5)), set(&[]));
        assert_eq!(absences.awaited(&held, &set(&[1]), Moment(10)), set(&[2]));
        assert_eq!(absences.next_deadline(), Some(Moment(10 + GRACE_MILLIS)));
        assert_eq!(absences.awaited(&held, &set(&[1]), Moment(9 + GRACE_MILLIS)), set(&[2]));
        assert_eq!(absences.awaited(&held, &held, Moment(9 + GRACE_MILLIS)), set(&[]));
        assert_eq!(absences.next_deadline(), None);
    }

    #[test]
    fn what_stays_away_is_gone_after_the_grace_and_not_before() {
        let mut absences = Absences::default();
        assert_eq!(absences.awaited(&set(&[1, 2]), &set(&[1]), Moment(10)), set(&[2]));
        assert_eq!(absences.awaited(&set(&[1, 2]), &set(&[]), Moment(20)), set(&[1, 2]));
        assert_eq!(absences.awaited(&set(&[1, 2]), &set(&[]), Moment(10 + GRACE_MILLIS)), set(&[1]));
        assert_eq!(absences.next_deadline(), Some(Moment(20 + GRACE_MILLIS)));
    }

    #[test]
    fn what_comes_back_and_goes_again_has_the_whole_grace() {
        let mut absences = Absences::default();
        let held = set(&[1]);
        absences.awaited(&held, &set(&[]), Moment(0));
        absences.awaited(&held, &held, Moment(GRACE_MILLIS - 1));
        assert_eq!(absences.awaited(&held, &set(&[]), Moment(GRACE_MILLIS)), held);
    }

    #[test]
    fn what_is_not_held_is_not_waited_for() {
        let mut absences = Absences::default();
        absences.awaited(&set(&[1]), &set(&[]), Moment(0));
        assert_eq!(absences.awaited(&set(&[]), &set(&[]), Moment(1)), set(&[]));
        assert_eq!(absences.next_deadline(), None);
    }
}
