// SPDX-License-Identifier: Apache-2.0
//! Measures publication delays. A delay begins with a change of a Pod, a Service or the Node after which a Pod needs a
//! different annotation. The delay ends when the API server confirms the annotation.

use std::collections::{BTreeMap, BTreeSet};

use crate::core::model::PodKey;

/// The Pods whose annotation may not reflect all changes yet, each with the time of the first change that the
/// annotation does not reflect. `T` is a time of the caller's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishDelays<T> {
    since: BTreeMap<PodKey, T>,
}

impl<T> Default for PublishDelays<T> {
    fn default() -> Self {
        Self { since: BTreeMap::new() }
    }
}

impl<T: Copy> PublishDelays<T> {
    /// Records that a change at `now` affects these Pods. If a Pod has an earlier change that is not confirmed yet, the
    /// time of the earlier change stays.
    pub fn begin(&mut self, pods: &BTreeSet<PodKey>, now: T) {
        for pod in pods {
            self.since.entry(pod.clone()).or_insert(now);
        }
    }

    /// Ends the delay of each Pod for which `is_awaited` returns false: the annotation of such a Pod reflects all
    /// changes, or cannot be completed at present.
    pub fn retain(&mut self, is_awaited: impl Fn(&PodKey) -> bool) {
        self.since.retain(|pod, _| is_awaited(pod));
    }

    /// Ends the delay of a Pod. Returns the time of the first change that the confirmed annotation reflects; `None` if
    /// there was no change, for example because the agent repaired the annotation.
    pub fn confirm(&mut self, pod: &PodKey) -> Option<T> {
        self.since.remove(pod)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_unconfirmed_change_counts() {
        let (a, b) = (PodKey::new("shop", "a"), PodKey::new("shop", "b"));
        let mut delays = PublishDelays::default();
        delays.begin(&BTreeSet::from([a.clone(), b.clone()]), 1);
        delays.begin(&BTreeSet::from([a.clone()]), 2);
        delays.retain(|pod| *pod == a);
        assert_eq!((delays.confirm(&a), delays.confirm(&a), delays.confirm(&b)), (Some(1), None, None));
        delays.begin(&BTreeSet::from([a.clone()]), 3);
        assert_eq!(delays.confirm(&a), Some(3));
    }
}
