// SPDX-License-Identifier: Apache-2.0
//! Judges the observations of clients: converts each observation to a row of the result.

use std::{collections::BTreeSet, net::IpAddr};

use super::{Client, LARGE, Observation, Outcome, Path, Reply, Row, Server, name};
use crate::core::model::{Family, Protocol};

/// The facts on which judgements are based.
#[derive(Debug, Clone, Copy)]
pub struct PathFacts<'a> {
    /// The echo Pods.
    pub servers: &'a [Server],
    /// The node addresses from which the workstation gets no packet at all, not even a refusal of a connection.
    pub unreachable: &'a BTreeSet<IpAddr>,
}

/// The row about the published node ports of an echo Pod, of which `wanted` are requested.
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

/// The result of a path.
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
        Observation::Answered(reply) if reply.pod != server.pod => {
            (Outcome::Failed, format!("{}: Pod {} answers instead of {}", probe.address, reply.pod, server.pod))
        }
        Observation::Answered(reply) => match client_address(path.client, client, server, reply) {
            Ok(detail) => (Outcome::Passed, detail),
            Err(detail) => (Outcome::Failed, detail),
        },
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

/// Checks the client's address that the echo Pod sees. Returns a sentence: `Ok` if the address is acceptable.
fn client_address(
    client: Client,
    client_server: Option<&Server>,
    server: &Server,
    reply: &Reply,
) -> Result<String, String> {
    let seen = reply.seen;
    if reply.local == Some(seen) {
        return Ok(format!("the Pod sees the client's address {seen}"));
    }
    let is_nodes_own = server.node_ips.contains(&seen) || server.pod_ranges.iter().any(|range| range.contains(seen));
    let (is_expected, remark) = match (client, client_server) {
        (Client::Itself, _) => (server.pod_ips.contains(&seen), "an address of the Pod"),
        (Client::OwnNode, _) => (server.client_ips.contains(&seen), "the client's address"),
        (Client::OtherNode, Some(from)) if from.client_ips.contains(&seen) => (true, "the client's address"),
        (Client::OtherNode, Some(from)) if from.node_ips.contains(&seen) => {
            (true, "the address of the client's Node, which masquerades its Pods")
        }
        (Client::OtherNode | Client::Outside, _) => {
            (!is_nodes_own, "an address that a gateway between client and Node has substituted")
        }
    };
    if is_expected {
        return Ok(format!("the Pod sees {seen}, {remark}"));
    }
    let own = reply.local.map(|ip| format!(" {ip}")).unwrap_or_default();
    Err(format!("the Pod sees {seen} instead of the client's address{own}: Node {} masquerades requests", server.node))
}
