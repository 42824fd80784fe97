// SPDX-License-Identifier: Apache-2.0
//! Which problems users are told of, and when: soon, again while they last, and never twice in a breath.

use std::collections::{BTreeMap, BTreeSet};

use super::problem::{AffectedObject, Problem};
use crate::core::model::Moment;

/// What passes by itself sooner, as when a Service changes in two steps, is not worth a word.
const SETTLE_MILLIS: u64 = 1_000;
/// Nothing is said about the same thing sooner than this, whatever comes and goes.
const QUIET_MILLIS: u64 = 60_000;
/// Half of what a Kubernetes Event lives: whoever looks later still finds what lasts.
const REFRESH_MILLIS: u64 = 30 * 60_000;

/// One thing to tell: all that is wrong with an object for the same reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The object that a user would look at.
    pub subject: AffectedObject,
    /// [`Problem::reason`].
    pub reason: &'static str,
    /// One sentence: what is wrong, and what to do.
    pub note: String,
}

impl Report {
    /// The same for the same words about the same object, in every agent and after every restart: FNV-1a.
    pub fn mark(&self) -> u64 {
        let object = match &self.subject {
            AffectedObject::Pod(key, uid) => format!("pod {key} {uid}"),
            AffectedObject::Service(key, uid) => format!("service {key} {uid}"),
        };
        let text = format!("{object} {} {}", self.reason, self.note);
        text.bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }
}

/// What is wrong now, and what was told of it.
///
/// What nobody was told of is forgotten when it is over, and the rest a little later, so that this never holds much
/// more than there are problems.
#[derive(Debug, Default)]
pub struct Reports {
    entries: BTreeMap<(AffectedObject, &'static str), Entry>,
}

#[derive(Debug)]
struct Entry {
    /// What is wrong; nothing when it is over.
    note: Option<String>,
    reported: Option<Moment>,
    /// When to tell it next.
    due: Moment,
}

impl Entry {
    fn is_over(&self, now: Moment) -> bool {
        self.note.is_none() && self.reported.is_none_or(|at| at.plus(QUIET_MILLIS) <= now)
    }
}

impl Reports {
    /// Takes in everything that is wrong at this moment.
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
            let note = if count > 1 { format!("{first} ({} more like this)", count - 1) } else { first };
            let entry = self.entries.entry(key).or_insert(Entry { note: None, reported: None, due: now });
            if entry.note.as_ref() != Some(&note) {
                let quiet_until = entry.reported.map(|at| at.plus(QUIET_MILLIS));
                entry.due = quiet_until.unwrap_or_default().max(now.plus(SETTLE_MILLIS));
                entry.note = Some(note);
            }
        }
        self.entries.retain(|_, entry| !entry.is_over(now));
    }

    /// When there is something to tell.
    pub fn next_due(&self) -> Option<Moment> {
        self.entries.values().filter(|entry| entry.note.is_some()).map(|entry| entry.due).min()
    }

    /// The next thing to tell, if it is time. It is taken to be told, unless [`Self::record_failure`] says otherwise.
    pub fn take_due(&mut self, now: Moment) -> Option<Report> {
        let due = self.entries.iter_mut().filter(|(_, entry)| entry.note.is_some() && entry.due <= now);
        let ((subject, reason), entry) = due.min_by_key(|(_, entry)| entry.due)?;
        entry.reported = Some(now);
        entry.due = now.plus(REFRESH_MILLIS);
        Some(Report { subject: subject.clone(), reason, note: entry.note.clone()? })
    }

    /// Takes in that nobody heard.
    pub fn record_failure(&mut self, report: &Report, now: Moment) {
        if let Some(entry) = self.entries.get_mut(&(report.subject.clone(), report.reason)) {
            entry.due = now.plus(QUIET_MILLIS);
        }
    }
}

/// Which problems are worth a line of the log: each as it comes, and one that comes and goes once a minute.
#[derive(Debug, Default)]
pub struct Warnings {
    current: BTreeSet<Problem>,
    given: BTreeMap<(AffectedObject, &'static str), Moment>,
}

impl Warnings {
    /// Takes in everything that is wrong at this moment and says what to warn of.
    pub fn observe(&mut self, problems: &[Problem], now: Moment) -> Vec<Problem> {
        self.given.retain(|_, at| at.plus(QUIET_MILLIS) > now);
        let subject = |problem: &Problem| (problem.subject.clone(), problem.reason());
        let is_new =
            |problem: &&Problem| !self.current.contains(problem) && !self.given.contains_key(&subject(problem));
        let new: Vec<_> = problems.iter().filter(is_new).cloned().collect();
        self.given.extend(new.iter().map(|problem| (subject(problem), now)));
        self.current = problems.iter().cloned().collect();
        new
    }
}

#[cfg(test)]
#[path = "../tests/report.rs"]
mod tests;
