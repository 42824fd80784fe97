// SPDX-License-Identifier: Apache-2.0
//! Grace periods for Node addresses and devices that disappear. Addresses and routes disappear briefly when a link
//! flaps, a lease is renewed or a network manager restarts. If NPL's programs were detached while an address or route
//! is absent, the host would answer instead of the Pods and reset the Pods' connections.

use std::collections::{BTreeMap, BTreeSet};

use crate::core::model::Moment;

/// The length of a grace period in milliseconds. A link comes up within seconds, and IPv6 duplicate address detection
/// takes a few more seconds.
pub const GRACE_MILLIS: u64 = 10_000;

/// The addresses or devices (`K`) that are absent, each with the time of its disappearance.
#[derive(Debug)]
pub struct GracePeriods<K> {
    since: BTreeMap<K, Moment>,
}

impl<K> Default for GracePeriods<K> {
    fn default() -> Self {
        Self { since: BTreeMap::new() }
    }
}

impl<K: Ord + Copy> GracePeriods<K> {
    /// Records which of the `held` addresses or devices are not `present` any more. Returns the absent addresses or
    /// devices whose grace period has not ended.
    pub fn update(&mut self, held: &BTreeSet<K>, present: &BTreeSet<K>, now: Moment) -> BTreeSet<K> {
        let since = |it: &K| (*it, self.since.get(it).copied().unwrap_or(now));
        let away: BTreeMap<K, Moment> = held.difference(present).map(since).collect();
        self.since = away.into_iter().filter(|(_, since)| now < since.plus(GRACE_MILLIS)).collect();
        self.since.keys().copied().collect()
    }

    /// The time at which the earliest of the current grace periods ends.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.since.values().min().map(|since| since.plus(GRACE_MILLIS))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{GRACE_MILLIS, GracePeriods};
    use crate::core::model::Moment;

    fn set(numbers: &[u32]) -> BTreeSet<u32> {
        numbers.iter().copied().collect()
    }

    #[test]
    fn an_element_that_returns_within_the_grace_period_is_kept() {
        let mut grace_periods = GracePeriods::default();
        let held = set(&[1, 2]);
        assert_eq!(grace_periods.update(&held, &set(&[1, 2, 3]), Moment(5)), set(&[]));
        assert_eq!(grace_periods.update(&held, &set(&[1]), Moment(10)), set(&[2]));
        assert_eq!(grace_periods.next_deadline(), Some(Moment(10 + GRACE_MILLIS)));
        assert_eq!(grace_periods.update(&held, &set(&[1]), Moment(9 + GRACE_MILLIS)), set(&[2]));
        assert_eq!(grace_periods.update(&held, &held, Moment(9 + GRACE_MILLIS)), set(&[]));
        assert_eq!(grace_periods.next_deadline(), None);
    }

    #[test]
    fn an_absent_element_is_dropped_after_the_grace_period_and_not_before() {
        let mut grace_periods = GracePeriods::default();
        assert_eq!(grace_periods.update(&set(&[1, 2]), &set(&[1]), Moment(10)), set(&[2]));
        assert_eq!(grace_periods.update(&set(&[1, 2]), &set(&[]), Moment(20)), set(&[1, 2]));
        assert_eq!(grace_periods.update(&set(&[1, 2]), &set(&[]), Moment(10 + GRACE_MILLIS)), set(&[1]));
        assert_eq!(grace_periods.next_deadline(), Some(Moment(20 + GRACE_MILLIS)));
    }

    #[test]
    fn a_second_absence_has_a_whole_grace_period() {
        let mut grace_periods = GracePeriods::default();
        let held = set(&[1]);
        grace_periods.update(&held, &set(&[]), Moment(0));
        grace_periods.update(&held, &held, Moment(GRACE_MILLIS - 1));
        assert_eq!(grace_periods.update(&held, &set(&[]), Moment(GRACE_MILLIS)), held);
    }

    #[test]
    fn an_element_that_was_never_held_has_no_grace_period() {
        let mut grace_periods = GracePeriods::default();
        grace_periods.update(&set(&[1]), &set(&[]), Moment(0));
        assert_eq!(grace_periods.update(&set(&[]), &set(&[]), Moment(1)), set(&[]));
        assert_eq!(grace_periods.next_deadline(), None);
    }
}
