// SPDX-License-Identifier: Apache-2.0
//! Snapshots of all datapath counters, with which a test asserts that exactly the expected counters change.

use std::collections::BTreeMap;

use npl_agent::datapath::Tables;
use npl_common::reason::Reason;
use npl_common::stats::MappingStats;

/// One counter and its increase: `("61000/tcp request_packets", 1)` or `("no_mapping", 1)`.
pub(crate) type Change = (String, u64);

/// Every counter's value, by name.
#[derive(Debug)]
pub(crate) struct Counters(BTreeMap<String, u64>);

impl Counters {
    pub(crate) fn read(tables: &Tables) -> Self {
        let mut all = BTreeMap::new();
        for (reason, count) in tables.reasons().unwrap() {
            all.insert(reason.name().to_owned(), count);
        }
        for record in tables.records().unwrap() {
            let mapping = format!("{}/{}", record.frontend.node_port, record.frontend.protocol);
            for (name, value) in fields(&record.stats) {
                all.insert(format!("{mapping} {name}"), value);
            }
        }
        Self(all)
    }

    /// Returns the counters that increased, ordered by name. Panics if a counter decreased.
    pub(crate) fn changes_since(&self, before: &Self) -> Vec<Change> {
        let changed = self.0.iter().map(|(name, now)| {
            let then = before.0.get(name).copied().unwrap_or_default();
            (name.clone(), now.checked_sub(then).unwrap_or_else(|| panic!("{name} went from {then} to {now}")))
        });
        changed.filter(|(_, by)| *by > 0).collect()
    }
}

/// Returns the counter change that one packet with this reason causes.
pub(crate) fn reason(reason: Reason) -> Vec<Change> {
    vec![(reason.name().to_owned(), 1)]
}

/// Returns the counter changes that one translated request of `bytes` bytes causes.
pub(crate) fn request(mapping: &str, bytes: usize) -> Vec<Change> {
    named(mapping, &[("request_bytes", bytes as u64), ("request_packets", 1)])
}

/// Does the same as [`request`], for the first packet of a flow, which creates the conntrack entry.
pub(crate) fn first_request(mapping: &str, bytes: usize) -> Vec<Change> {
    named(mapping, &[("new_flows", 1), ("request_bytes", bytes as u64), ("request_packets", 1)])
}

/// Does the same as [`request`], for the request that completes the handshake and establishes the flow.
pub(crate) fn establishing_request(mapping: &str, bytes: usize) -> Vec<Change> {
    named(mapping, &[("established_flows", 1), ("request_bytes", bytes as u64), ("request_packets", 1)])
}

/// Returns the counter changes that one translated reply of `bytes` bytes causes.
pub(crate) fn reply(mapping: &str, bytes: usize) -> Vec<Change> {
    named(mapping, &[("reply_bytes", bytes as u64), ("reply_packets", 1)])
}

/// Does the same as [`reply`], for the reply that establishes the flow.
pub(crate) fn establishing_reply(mapping: &str, bytes: usize) -> Vec<Change> {
    named(mapping, &[("established_flows", 1), ("reply_bytes", bytes as u64), ("reply_packets", 1)])
}

/// Returns both lists of changes, merged and ordered by name.
pub(crate) fn and(mut some: Vec<Change>, more: Vec<Change>) -> Vec<Change> {
    some.extend(more);
    some.sort();
    some
}

fn named(mapping: &str, counters: &[(&str, u64)]) -> Vec<Change> {
    counters.iter().map(|(name, by)| (format!("{mapping} {name}"), *by)).collect()
}

/// Returns the names and values of a mapping's counters.
pub(crate) fn fields(stats: &MappingStats) -> [(&'static str, u64); 6] {
    let MappingStats { request_packets, request_bytes, reply_packets, reply_bytes, new_flows, established_flows } =
        *stats;
    [
        ("request_packets", request_packets),
        ("request_bytes", request_bytes),
        ("reply_packets", reply_packets),
        ("reply_bytes", reply_bytes),
        ("new_flows", new_flows),
        ("established_flows", established_flows),
    ]
}
