// SPDX-License-Identifier: Apache-2.0
//! Repairs: kernel objects of this agent that other software removed or changed, and that the agent restores.
//!
//! An object counts only if this agent process has created or adopted the object. The first attachment of a program, a
//! wanted change and an upgrade are no repairs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    mem,
    sync::{Arc, Mutex, PoisonError},
};

use super::model::Moment;

/// The time in milliseconds in which at most [`MOST_LINES`] repairs of one kind of object are logged.
const INTERVAL: u64 = 60_000;
/// The maximum number of log lines per kind of object in [`INTERVAL`].
const MOST_LINES: u64 = 20;

/// The kind of a repaired kernel object; also the value of the metric label `object`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RepairedObject {
    /// A BPF link of a TC program (since Linux 6.6).
    TcxLink,
    /// A filter of a TC program (before Linux 6.6).
    Filter,
    /// The clsact qdisc of the filters (before Linux 6.6).
    Qdisc,
    /// The BPF link of the XDP program.
    XdpLink,
    /// A BPF link of a socket program on the cgroup of the local clients.
    CgroupLink,
    /// An element of a map that only the agent writes.
    MapEntry,
    /// The pin of a map or program.
    Pin,
    /// The nftables table `inet npl`.
    NftTable,
}

impl RepairedObject {
    /// All kinds of objects.
    pub const ALL: [Self; 8] = [
        Self::TcxLink,
        Self::Filter,
        Self::Qdisc,
        Self::XdpLink,
        Self::CgroupLink,
        Self::MapEntry,
        Self::Pin,
        Self::NftTable,
    ];

    /// The value of the metric label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TcxLink => "tcx_link",
            Self::Filter => "filter",
            Self::Qdisc => "qdisc",
            Self::XdpLink => "xdp_link",
            Self::CgroupLink => "cgroup_link",
            Self::MapEntry => "map_entry",
            Self::Pin => "pin",
            Self::NftTable => "nft_table",
        }
    }
}

/// A repaired kernel object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repair {
    /// The kind of the object.
    pub object: RepairedObject,
    /// The object's name for the log, for example a hook and its device.
    pub name: String,
}

/// The repairs that were not logged and counted yet. Clones share the same repairs: the code that restores an object
/// records the repair, and the main loop takes it.
#[derive(Debug, Clone, Default)]
pub struct RepairJournal(Arc<Mutex<Vec<Repair>>>);

impl RepairJournal {
    /// Records that an object was restored.
    pub fn record(&self, object: RepairedObject, name: impl Display) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Repair { object, name: name.to_string() });
    }

    /// Records each entry of a map that differs from the entry that the agent has written. `name` returns an entry's name
    /// for the log.
    pub fn record_changes<K: Ord, V: PartialEq>(
        &self,
        written: &BTreeMap<K, V>,
        found: &BTreeMap<K, V>,
        name: impl Fn(&K) -> String,
    ) {
        let keys: BTreeSet<&K> = written.keys().chain(found.keys()).collect();
        for key in keys.into_iter().filter(|key| written.get(*key) != found.get(*key)) {
            self.record(RepairedObject::MapEntry, name(key));
        }
    }

    /// Returns the repairs since the last call.
    pub fn take(&self) -> Vec<Repair> {
        mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Limits the log lines about repairs: other software may remove the same object again and again, or all elements of a
/// map at once.
#[derive(Debug, Clone, Default)]
pub struct RepairLimit {
    /// For each kind of object: the begin of the current interval, the number of lines that were logged in it, and the
    /// number of lines that were left out since the last line.
    intervals: BTreeMap<RepairedObject, (Moment, u64, u64)>,
}

impl RepairLimit {
    /// Asks whether the repair of an object may be logged. Returns the number of repairs of this kind of object that
    /// were not logged since the last logged one; `None` if the limit is reached.
    pub fn acquire(&mut self, object: RepairedObject, now: Moment) -> Option<u64> {
        let (begin, lines, left_out) = self.intervals.entry(object).or_insert((now, 0, 0));
        if now >= begin.plus(INTERVAL) {
            (*begin, *lines) = (now, 0);
        }
        if *lines == MOST_LINES {
            *left_out += 1;
            return None;
        }
        *lines += 1;
        Some(mem::take(left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_repair_is_taken_once() {
        let journal = RepairJournal::default();
        let clone = journal.clone();
        clone.record(RepairedObject::Pin, "npl_config");
        assert_eq!(journal.take(), [Repair { object: RepairedObject::Pin, name: "npl_config".to_owned() }]);
        assert_eq!(journal.take(), []);
    }

    #[test]
    fn removed_changed_and_added_entries_are_recorded_once_each() {
        let journal = RepairJournal::default();
        let written = BTreeMap::from([(1, 'a'), (2, 'b'), (3, 'c')]);
        let found = BTreeMap::from([(1, 'a'), (2, 'x'), (4, 'd')]);
        journal.record_changes(&written, &found, |key| format!("entry {key}"));
        let names: Vec<String> = journal.take().into_iter().map(|repair| repair.name).collect();
        assert_eq!(names, ["entry 2", "entry 3", "entry 4"]);
    }

    #[test]
    fn each_kind_of_object_has_a_limit_of_log_lines_per_minute() {
        let mut limit = RepairLimit::default();
        for _ in 0..MOST_LINES {
            assert_eq!(limit.acquire(RepairedObject::Filter, Moment(1)), Some(0));
        }
        assert_eq!(limit.acquire(RepairedObject::Filter, Moment(2)), None);
        assert_eq!(limit.acquire(RepairedObject::Qdisc, Moment(2)), Some(0), "each kind has its own limit");
        assert_eq!(limit.acquire(RepairedObject::Filter, Moment(INTERVAL)), None);
        assert_eq!(limit.acquire(RepairedObject::Filter, Moment(1 + INTERVAL)), Some(2));
        assert_eq!(limit.acquire(RepairedObject::Filter, Moment(2 + INTERVAL)), Some(0));
    }

    #[test]
    fn all_kinds_of_objects_have_different_labels() {
        let labels: BTreeSet<_> = RepairedObject::ALL.iter().map(|object| object.as_str()).collect();
        assert_eq!(labels.len(), RepairedObject::ALL.len());
    }
}
