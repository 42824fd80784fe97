// SPDX-License-Identifier: Apache-2.0
//! Decides which problems are reported by Events, and when: after a short delay, again while the problem lasts, and at
//! most once a minute.
//!
//! The agents of many Nodes can find the same problem of a Service at the same time, and then report the problem by the
//! same Event. Each agent therefore waits for a time that depends on the name of its Node, and does not write an Event
//! that another agent has written recently.

use std::collections::{BTreeMap, BTreeSet};

use super::problem::{AffectedObject, Problem};
use crate::core::model::Moment;

/// The time in milliseconds that a problem must last before an Event reports the problem. A Service that a user changes
/// in two steps causes a problem for a shorter time, and needs no Event.
pub(crate) const SETTLE_MILLIS: u64 = 1_000;
/// The minimum time in milliseconds between two Events about the same object with the same reason.
pub(crate) const QUIET_MILLIS: u64 = 60_000;
/// The time in milliseconds after which the Event of a lasting problem is sent again: half the default lifetime of a
/// Kubernetes Event, so that the problem always has an Event.
pub(crate) const REFRESH_MILLIS: u64 = 30 * 60_000;
/// The time in milliseconds over which the agents of all Nodes spread their Events about one Service: 5000 agents send
/// fewer than 100 Events per second.
pub(crate) const SPREAD_MILLIS: u64 = 60_000;
/// An agent increments the count of a Service's Event only if the last write to the Event, by any agent, is at least
/// this many milliseconds old. Otherwise, the agent tries again after [`REFRESH_MILLIS`]. The last write is then less
/// than 45 min old, so the Event still exists.
pub(crate) const FRESH_MILLIS: u64 = REFRESH_MILLIS / 2;

/// The content of one Event: all problems of an object with the same reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The object that the Event is about.
    pub subject: AffectedObject,
    /// The reason of the Event: [`Problem::reason`].
    pub reason: &'static str,
    /// The note of the Event: the problem and its remedy.
    pub note: String,
}

impl Report {
    /// Returns a hash (FNV-1a) of object, reason and note, which is equal in every agent and after a restart.
    pub fn mark(&self) -> u64 {
        let object = match &self.subject {
            AffectedObject::Pod(key, uid) => format!("pod {key} {uid}"),
            AffectedObject::Service(key, uid) => format!("service {key} {uid}"),
        };
        fnv_1a(&format!("{object} {} {}", self.reason, self.note))
    }

    /// Whether to increment the count of an existing Event. `age` is the time in milliseconds since an agent last wrote
    /// the Event; `None` if the Event does not contain this time. The Event of a Pod is always incremented, because
    /// only one agent reports the problems of a Pod.
    pub fn increments_event(&self, age: Option<u64>) -> bool {
        matches!(self.subject, AffectedObject::Pod(..)) || age.is_none_or(|age| age >= FRESH_MILLIS)
    }
}

fn fnv_1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The current problems, by object and reason, each with the time of its last Event.
///
/// The record of a problem is dropped when the problem has ended and its last Event, if any, is at least a minute old.
/// So the number of records stays close to the number of problems.
#[derive(Debug, Default)]
pub struct Reports {
    /// The delay in milliseconds of Events about Services.
    service_delay: u64,
    entries: BTreeMap<(AffectedObject, &'static str), Entry>,
}

#[derive(Debug)]
struct Entry {
    /// The text of the Event; `None` once the problem is solved.
    note: Option<String>,
    reported: Option<Moment>,
    /// The time at which an Event about the problem is due.
    due: Moment,
}

impl Entry {
    fn is_over(&self, now: Moment) -> bool {
        self.note.is_none() && self.reported.is_none_or(|at| at.plus(QUIET_MILLIS) <= now)
    }
}

impl Reports {
    /// Creates the reports of the agent of this Node, which delays Events about Services by a time that depends on the
    /// Node's name.
    pub fn of_node(name: &str) -> Self {
        Self { service_delay: fnv_1a(name) % SPREAD_MILLIS, ..Self::default() }
    }

    /// Replaces the current problems with `problems`.
    pub fn observe(&mut self, problems: &[Problem], now: Moment) {
        let mut causes: BTreeMap<(AffectedObject, &'static str), (String, usize)> = BTreeMap::new();
        for problem in problems {
            let key = (problem.subject.clone(), problem.reason());
            causes.entry(key).or_insert_with(|| (problem.cause.to_string(), 0)).1 += 1;
        }
        for (key, entry) in &mut self.entries {
            if !causes.contains_key(key) {
                entry.note = None;
            }
        }
        for (key, (first, count)) in causes {
            let delay = if matches!(key.0, AffectedObject::Service(..)) { self.service_delay } else { 0 };
            let note = if count > 1 { format!("{first} ({} more like this)", count - 1) } else { first };
            let entry = self.entries.entry(key).or_insert(Entry { note: None, reported: None, due: now });
            if entry.note.as_ref() != Some(&note) {
                let is_refresh = entry.reported.is_some_and(|at| entry.due == at.plus(REFRESH_MILLIS));
                // A change of the text does not delay an Event that is already pending. Otherwise, a text that changes
                // often would prevent the Event.
                if entry.note.is_none() || is_refresh {
                    let quiet_until = entry.reported.map(|at| at.plus(QUIET_MILLIS)).unwrap_or_default();
                    entry.due = quiet_until.max(now.plus(SETTLE_MILLIS + delay));
                }
                entry.note = Some(note);
            }
        }
        self.entries.retain(|_, entry| !entry.is_over(now));
    }

    /// The time at which the next Event is due.
    pub fn next_due(&self) -> Option<Moment> {
        self.entries.values().filter(|entry| entry.note.is_some()).map(|entry| entry.due).min()
    }

    /// Returns the Event that has been due for the longest time, if any is due. The Event counts as sent unless the
    /// caller calls [`Self::record_failure`].
    pub fn take_due(&mut self, now: Moment) -> Option<Report> {
        let due = self.entries.iter_mut().filter(|(_, entry)| entry.note.is_some() && entry.due <= now);
        let ((subject, reason), entry) = due.min_by_key(|(_, entry)| entry.due)?;
        entry.reported = Some(now);
        entry.due = now.plus(REFRESH_MILLIS);
        Some(Report { subject: subject.clone(), reason, note: entry.note.clone()? })
    }

    /// Records that an Event could not be sent, so that the Event is due again in a minute.
    pub fn record_failure(&mut self, report: &Report, now: Moment) {
        if let Some(entry) = self.entries.get_mut(&(report.subject.clone(), report.reason)) {
            entry.due = now.plus(QUIET_MILLIS);
        }
    }
}

/// Decides which problems are logged: each problem that was absent before, but at most once a minute for the same
/// object and reason.
#[derive(Debug, Default)]
pub struct Warnings {
    current: BTreeSet<Problem>,
    given: BTreeMap<(AffectedObject, &'static str), Moment>,
}

impl Warnings {
    /// Replaces the current problems, and returns the problems to log.
    pub fn observe(&mut self, problems: &[Problem], now: Moment) -> Vec<Problem> {
        self.given.retain(|_, at| at.plus(QUIET_MILLIS) > now);
        let subject = |problem: &Problem| (problem.subject.clone(), problem.reason());
        let is_new =
            |problem: &&Problem| !self.current.contains(problem) && !self.given.contains_key(&subject(problem));
        let new: Vec<_> = problems.iter().filter(is_new).cloned().collect();
        self.given.extend(new.iter().map(|problem| (subject(problem), now)));
        // A problem that was not logged because of an earlier log line is logged later, if it lasts.
        let is_logged = |problem: &&Problem| self.current.contains(problem) || new.contains(problem);
        self.current = problems.iter().filter(is_logged).cloned().collect();
        new
    }
}

#[cfg(test)]
#[path = "../tests/report.rs"]
mod tests;
