// SPDX-License-Identifier: Apache-2.0
//! Combines the mappings in the kernel's maps with the node ports in the agent's state.

use std::{collections::BTreeMap, time::Duration};

use npl_common::stats::MappingStats;
use serde::Serialize;

use crate::{
    core::{
        model::{Frontend, sources::Sources},
        view::{AgentView, NodePortView, PortState},
    },
    datapath::tables::MappingRecord,
};

/// A row of the output: one node port. The counters count from the creation of the mapping. If no agent runs, names and
/// states are absent. If the kernel has no mapping of the node port, the counters are 0.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct MappingRow {
    pub(in crate::cli) node_port: u16,
    pub(in crate::cli) protocol: &'static str,
    pub(in crate::cli) family: &'static str,
    pub(in crate::cli) namespace: Option<String>,
    pub(in crate::cli) pod: Option<String>,
    pub(in crate::cli) services: Vec<String>,
    pub(in crate::cli) state: Option<PortState>,
    /// Whether the kernel has a mapping of the node port.
    pub(in crate::cli) in_kernel: bool,
    pub(in crate::cli) pod_ip: Option<String>,
    pub(in crate::cli) pod_port: Option<u16>,
    /// Time since the agent allocated the node port.
    pub(in crate::cli) age_millis: Option<u64>,
    /// The running agent's uptime, if an earlier agent allocated the node port. The exact age is then unknown, but
    /// exceeds this time.
    #[serde(skip)]
    pub(in crate::cli) older_than_millis: Option<u64>,
    pub(in crate::cli) ends_in_millis: Option<u64>,
    /// Whether the mapping has a list of allowed sources.
    pub(in crate::cli) restricted: bool,
    /// The allowed source ranges in CIDR notation; empty if the mapping is not restricted, or if no source is allowed.
    pub(in crate::cli) allowed_sources: Vec<String>,
    pub(in crate::cli) request_packets: u64,
    pub(in crate::cli) request_bytes: u64,
    pub(in crate::cli) reply_packets: u64,
    pub(in crate::cli) reply_bytes: u64,
    pub(in crate::cli) new_flows: u64,
    pub(in crate::cli) established_flows: u64,
    /// Request packets per second since the previous reading of the counters; absent in the first reading.
    pub(in crate::cli) request_packets_per_second: Option<f64>,
    pub(in crate::cli) reply_packets_per_second: Option<f64>,
    pub(in crate::cli) new_flows_per_second: Option<f64>,
}

/// The packets and new flows per second of a mapping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::cli) struct Rates {
    requests: f64,
    replies: f64,
    new_flows: f64,
}

impl Rates {
    /// Computes packets and new flows per second from two readings of a mapping's counters.
    fn between(former: &MappingStats, current: &MappingStats, elapsed: Duration) -> Self {
        let rate = |former: u64, current: u64| crate::cli::rate(current.saturating_sub(former), elapsed);
        Self {
            requests: rate(former.request_packets, current.request_packets),
            replies: rate(former.reply_packets, current.reply_packets),
            new_flows: rate(former.new_flows, current.new_flows),
        }
    }
}

/// Computes packets and new flows per second of each mapping that both readings contain.
pub(in crate::cli) fn rates(
    former: &[MappingRecord],
    current: &[MappingRecord],
    elapsed: Duration,
) -> BTreeMap<Frontend, Rates> {
    let former: BTreeMap<Frontend, &MappingStats> =
        former.iter().map(|record| (record.frontend, &record.stats)).collect();
    let rate = |record: &MappingRecord| {
        Some((record.frontend, Rates::between(former.get(&record.frontend)?, &record.stats, elapsed)))
    };
    current.iter().filter_map(rate).collect()
}

/// The conditions that a row must meet to be shown. A condition that is absent admits every row.
#[derive(Debug, Default)]
pub(in crate::cli) struct Filter<'a> {
    pub(in crate::cli) namespace: Option<&'a str>,
    pub(in crate::cli) pod: Option<&'a str>,
    pub(in crate::cli) service: Option<&'a str>,
    pub(in crate::cli) node_port: Option<u16>,
    pub(in crate::cli) states: &'a [PortState],
    /// Whether to also show node ports without a mapping in the kernel: host ports, and node ports in quarantine.
    pub(in crate::cli) all: bool,
}

impl Filter<'_> {
    fn admits(&self, row: &MappingRow) -> bool {
        let is_state = match row.state {
            Some(state) if !self.states.is_empty() => self.states.contains(&state),
            Some(PortState::Quarantined | PortState::HostPort) => self.all || row.in_kernel,
            Some(PortState::Reserved | PortState::Live | PortState::Published | PortState::Draining) | None => {
                self.states.is_empty()
            }
        };
        is_state
            && self.namespace.is_none_or(|namespace| row.namespace.as_deref() == Some(namespace))
            && self.pod.is_none_or(|start| row.pod.as_ref().is_some_and(|pod| pod.starts_with(start)))
            && self.service.is_none_or(|service| row.services.iter().any(|name| name == service))
            && self.node_port.is_none_or(|node_port| row.node_port == node_port)
    }
}

/// Returns the rows that `filter` admits, sorted by node port: one row for each node port in the kernel's maps or in
/// the agent's state.
pub(in crate::cli) fn rows(
    records: &[MappingRecord],
    agent: Option<&AgentView>,
    filter: &Filter<'_>,
    rates: Option<&BTreeMap<Frontend, Rates>>,
) -> Vec<MappingRow> {
    let records: BTreeMap<Frontend, &MappingRecord> = records.iter().map(|record| (record.frontend, record)).collect();
    let uptime = agent.map(|agent| agent.uptime_millis);
    let views = agent.map(|agent| agent.node_ports.as_slice()).unwrap_or_default();
    let named = views.iter().map(|view| {
        // A host port has no mapping. If the kernel has a mapping with the number of a host port, the mapping belongs
        // to another Pod, and is shown only in that Pod's row.
        let record = records.get(&view.frontend).filter(|_| view.state != PortState::HostPort);
        row(view.frontend, record.copied(), Some(view), uptime)
    });
    let is_known = |frontend: &Frontend| views.iter().any(|view| view.frontend == *frontend);
    let unnamed = records.iter().filter(|(frontend, _)| !is_known(frontend));
    let mut rows: Vec<_> =
        named.chain(unnamed.map(|(frontend, record)| row(*frontend, Some(record), None, None))).collect();
    for row in &mut rows {
        let rate = rates.and_then(|rates| rates.get(&row.frontend));
        row.row.request_packets_per_second = rate.map(|rate| rate.requests);
        row.row.reply_packets_per_second = rate.map(|rate| rate.replies);
        row.row.new_flows_per_second = rate.map(|rate| rate.new_flows);
    }
    rows.sort_by_key(|row| (row.frontend.node_port, row.frontend.protocol, row.frontend.family));
    rows.into_iter().map(|row| row.row).filter(|row| filter.admits(row)).collect()
}

struct Keyed {
    frontend: Frontend,
    row: MappingRow,
}

fn row(
    frontend: Frontend,
    record: Option<&MappingRecord>,
    view: Option<&NodePortView>,
    uptime_millis: Option<u64>,
) -> Keyed {
    let stats = record.map_or(MappingStats::ZERO, |record| record.stats);
    let sources = record.map(|record| &record.sources);
    let pod_ip = record.map(|record| record.backend.pod_ip).or_else(|| view?.pod_ip);
    let pod_port = record.map(|record| record.backend.pod_port).or_else(|| view?.pod_port);
    let age_millis = view.and_then(|view| view.age_millis);
    let is_older = view.is_some_and(|view| view.age_millis.is_none() && view.state != PortState::HostPort);
    let row = MappingRow {
        node_port: frontend.node_port.0,
        protocol: frontend.protocol.as_str(),
        family: frontend.family.as_str(),
        namespace: view.and_then(|view| view.namespace.clone()),
        pod: view.and_then(|view| view.pod.clone()),
        services: view.map(|view| view.services.clone()).unwrap_or_default(),
        state: view.map(|view| view.state),
        in_kernel: record.is_some(),
        pod_ip: pod_ip.map(|ip| ip.to_string()),
        pod_port: pod_port.map(|port| port.0),
        age_millis,
        older_than_millis: uptime_millis.filter(|_| is_older),
        ends_in_millis: view.and_then(|view| view.ends_in_millis),
        restricted: sources.is_some_and(Sources::is_restricted),
        allowed_sources: sources.map(|it| it.ranges().map(|range| range.to_string()).collect()).unwrap_or_default(),
        request_packets: stats.request_packets,
        request_bytes: stats.request_bytes,
        reply_packets: stats.reply_packets,
        reply_bytes: stats.reply_bytes,
        new_flows: stats.new_flows,
        established_flows: stats.established_flows,
        request_packets_per_second: None,
        reply_packets_per_second: None,
        new_flows_per_second: None,
    };
    Keyed { frontend, row }
}

/// Formats the Pod's address and port.
pub(in crate::cli) fn target(row: &MappingRow) -> String {
    match (&row.pod_ip, row.pod_port) {
        (Some(ip), Some(port)) if ip.contains(':') => format!("[{ip}]:{port}"),
        (Some(ip), Some(port)) => format!("{ip}:{port}"),
        (None, Some(port)) => format!("-:{port}"),
        (_, None) => "-".to_owned(),
    }
}

/// Formats the allowed sources of a mapping. Of a long list, only the first source range is shown, so that the table
/// stays readable.
pub(in crate::cli) fn sources(row: &MappingRow) -> String {
    if !row.restricted {
        return "any".to_owned();
    }
    match row.allowed_sources.as_slice() {
        [] => "none".to_owned(),
        [one] => one.clone(),
        [one, others @ ..] => format!("{one} and {} more", others.len()),
    }
}

/// Formats the age of a node port. If an earlier agent allocated the port, formats `>` and the running agent's uptime.
pub(in crate::cli) fn age(row: &MappingRow) -> String {
    match (row.age_millis, row.older_than_millis) {
        (Some(age), _) => duration(age),
        (None, Some(uptime)) => format!(">{}", duration(uptime)),
        (None, None) => "-".to_owned(),
    }
}

/// Formats a duration in its two largest units, as `kubectl` shows ages.
pub(in crate::cli) fn duration(millis: u64) -> String {
    crate::cli::duration(millis)
}

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;
