// SPDX-License-Identifier: Apache-2.0
//! Selects the Nodes whose documents are collected, and describes the result for each Node.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use anyhow::{bail, ensure};
use serde::Serialize;

use super::archive::Unpacked;
use crate::cli::kubectl::nodes::AgentPod;

/// The maximum length, in characters, of the reason why documents of a Node or of the cluster are missing; a longer
/// reason is cut.
const REASON: usize = 500;

/// A Node whose documents are to be collected.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NodePlan<'a> {
    pub(super) node: &'a str,
    /// The agent's Pod; `None` if the Node has none.
    pub(super) agent: Option<&'a AgentPod>,
}

impl<'a> NodePlan<'a> {
    /// Returns the agent's Pod if its container runs.
    pub(super) fn running_agent(&self) -> Option<&'a AgentPod> {
        self.agent.filter(|agent| agent.is_running)
    }

    /// Returns the reason why no agent on the Node can answer.
    pub(super) fn why_no_agent(&self) -> String {
        match self.agent {
            Some(agent) => format!("the agent's container does not run ({})", agent.state),
            None => "no agent's Pod is on this Node".to_owned(),
        }
    }
}

/// Returns the names of the Nodes that are known if the user may not list Nodes: the Nodes that have an agent's Pod, and
/// the Nodes that the user has named. Fails if there is no such Node.
pub(super) fn names_without_list(
    agents: &BTreeMap<String, AgentPod>,
    wanted: &[String],
) -> anyhow::Result<Vec<String>> {
    let names: Vec<_> = agents.keys().filter(|name| !name.is_empty()).chain(wanted).cloned().collect();
    ensure!(
        !names.is_empty(),
        "no Node is known, because you may not list Nodes and no agent's Pod runs: name the Nodes with --node, or ask \
         for the permission to list Nodes"
    );
    Ok(names)
}

/// Selects the Nodes: all Nodes, or those with the names `wanted`. Fails if a wanted Node does not exist, or if there
/// is no Node.
pub(super) fn plan<'a>(
    nodes: &'a [String],
    wanted: &[String],
    agents: &'a BTreeMap<String, AgentPod>,
) -> anyhow::Result<Vec<NodePlan<'a>>> {
    let existing: BTreeSet<&str> = nodes.iter().map(String::as_str).collect();
    if let Some(unknown) = wanted.iter().find(|name| !existing.contains(name.as_str())) {
        bail!("the cluster has no Node {unknown}: `kubectl get nodes` lists all Nodes");
    }
    let is_wanted = |name: &&str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name);
    let plans: Vec<_> =
        existing.into_iter().filter(is_wanted).map(|node| NodePlan { node, agent: agents.get(node) }).collect();
    if plans.is_empty() {
        bail!("the cluster has no Node");
    }
    Ok(plans)
}

/// The result for a Node: whether its documents are in the archive, and if not, why.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodeRow {
    node: String,
    /// The agent's Pod; absent if the Node has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<String>,
    /// Whether the Node's documents are in the archive.
    collected: bool,
    /// Whether the documents were collected in a Pod of this command, because no agent runs on the Node.
    in_new_pod: bool,
    /// Why the Node's documents are not in the archive.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    documents: Vec<&'static str>,
    /// The size in bytes of the documents.
    bytes: usize,
    /// The number of files of the Node's archive that this version does not know, and that are left out.
    ignored_files: usize,
}

impl NodeRow {
    pub(super) fn collected(plan: &NodePlan<'_>, unpacked: &Unpacked) -> Self {
        Self {
            collected: true,
            in_new_pod: plan.running_agent().is_none(),
            reason: None,
            documents: unpacked.documents.iter().map(|(name, _)| *name).collect(),
            bytes: unpacked.bytes(),
            ignored_files: unpacked.ignored,
            ..Self::missing(plan, "")
        }
    }

    pub(super) fn missing(plan: &NodePlan<'_>, reason: &str) -> Self {
        Self {
            node: plan.node.to_owned(),
            agent: plan.agent.map(|agent| agent.name.clone()),
            collected: false,
            in_new_pod: false,
            reason: Some(reason.to_owned()),
            documents: Vec::new(),
            bytes: 0,
            ignored_files: 0,
        }
    }
}

/// Formats the line that reports this result on the terminal.
impl fmt::Display for NodeRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(reason) = &self.reason {
            return write!(f, "Node {} is not in the archive: {reason}", self.node);
        }
        let place = if self.in_new_pod { ", collected in a new Pod" } else { "" };
        write!(f, "Node {}: {} documents, {} bytes{place}", self.node, self.documents.len(), self.bytes)
    }
}

/// The document `summary.json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Summary {
    /// The version of the plug-in.
    plugin: &'static str,
    /// The number of Nodes whose documents are in the archive.
    collected: usize,
    /// The number of Nodes whose documents are not in the archive.
    missing: usize,
    nodes: Vec<NodeRow>,
    /// The documents of the cluster that could not be read, and why.
    cluster_errors: BTreeMap<&'static str, String>,
}

impl Summary {
    pub(super) fn new(nodes: Vec<NodeRow>, cluster_errors: BTreeMap<&'static str, String>) -> Self {
        let collected = nodes.iter().filter(|row| row.collected).count();
        Self { plugin: env!("CARGO_PKG_VERSION"), collected, missing: nodes.len() - collected, nodes, cluster_errors }
    }

    /// Whether the archive has the documents of every Node, and all documents of the cluster.
    pub(super) fn is_complete(&self) -> bool {
        self.missing == 0 && self.cluster_errors.is_empty()
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.nodes.len();
        write!(f, "the archive has the documents of {} of {total} Nodes", self.collected)?;
        for (name, error) in &self.cluster_errors {
            write!(f, "; cluster/{name} could not be read: {error}")?;
        }
        Ok(())
    }
}

/// Returns the beginning of a reason, on one line. Control characters are left out, because a Node's text must not
/// control the operator's terminal.
pub(super) fn shortened(reason: &str) -> String {
    let words = reason.split_whitespace().map(|word| word.chars().filter(|it| !it.is_control()).collect::<String>());
    let line = words.collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(REASON) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default()),
        None => line,
    }
}
