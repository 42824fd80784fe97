// SPDX-License-Identifier: Apache-2.0
//! Judges the observations of the test's clients: converts each observation to a row of the test's result.

use std::{collections::BTreeSet, net::IpAddr};

use super::{Client, LARGE, Observation, Outcome, Path, Reply, Row, Server, name};
use crate::core::model::{Family, Protocol};

/// The facts about the cluster by which [`judge`] judges observations.
#[derive(Debug, Clone, Copy)]
pub struct PathFacts<'a> {
    /// The echo Pods of the test.
    pub servers: &'a [Server],
    /// The node addresses from which the workstation receives no packet at all, not even a refusal of a connection.
    pub unreachable: &'a BTreeSet<IpAddr>,
}

/// Returns the row about the published node ports of an echo Pod. `wanted` contains the protocols and families that the
/// annotation must name.
pub fn publication(server: &Server, wanted: &BTreeSet<(Protocol, Family)>, waited: &str) -> Row {
    let published = server.published();
    let missing: Vec<String> =
        wanted.difference(&published).map(|(protocol, family)| format!("{protocol} {family}")).collect();
    let (result, detail) = if !missing.is_empty() {
        (Outcome::Failed, format!("after {waited}, the annotation names no node port for {}", missing.join(", ")))
    } else if published.is_empty() {
        (Outcome::Unknown, "Pod and Node have no IP family in common".to_owned())
    } else {
        (Outcome::Passed, format!("{} node ports", server.entries.len()))
    };
    Row::about("publication", &server.node, result, detail)
}

/// Judges the observation of a client on a path.
pub fn judge(facts: PathFacts<'_>, path: &Path, observation: &Observation) -> Row {
    let Some(server) = facts.servers.get(path.server) else {
        return Row::about("-", "-", Outcome::Unknown, "the path names no echo Pod");
    };
    let client = path.client_server.and_then(|index| facts.servers.get(index));
    let probe = path.probe;
    let (result, detail) = match observation {
        Observation::NotSent(reason) => (Outcome::Unknown, reason.clone()),
        Observation::NoAnswer(_)
            if path.client == Client::Outside && facts.unreachable.contains(&probe.address.ip()) =>
        {
            (Outcome::NotTried, format!("this workstation does not reach {}", probe.address.ip()))
        }
        Observation::NoAnswer(reason) | Observation::Refused(reason) => {
            (Outcome::Failed, format!("{}: {reason}", probe.address))
        }
        Observation::Answered(reply) if reply.pod != server.identity => {
            (Outcome::Failed, format!("{}: Pod {} answers instead of {}", probe.address, reply.pod, server.identity))
        }
        Observation::Answered(reply) => client_address(path.client, client, server, reply),
    };
    let size = if probe.bytes == LARGE { format!(", {LARGE} bytes") } else { String::new() };
    Row {
        path: name(path.client, client, server) + &size,
        node: server.node.clone(),
        protocol: Some(probe.protocol),
        family: Some(Family::of(probe.address.ip())),
        result,
        detail,
    }
}

/// Judges the client address that the echo Pod saw. Returns the outcome and an explanation.
fn client_address(client: Client, client_server: Option<&Server>, server: &Server, reply: &Reply) -> (Outcome, String) {
    let Reply { seen, local, .. } = *reply;
    if local == Some(seen) {
        return (Outcome::Passed, format!("the Pod sees the client's address {seen}"));
    }
    let Server { node, node_ips, device_ips, pod_ranges, .. } = server;
    let is_nodes_own =
        node_ips.contains(&seen) || device_ips.contains(&seen) || pod_ranges.iter().any(|range| range.contains(seen));
    let (is_expected, remark) = match (client, client_server) {
        (Client::Itself, _) => (server.pod_ips.contains(&seen), "an address of the Pod"),
        (Client::OwnNode, _) => (server.client_ips.contains(&seen), "the client's address"),
        (Client::OtherNode, Some(from)) if from.client_ips.contains(&seen) => (true, "the client's address"),
        (Client::OtherNode, Some(from)) if from.node_ips.contains(&seen) => {
            (true, "the address of the client's Node, which masquerades its Pods")
        }
        (Client::OtherNode | Client::Outside, _) if !is_nodes_own && device_ips.is_empty() && pod_ranges.is_empty() => {
            let own = format!("whether {seen} is an address of Node {node} is unknown");
            return (Outcome::Unknown, format!("the Pod sees {seen} instead of the client's address; {own}"));
        }
        (Client::OtherNode | Client::Outside, _) => {
            (!is_nodes_own, "an address that a gateway between client and Node has substituted")
        }
    };
    if is_expected {
        return (Outcome::Passed, format!("the Pod sees {seen}, {remark}"));
    }
    let own = local.map(|ip| format!(" {ip}")).unwrap_or_default();
    let detail = format!("the Pod sees {seen} instead of the client's address{own}: Node {node} masquerades requests");
    (Outcome::Failed, detail)
}
