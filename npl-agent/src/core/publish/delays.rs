// SPDX-License-Identifier: Apache-2.0
//! Measures publication: the time from the change of a Pod, a Service or the Node that alters a Pod's annotation to the API
//! server's confirmation of the annotation.

use std::collections::{BTreeMap, BTreeSet};

use crate::core::model::PodKey;

/// The Pods whose annotation may lack a change, each with the time of the first such change. `T` is a time of the caller's
/// clock.
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
    /// Records a change of these Pods. An earlier change of a Pod that is not confirmed yet keeps its time.
    pub fn begin(&mut self, pods: &BTreeSet<PodKey>, now: T) {
        for pod in pods {
            self.since.entry(pod.clone()).or_insert(now);
        }
    }

    /// Forgets the Pods whose annotation lacks nothing, or cannot be completed for now.
    pub fn retain(&mut self, is_awaited: impl Fn(&PodKey) -> bool) {
        self.since.retain(|pod, _| is_awaited(pod));
    }

    /// The time of the first change that this confirmation of the Pod's annotation contains; `None` if it is not known,
    /// as for a repair.
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
