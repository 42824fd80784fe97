// SPDX-License-Identifier: Apache-2.0
//! `kubectl npl status`: prints the verdict of every Node.

use std::{collections::BTreeMap, process::ExitCode};

use serde::{Deserialize as _, Serialize};
use serde_json::Value;

use super::{
    Kubectl,
    nodes::{AgentPod, agents, exec, for_each},
    text_at,
};
use crate::{
    cli::{print, print_json, table},
    config::{args::OutputFormat, kubectl_args::ClusterStatusArgs},
    core::verdict::HealthVerdict,
};

/// The status of one Node.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Row {
    node: String,
    /// The agent's Pod; absent if the Node has none.
    agent: Option<String>,
    version: Option<String>,
    verdict: HealthVerdict,
    /// The number of mappings in the kernel.
    mappings: Option<u64>,
    published: Option<u64>,
    /// The findings on which the verdict is based, the worst first.
    findings: Vec<String>,
}

/// Prints a line for each Node. The exit code is 1 if a Node's traffic is at risk; otherwise 2 if a Node's verdict is
/// unknown; otherwise 0.
pub(super) fn show(kubectl: Kubectl<'_>, args: &ClusterStatusArgs) -> anyhow::Result<ExitCode> {
    let agents = agents(kubectl)?;
    let nodes = kubectl.list(&["nodes"])?;
    let names = nodes.iter().map(|node| text_at(node, "/metadata/name"));
    let is_asked_for = |name: &&str| args.node.as_ref().is_none_or(|wanted| name == wanted);
    let asked: Vec<String> = names.filter(is_asked_for).map(str::to_owned).collect();
    anyhow::ensure!(!asked.is_empty(), "the cluster has no such Node: `kubectl get nodes` lists all Nodes");
    let rows = for_each(&asked, |node| row(kubectl, node, &agents));
    match args.output {
        OutputFormat::Json => print_json(&rows)?,
        OutputFormat::Table | OutputFormat::Wide => print(&as_table(&rows))?,
    }
    Ok(ExitCode::from(worst(&rows).exit_code()))
}

/// Returns the worst verdict of several Nodes. A Node at risk takes precedence over a Node whose verdict is unknown.
fn worst(rows: &[Row]) -> HealthVerdict {
    rows.iter().map(|row| row.verdict).max().unwrap_or(HealthVerdict::Healthy)
}

fn row(kubectl: Kubectl<'_>, node: &str, agents: &BTreeMap<String, AgentPod>) -> Row {
    let unknown = |agent, finding| unknown(node, agent, finding);
    let Some(agent) = agents.get(node) else { return unknown(None, "no agent's Pod is on this Node".to_owned()) };
    if !agent.is_running {
        return unknown(
            Some(agent),
            "the agent's container does not run: `kubectl describe pod` shows the cause".to_owned(),
        );
    }
    let answer = exec(kubectl, agent, &["status", "--output", "json", "--interval", "0s"]);
    match answer.and_then(|(_, text)| Ok(serde_json::from_str::<Value>(&text)?)) {
        Ok(status) => read(node, Some(agent), &status),
        Err(error) => unknown(Some(agent), format!("{error:#}")),
    }
}

/// Builds the row of a Node whose state cannot be read, with the reason.
pub(super) fn unknown(node: &str, agent: Option<&AgentPod>, finding: String) -> Row {
    Row {
        node: node.to_owned(),
        agent: agent.map(|agent| agent.name.clone()),
        version: None,
        verdict: HealthVerdict::CannotTell,
        mappings: None,
        published: None,
        findings: vec![finding],
    }
}

/// Builds the row of a Node from the output of `npl-agent status` on the Node.
pub(super) fn read(node: &str, agent: Option<&AgentPod>, status: &Value) -> Row {
    let verdict = status.get("verdict").and_then(|verdict| HealthVerdict::deserialize(verdict).ok());
    let findings = status.get("findings").and_then(Value::as_array).into_iter().flatten();
    Row {
        node: node.to_owned(),
        agent: agent.map(|agent| agent.name.clone()),
        version: status.pointer("/agent/version").and_then(Value::as_str).map(str::to_owned),
        verdict: verdict.unwrap_or(HealthVerdict::CannotTell),
        mappings: status.get("mappings").and_then(Value::as_u64),
        published: status.pointer("/nodePorts/published").and_then(Value::as_u64),
        findings: findings.map(|finding| text_at(finding, "/text").to_owned()).collect(),
    }
}

fn as_table(rows: &[Row]) -> String {
    let none = || "-".to_owned();
    let count = |count: Option<u64>| count.map_or_else(none, |count| count.to_string());
    let cells = rows.iter().map(|row| {
        let finding = match row.findings.as_slice() {
            [] => none(),
            [one] => one.clone(),
            [one, others @ ..] => format!("{one} (and {} more)", others.len()),
        };
        let agent = [row.agent.clone(), row.version.clone()].map(|it| it.unwrap_or_else(none));
        let counts = vec![count(row.mappings), count(row.published), finding];
        [vec![row.node.clone(), row.verdict.to_string()], agent.to_vec(), counts].concat()
    });
    table(&["NODE", "VERDICT", "AGENT", "VERSION", "MAPPINGS", "PUBLISHED", "FINDING"], cells)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{AgentPod, Row, as_table, read, worst};
    use crate::core::verdict::HealthVerdict;

    fn row(node: &str, status: &serde_json::Value) -> Row {
        let agent = AgentPod { name: "npl-agent-x".to_owned(), is_running: true, ..AgentPod::default() };
        read(node, Some(&agent), status)
    }

    #[test]
    fn the_worst_node_decides_the_exit_code() {
        let healthy = row("node-1", &json!({"verdict": "healthy", "mappings": 4, "nodePorts": {"published": 4}}));
        let findings = json!([{"text": "no device"}, {"text": "no port"}]);
        let at_risk = row("node-2", &json!({"verdict": "at-risk", "findings": findings}));
        let unknown = row("node-3", &json!({}));
        assert_eq!((healthy.mappings, healthy.published, at_risk.findings.len()), (Some(4), Some(4), 2));
        let text = as_table(&[row("node-2", &json!({"verdict": "at-risk", "findings": findings}))]);
        assert!(text.contains("traffic at risk") && text.contains("no device (and 1 more)"), "{text}");
        assert_eq!(worst(&[healthy]), HealthVerdict::Healthy);
        assert_eq!(worst(&[unknown]), HealthVerdict::CannotTell);
        assert_eq!(worst(&[row("node-3", &json!({})), at_risk]), HealthVerdict::AtRisk);
    }
}
