// SPDX-License-Identifier: Apache-2.0
//! Plans the paths to node ports that `kubectl npl test` tries, and judges the observations of the test's clients.

mod drain;
mod judge;
mod probe;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
};

use serde::Serialize;

pub use self::{
    drain::{DrainEnd, Elapsed, Sent, new_connection, open_connection, withdrawal},
    judge::{PathFacts, judge, publication},
    probe::{Observation, Probe, Reply, UnknownProbe},
};
use super::{
    model::{Family, Protocol, sources::SourceRange},
    publish::annotation::Entry,
    verdict::HealthVerdict,
};

/// The length of the payload of a small request, in bytes.
pub const SMALL: usize = 64;
/// The length of the payload of a large datagram, in bytes: more than the usual MTU of 1500 bytes, but less than the
/// MTU of jumbo frames.
pub const LARGE: usize = 8_000;

/// An echo Pod of the test, with the facts by which the test judges the answers of the Pod.
#[derive(Debug, Clone, Default)]
pub struct Server {
    /// The name of the echo Pod's Node.
    pub node: String,
    /// The name of the Pod.
    pub pod: String,
    /// The name that the Pod puts into its answers. No other run of the test uses the same name.
    pub identity: String,
    /// The IP addresses of the echo Pod.
    pub pod_ips: BTreeSet<IpAddr>,
    /// The IP addresses of the client Pod on the Node of the echo Pod.
    pub client_ips: BTreeSet<IpAddr>,
    /// The IP addresses in the Node object.
    pub node_ips: BTreeSet<IpAddr>,
    /// The IP addresses of all network devices of the Node; empty if they are unknown.
    pub device_ips: BTreeSet<IpAddr>,
    /// The Node's ranges of Pod addresses; empty if the Node object names no range.
    pub pod_ranges: BTreeSet<SourceRange>,
    /// The protocols that the Node's agent maps.
    pub protocols: BTreeSet<Protocol>,
    /// Whether the Node's agent serves clients in Pods of the Node.
    pub serves_local_pods: bool,
    /// The published node ports of the Pod.
    pub entries: Vec<Entry>,
}

impl Server {
    /// The protocols and families of the node ports that the Pod's annotation must name. `service_families` contains
    /// the families of the Service.
    pub fn wanted(&self, service_families: &BTreeSet<Family>) -> BTreeSet<(Protocol, Family)> {
        let has = |ips: &BTreeSet<IpAddr>, family| ips.iter().any(|ip| Family::of(*ip) == family);
        let families = service_families.iter().copied();
        let families = families.filter(|family| has(&self.pod_ips, *family) && has(&self.node_ips, *family));
        families.flat_map(|family| self.protocols.iter().map(move |protocol| (*protocol, family))).collect()
    }

    /// The protocols and families for which the Pod's annotation names a node port.
    pub fn published(&self) -> BTreeSet<(Protocol, Family)> {
        self.entries.iter().map(|entry| (entry.protocol, Family::of(entry.node_ip))).collect()
    }
}

/// The place where the client of a path runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Client {
    /// The workstation on which the test runs.
    Outside,
    /// A client Pod on a Node other than the echo Pod's Node.
    OtherNode,
    /// The client Pod on the Node of the echo Pod.
    OwnNode,
    /// The echo Pod itself.
    Itself,
}

impl Client {
    /// All clients, in the order of the result's rows.
    pub const ALL: [Self; 4] = [Self::Outside, Self::OtherNode, Self::OwnNode, Self::Itself];
}

/// One path to test: from one client to one echo Pod, by one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    /// The place where the client runs.
    pub client: Client,
    /// The index of the echo Pod in the list of servers.
    pub server: usize,
    /// The index of the server on whose Node the client runs; `None` outside of the cluster.
    pub client_server: Option<usize>,
    /// The request that the client sends.
    pub probe: Probe,
}

/// The outcome of the test of one path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The path works as required.
    Passed,
    /// The path does not work as required.
    Failed,
    /// The path cannot be tried in this cluster or from this workstation.
    NotTried,
    /// The path was tried, but the result is unknown.
    Unknown,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::NotTried => "not tried",
            Self::Unknown => "unknown",
        })
    }
}

/// One row of the test's result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    /// The name of the path: from the client to the Node of the echo Pod.
    pub path: String,
    /// The Node that serves the mapping.
    pub node: String,
    /// The protocol; `None` if the row is about all protocols.
    pub protocol: Option<Protocol>,
    /// The IP family; `None` if the row is about all families.
    pub family: Option<Family>,
    /// The outcome of the test of the path.
    pub result: Outcome,
    /// The observation, or the reason why there is none; one sentence.
    pub detail: String,
}

impl Row {
    /// Creates a row that is about all protocols and families of a Node's echo Pod.
    pub fn about(path: impl Into<String>, node: &str, result: Outcome, detail: impl Into<String>) -> Self {
        let (path, detail) = (path.into(), detail.into());
        Self { path, node: node.to_owned(), protocol: None, family: None, result, detail }
    }

    /// Whether the row shows that a request on a path was answered. Rows about publication and withdrawal, which have
    /// no protocol, do not count.
    fn is_answered_path(&self) -> bool {
        self.result == Outcome::Passed && self.protocol.is_some()
    }
}

/// The verdict on the cluster: healthy only if a request was answered on at least one path, and no row is failed or
/// unknown.
pub fn verdict(rows: &[Row]) -> HealthVerdict {
    let has = |result| rows.iter().any(|row| row.result == result);
    if has(Outcome::Failed) {
        HealthVerdict::AtRisk
    } else if has(Outcome::Unknown) || !rows.iter().any(Row::is_answered_path) {
        HealthVerdict::CannotTell
    } else {
        HealthVerdict::Healthy
    }
}

/// Returns the paths to try, and a row for each path that cannot be tried.
pub fn plan(servers: &[Server]) -> (Vec<Path>, Vec<Row>) {
    let (mut paths, mut not_tried) = (Vec::new(), Vec::new());
    for (index, server) in servers.iter().enumerate() {
        for client in Client::ALL {
            let client_server = match client {
                Client::Outside => None,
                Client::OtherNode => (0..servers.len()).find(|other| *other != index),
                Client::OwnNode | Client::Itself => Some(index),
            };
            let obstacle = match client {
                Client::OtherNode if client_server.is_none() => Some("the test uses one Node"),
                Client::OwnNode | Client::Itself if !server.serves_local_pods => {
                    Some("the agent is configured not to serve Pods of its Node (--local-clients, --cgroup)")
                }
                Client::Outside | Client::OtherNode | Client::OwnNode | Client::Itself => None,
            };
            if let Some(obstacle) = obstacle {
                let name = name(client, client_server.and_then(|it| servers.get(it)), server);
                not_tried.push(Row::about(name, &server.node, Outcome::NotTried, obstacle));
                continue;
            }
            let probes = probes(&server.entries);
            paths.extend(probes.into_iter().map(|probe| Path { client, server: index, client_server, probe }));
        }
    }
    (paths, not_tried)
}

/// Returns the requests to the published node ports: a small request for each port, and also a large request for each
/// UDP port.
fn probes(entries: &[Entry]) -> Vec<Probe> {
    let mut probes: Vec<Probe> = entries
        .iter()
        .flat_map(|entry| {
            let (protocol, address) = (entry.protocol, SocketAddr::new(entry.node_ip, entry.node_port.0));
            let sizes: &[usize] = if protocol == Protocol::Udp { &[SMALL, LARGE] } else { &[SMALL] };
            sizes.iter().map(move |bytes| Probe { protocol, address, bytes: *bytes })
        })
        .collect();
    probes.sort_unstable_by_key(|probe| (probe.protocol, probe.bytes, Family::of(probe.address.ip())));
    probes
}

/// Returns the name of a path in the test's result.
fn name(client: Client, client_server: Option<&Server>, server: &Server) -> String {
    let Server { node, pod, .. } = server;
    match (client, client_server) {
        (Client::Outside, _) => format!("outside → {node}"),
        (Client::OtherNode, None) => format!("Pod on another Node → {node}"),
        (Client::OtherNode | Client::OwnNode, Some(from)) => format!("Pod on {} → {node}", from.node),
        (Client::OwnNode, None) => format!("Pod on {node} → {node}"),
        (Client::Itself, _) => format!("Pod {pod} on {node} → itself"),
    }
}
