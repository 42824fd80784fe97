// SPDX-License-Identifier: Apache-2.0
//! Delays the agent's writes to a Pod's annotation that another writer also writes. If both writers immediately
//! reverted each other's value, both writers would load the API server, and load balancers would alternate between both
//! values.

use std::collections::BTreeMap;

use crate::core::{
    model::{Moment, Pod, PodKey, PodUid},
    op::RetryKey,
    publish::problem::{AffectedObject, Cause, Problem},
    state::PlannerState,
};

/// The number of times that the agent immediately overwrites a value that another writer has set: a person may edit the
/// annotation a few times.
const AT_ONCE: u32 = 3;
/// The delay in milliseconds before the agent overwrites a value of another writer, after the agent has overwritten
/// [`AT_ONCE`] values immediately. The delay doubles with every further value, up to [`LONGEST_MILLIS`].
const FIRST_MILLIS: u64 = 5_000;
/// The minimum delay in milliseconds before the next write if the API server's answer to a write does not show the
/// agent's value.
const UNSTORED_MILLIS: u64 = 5_000;
const LONGEST_MILLIS: u64 = 60_000;
/// The time in milliseconds after the last value of another writer at which a contest ends.
const OVER_MILLIS: u64 = 600_000;

/// The Pods whose annotation a writer other than the agent has changed within the last ten minutes.
#[derive(Debug, Default)]
pub(in crate::core) struct Contests(BTreeMap<PodUid, Contest>);

#[derive(Debug)]
struct Contest {
    pod: PodKey,
    /// The number of times that another writer has replaced the agent's value of the annotation.
    overwrites: u32,
    /// The field manager that wrote the last value, if the API server names one.
    manager: Option<String>,
    /// The time of the pass that handled the last value that another writer set; `None` while no pass has handled that
    /// value.
    noticed: Option<Moment>,
}

impl Contest {
    const fn is_reported(&self) -> bool {
        self.overwrites > AT_ONCE
    }

    fn delay_millis(&self) -> u64 {
        let doublings = self.overwrites.saturating_sub(AT_ONCE + 1).min(10);
        if self.is_reported() { (FIRST_MILLIS << doublings).min(LONGEST_MILLIS) } else { 0 }
    }
}

impl Contests {
    /// Records that another writer has replaced the agent's value of the Pod's annotation.
    pub(in crate::core) fn record(&mut self, pod: &Pod) {
        let new = || Contest { pod: pod.key.clone(), overwrites: 0, manager: None, noticed: None };
        let contest = self.0.entry(pod.uid.clone()).or_insert_with(new);
        contest.overwrites = contest.overwrites.saturating_add(1);
        contest.noticed = None;
        if let Some(manager) = &pod.annotation_manager {
            contest.manager = Some(manager.to_string());
        }
    }

    /// Returns how long the agent waits before it writes its value again. `None` means that the agent need not wait, or
    /// that no writer has replaced the agent's value since the last call of this function.
    fn take_delay(&mut self, uid: &PodUid, now: Moment) -> Option<u64> {
        let contest = self.0.get_mut(uid).filter(|contest| contest.noticed.is_none())?;
        contest.noticed = Some(now);
        Some(contest.delay_millis()).filter(|delay| *delay > 0)
    }

    pub(in crate::core) fn remove(&mut self, uid: &PodUid) {
        self.0.remove(uid);
    }

    /// Ends the contests in which no writer other than the agent has written for [`OVER_MILLIS`].
    pub(in crate::core) fn expire(&mut self, now: Moment) {
        self.0.retain(|_, contest| contest.noticed.is_none_or(|at| at.plus(OVER_MILLIS) > now));
    }

    pub(in crate::core) fn problems(&self) -> impl Iterator<Item = Problem> {
        self.0.iter().filter(|(_, contest)| contest.is_reported()).map(|(uid, contest)| Problem {
            subject: AffectedObject::Pod(contest.pod.clone(), uid.clone()),
            cause: Cause::AnnotationContested { manager: contest.manager.clone() },
        })
    }
}

impl PlannerState {
    /// Records that, according to a watch event, another writer has replaced the correct annotation of a Pod. An event
    /// during a write of the agent does not count, because the event may show the value that the agent writes.
    pub(in crate::core) fn record_overwrite(&mut self, pod: &Pod) {
        let Some(known) = self.snapshot.pod(&pod.key) else { return };
        let is_newer_value = known.uid == pod.uid
            && known.resource_version < pod.resource_version
            && known.annotation != pod.annotation
            && !self.writes.contains_key(&pod.uid);
        if is_newer_value && self.has_right_annotation(known, &self.entries(known)) {
            self.contests.record(pod);
        }
    }

    /// Delays the agent's next write to a Pod whose annotation another writer has just changed.
    pub(in crate::core) fn delay_contested_write(&mut self, key: &PodKey, now: Moment) {
        let Some(uid) = self.snapshot.pod(key).map(|pod| pod.uid.clone()) else { return };
        if let Some(delay) = self.contests.take_delay(&uid, now) {
            self.retries.insert(RetryKey::WritePod(uid), now.plus(delay));
        }
    }

    /// Delays the agent's next write to a Pod if the annotation in the API server's answer to a write differs from the
    /// agent's value.
    pub(in crate::core) fn delay_unstored_write(&mut self, key: &PodKey, uid: &PodUid, now: Moment) {
        let Some(pod) = self.snapshot.pod(key).filter(|pod| pod.uid == *uid) else { return };
        self.contests.record(pod);
        let delay = self.contests.take_delay(&pod.uid, now).unwrap_or_default().max(UNSTORED_MILLIS);
        self.retries.insert(RetryKey::WritePod(pod.uid.clone()), now.plus(delay));
    }
}
