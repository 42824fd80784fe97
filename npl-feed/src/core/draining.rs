// SPDX-License-Identifier: Apache-2.0
//! Indexes the withdrawn entries that are draining, by target and by the end of the drain. With this index, a change of
//! one Pod visits only the affected draining Pods, even while many thousand Pods drain.

use std::collections::{BTreeMap, BTreeSet};

use npl_agent::core::model::PodKey;

use super::{
    entries::{Target, Withdrawn, target},
    work::{self, Operation},
};

/// The Pods with withdrawn entries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Draining {
    /// By target: the Pod that has the withdrawn entry. A target has at most one such Pod: an entry drains only while
    /// no Pod claims the entry's target.
    by_target: BTreeMap<Target, PodKey>,
    by_end: BTreeSet<(u64, PodKey)>,
}

impl Draining {
    /// Adds the withdrawn entries of a Pod.
    pub(super) fn add(&mut self, pod: &PodKey, withdrawn: &[Withdrawn]) {
        for Withdrawn { entry, until } in withdrawn {
            self.by_target.insert(target(entry), pod.clone());
            self.by_end.insert((*until, pod.clone()));
        }
    }

    /// Removes the withdrawn entries of a Pod, which must be the same as in the last call of [`Self::add`].
    pub(super) fn remove(&mut self, pod: &PodKey, withdrawn: &[Withdrawn]) {
        for Withdrawn { entry, until } in withdrawn {
            self.by_target.remove(&target(entry));
            self.by_end.remove(&(*until, pod.clone()));
        }
    }

    /// Returns the time at which the next drain ends.
    pub(super) fn next_end(&self) -> Option<u64> {
        self.by_end.first().map(|(until, _)| *until)
    }

    /// Returns the Pods that have a withdrawn entry whose drain is over.
    pub(super) fn ended(&self, now: u64) -> BTreeSet<PodKey> {
        let ended = self.by_end.iter().take_while(|(until, _)| *until <= now);
        ended.map(|(_, pod)| pod.clone()).inspect(|_| work::count(Operation::Visit, 1)).collect()
    }

    /// Returns the Pods with a withdrawn entry that has one of these targets.
    pub(super) fn at(&self, targets: &BTreeSet<Target>) -> BTreeSet<PodKey> {
        targets.iter().filter_map(|target| self.by_target.get(target)).cloned().collect()
    }
}
