// SPDX-License-Identifier: Apache-2.0
//! `kubectl npl members`: shows the members that `npl-feed` gives to load balancers for a Service. The command asks
//! each replica of `npl-feed` through the API server's proxy.

use std::{collections::BTreeMap, process::ExitCode, thread};

use anyhow::bail;
use serde::Serialize;
use serde_json::Value;

use super::{Kubectl, is_ready, items_at, nodes::for_each, text_at};
use crate::{
    cli::{print, print_json, table},
    config::{args::OutputFormat, kubectl_args::MembersArgs},
    core::members::{PortMembers, ReplicaAnswer, agree},
};

/// The label selector of the feed's Pods.
const SELECTOR: &str = "app.kubernetes.io/name=npl,app.kubernetes.io/component=feed";
/// The number of characters of a snapshot version that tables show; the JSON output has the whole version.
const SHORT_VERSION: usize = 12;

/// A Pod in which a replica of the feed runs.
#[derive(Debug, PartialEq, Eq)]
struct Replica {
    pod: String,
    node: String,
    is_ready: bool,
    /// Whether the replica answers only clients with a client certificate (`--tls-client-ca`).
    needs_certificate: bool,
    /// The name by which the path of the API server's proxy selects the Pod.
    proxied: String,
}

impl Replica {
    /// Returns the reason why the command does not ask the replica; `None` if the command asks the replica.
    const fn obstacle(&self) -> Option<&'static str> {
        match (self.is_ready, self.needs_certificate) {
            (false, _) => Some("the replica is not ready"),
            (true, true) => Some("the feed requires a client certificate, which the API server's proxy does not send"),
            (true, false) => None,
        }
    }
}

/// The members that the replicas serve for a Service.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Report {
    namespace: String,
    service: String,
    /// Whether all replicas that answered serve the same members.
    agree: bool,
    /// The ports and members of the first replica that serves the Service.
    ports: Vec<PortMembers>,
    replicas: Vec<ReplicaRow>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct ReplicaRow {
    pod: String,
    node: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    /// The reason why the replica gives no members of the Service; absent if the replica gives the members.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// Prints the members of a Service. The exit code is 1 if replicas still differ after `--settle`; otherwise 2 if a
/// replica does not answer; otherwise 0.
pub(super) fn show(kubectl: Kubectl<'_>, args: &MembersArgs) -> anyhow::Result<ExitCode> {
    let namespace = match &args.namespace {
        Some(namespace) => namespace.clone(),
        None => current_namespace(kubectl),
    };
    let replicas = replicas(kubectl)?;
    let path = format!("v1/members/{namespace}/{}", args.service.name);
    let mut answers = ask(kubectl, &replicas, &path);
    if !agree(answers.values()) && !args.settle.is_zero() {
        // Replicas may differ briefly, because they receive a change of a Pod at slightly different times.
        thread::sleep(args.settle);
        answers = ask(kubectl, &replicas, &path);
    }
    let report = report(&namespace, args, &replicas, &mut answers)?;
    match args.output {
        OutputFormat::Json => print_json(&report)?,
        OutputFormat::Table => print(&as_text(&report, false))?,
        OutputFormat::Wide => print(&as_text(&report, true))?,
    }
    Ok(ExitCode::from(exit_code(&report)))
}

/// Returns the namespace of kubectl's current context.
fn current_namespace(kubectl: Kubectl<'_>) -> String {
    let asked = kubectl.output(&["config", "view", "--minify", "--output", "jsonpath={..namespace}"]);
    let named = asked.map(|(_, text)| text.trim().to_owned()).unwrap_or_default();
    if named.is_empty() { "default".to_owned() } else { named }
}

/// Lists the replicas of the feed. Fails if no replica is ready.
fn replicas(kubectl: Kubectl<'_>) -> anyhow::Result<Vec<Replica>> {
    let namespace = &kubectl.connection.agent_namespace;
    let pods = kubectl.list(&["pods", "--namespace", namespace, "--selector", SELECTOR])?;
    let replicas: Vec<Replica> = pods.iter().filter_map(replica).collect();
    if replicas.is_empty() {
        bail!(
            "no replica of npl-feed is in namespace {namespace}, so only load balancers that read annotations get the \
             node ports: install the feed with the chart's value feed.enabled=true, or give the feed's namespace with \
             --agent-namespace"
        );
    }
    if !replicas.iter().any(|replica| replica.is_ready) {
        bail!(
            "no replica of npl-feed is ready in namespace {namespace}, so load balancers keep the members that they \
             know: `kubectl --namespace {namespace} describe pods --selector {SELECTOR}` shows the reason"
        );
    }
    Ok(replicas)
}

/// Converts a Pod of the feed to a replica; `None` if the Pod is being deleted or has ended, for example after an
/// eviction.
fn replica(pod: &Value) -> Option<Replica> {
    let has_ended = matches!(text_at(pod, "/status/phase"), "Failed" | "Succeeded");
    if has_ended || pod.pointer("/metadata/deletionTimestamp").is_some() {
        return None;
    }
    let of_container = |field: &str| items_at(pod, &format!("/spec/containers/0/{field}"));
    let port = of_container("ports").find(|port| port["name"] == "http");
    let port = port.and_then(|port| port["containerPort"].as_u64()).unwrap_or(8080);
    let has = |variable: &str, flag: &str| {
        let mut arguments = of_container("args").filter_map(Value::as_str);
        of_container("env").any(|it| it["name"] == variable) || arguments.any(|it| it.starts_with(flag))
    };
    let scheme = if has("NPL_FEED_TLS_CERT", "--tls-cert") { "https:" } else { "" };
    let needs_certificate = has("NPL_FEED_TLS_CLIENT_CA", "--tls-client-ca");
    let name = text_at(pod, "/metadata/name").to_owned();
    let proxied = format!("{scheme}{name}:{port}");
    let node = text_at(pod, "/spec/nodeName").to_owned();
    Some(Replica { pod: name, node, is_ready: is_ready(pod), needs_certificate, proxied })
}

/// Requests the members of a Service from each replica, and returns the answers by the names of the replicas' Pods.
fn ask(kubectl: Kubectl<'_>, replicas: &[Replica], path: &str) -> BTreeMap<String, ReplicaAnswer> {
    let namespace = &kubectl.connection.agent_namespace;
    let asked = replicas.iter().filter(|it| it.obstacle().is_none());
    let asked: Vec<String> = asked.map(|it| it.proxied.clone()).collect();
    let answers = for_each(&asked, |proxied| {
        let path = format!("/api/v1/namespaces/{namespace}/pods/{proxied}/proxy/{path}");
        (proxied.to_owned(), answer(kubectl.output(&["get", "--raw", &path]).map(|(_, text)| text)))
    });
    let by_path: BTreeMap<String, ReplicaAnswer> = answers.into_iter().collect();
    let of_replica = |replica: &Replica| {
        let answer = by_path.get(&replica.proxied).cloned();
        let unasked = || ReplicaAnswer::Failed(replica.obstacle().unwrap_or("the replica was not asked").to_owned());
        (replica.pod.clone(), answer.unwrap_or_else(unasked))
    };
    replicas.iter().map(of_replica).collect()
}

/// Reads a replica's answer from the output of kubectl.
fn answer(output: anyhow::Result<String>) -> ReplicaAnswer {
    match output {
        Ok(text) => serde_json::from_str(&text).map_or_else(
            |error| {
                ReplicaAnswer::Failed(format!(
                    "the answer cannot be read; the replica may have another version: {error}"
                ))
            },
            ReplicaAnswer::Members,
        ),
        Err(error) => {
            let text = format!("{error:#}").lines().collect::<Vec<_>>().join("; ");
            // If the API server does not find the Pod, the API server's message contains the Pod's name. A "not found"
            // without a Pod's name is the answer of the feed.
            if text.contains("(NotFound)") && !text.contains("pods \"") {
                ReplicaAnswer::Unknown
            } else if text.contains("(Unauthorized)") || text.contains("asked for the client to provide credentials") {
                ReplicaAnswer::Failed(
                    "the feed requires a bearer token, which the API server's proxy cannot send".to_owned(),
                )
            } else {
                ReplicaAnswer::Failed(text)
            }
        }
    }
}

fn report(
    namespace: &str,
    args: &MembersArgs,
    replicas: &[Replica],
    answers: &mut BTreeMap<String, ReplicaAnswer>,
) -> anyhow::Result<Report> {
    let service = &args.service.name;
    let agree = agree(answers.values());
    let is_unknown_to_all = answers.values().all(|answer| *answer == ReplicaAnswer::Unknown);
    let rows = replicas.iter().map(|replica| {
        let (version, problem) = match answers.get(&replica.pod) {
            Some(ReplicaAnswer::Members(members)) => (Some(members.version.clone()), None),
            Some(ReplicaAnswer::Failed(cause)) => (None, Some(cause.clone())),
            Some(ReplicaAnswer::Unknown) | None => (None, Some("the replica serves no such Service".to_owned())),
        };
        ReplicaRow { pod: replica.pod.clone(), node: replica.node.clone(), version, problem }
    });
    let rows: Vec<ReplicaRow> = rows.collect();
    let served = replicas.iter().find_map(|replica| match answers.remove(&replica.pod) {
        Some(ReplicaAnswer::Members(members)) => Some(members),
        _ => None,
    });
    let Some(members) = served else {
        if is_unknown_to_all {
            bail!(
                "the feed serves no Service {namespace}/{service}: `kubectl npl why service/{namespace}/{service}` shows the reason"
            );
        }
        let causes = rows.iter().filter_map(|row| Some(format!("{}: {}", row.pod, row.problem.as_ref()?)));
        bail!("no replica of npl-feed answers. {}", causes.collect::<Vec<_>>().join(". "));
    };
    let known: Vec<String> = members.ports.iter().map(PortMembers::title).collect();
    let ports = match &args.service.port {
        Some(port) => members.of_port(port).ports,
        None => members.ports,
    };
    if let (Some(port), true) = (&args.service.port, ports.is_empty()) {
        bail!("Service {namespace}/{service} has no port {port}; its ports are {}", known.join(", "));
    }
    Ok(Report { namespace: namespace.to_owned(), service: service.clone(), agree, ports, replicas: rows })
}

fn exit_code(report: &Report) -> u8 {
    match (report.agree, report.replicas.iter().all(|replica| replica.version.is_some())) {
        (false, _) => 1,
        (true, false) => 2,
        (true, true) => 0,
    }
}

fn as_text(report: &Report, is_wide: bool) -> String {
    let version = |version: &str| version.get(..SHORT_VERSION).unwrap_or(version).to_owned();
    let members = report.ports.iter().flat_map(|port| port.members.iter().map(move |member| (port, member)));
    let cells: Vec<Vec<String>> = members
        .map(|(port, member)| {
            let address = std::net::SocketAddr::new(member.address.0, member.port).to_string();
            let mut cells = vec![port.title(), address, port.protocol.clone(), member.pod.clone(), member.node.clone()];
            let zone = if member.zone.is_empty() { "-" } else { &member.zone };
            cells.extend([zone.to_owned(), member.state().to_owned(), member.weight.to_string()]);
            cells
        })
        .collect();
    let mut text = if cells.is_empty() {
        format!("No Pod of Service {}/{} has a published node port.\n", report.namespace, report.service)
    } else {
        let head = ["PORT", "NODE ADDRESS", "PROTOCOL", "POD", "NODE", "ZONE", "STATE", "WEIGHT"];
        table(&head, cells)
    };
    let names = report.ports.iter().map(|port| {
        let or_none = |name: &Option<String>| name.clone().unwrap_or_else(|| "-".to_owned());
        vec![port.title(), or_none(&port.names.xds), or_none(&port.names.dns), port.names.http.clone()]
    });
    text += "\n";
    text += &table(&["PORT", "XDS CLUSTER", "DNS SRV NAME", "HTTP PATH"], names);
    text += "\n";
    let all_answered = report.replicas.iter().all(|replica| replica.version.is_some());
    if report.agree && all_answered && !is_wide {
        let shown = report.replicas.first().and_then(|it| it.version.as_deref()).map(version).unwrap_or_default();
        return text + &format!("Replicas of the feed: {}, all with version {shown}.\n", report.replicas.len());
    }
    let rows = report.replicas.iter().map(|it| {
        let shown = it.version.as_deref().map_or_else(|| "-".to_owned(), version);
        vec![it.pod.clone(), it.node.clone(), shown, it.problem.clone().unwrap_or_else(|| "-".to_owned())]
    });
    text += &table(&["REPLICA", "NODE", "VERSION", "PROBLEM"], rows);
    if !report.agree {
        text += "The replicas differ. The table of members shows those of the first replica that has a version.\n";
    }
    text
}

#[cfg(test)]
#[path = "members_tests.rs"]
mod tests;
