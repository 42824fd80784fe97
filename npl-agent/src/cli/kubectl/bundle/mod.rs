// SPDX-License-Identifier: Apache-2.0
//! `kubectl npl bundle`: writes one support archive with the documents of every Node and the views of the whole
//! cluster. The archive has the documents of `npl-agent bundle` for each Node, and a fixed list of documents for the
//! cluster.

mod archive;
mod summary;
mod views;

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use self::{
    archive::{ClusterArchive, Unpacked},
    summary::{NodePlan, NodeRow, Summary},
};
use super::{
    Kubectl, child,
    interrupt::Interrupt,
    is_forbidden,
    node_pod::{self, NodePods},
    nodes::{AgentPod, agents, exec_arguments, image},
    parallel, start,
    status::{self, Row},
    temporary::Kind,
    text_at,
};
use crate::{
    cli::{
        bundle::{document, new_file},
        new_private_file, note,
    },
    config::kubectl_args::ClusterBundleArgs,
    core::verdict::HealthVerdict,
};

/// The time limit of the whole command. The summary names the Nodes whose documents have not been collected by then.
const LIMIT: Duration = node_pod::LIMIT;
/// The label and the Pod Security level of the Namespaces for the Pods that `--create-pods` creates. The level
/// `privileged` admits Pods with the host network and with `hostPath` volumes.
const NAMESPACE: Kind = Kind { label: "npl-bundle", level: "privileged" };
/// The time limit for the documents of one Node.
const NODE_LIMIT: Duration = Duration::from_mins(1);
/// The maximum size in bytes of a Node's compressed archive.
const NODE_BYTES: usize = 16 << 20;
/// The maximum size in bytes of the compressed archives of all Nodes together. A Node whose archive would exceed this
/// size is left out.
const TOTAL_BYTES: usize = 512 << 20;

/// Writes the archive. The exit code is 0 if the archive has the documents of every selected Node and all documents of
/// the cluster, and if the Pods that this command created are removed; otherwise 2.
pub(super) fn show(kubectl: Kubectl<'_>, args: &ClusterBundleArgs) -> anyhow::Result<ExitCode> {
    let file = new_file(args.file.as_deref())?;
    let interrupt = Interrupt::watch(LIMIT)?;
    let Some(path) = file else { return write(kubectl, args, &interrupt, io::stdout().lock()) };
    let out =
        new_private_file(path).with_context(|| format!("create {}: choose the path of a new file", path.display()));
    let written = write(kubectl, args, &interrupt, out?);
    match &written {
        Ok(_) => note(&format!("wrote {}", path.display())),
        // An error of the removal is ignored, because the caller reports the error that prevented the archive from
        // being written.
        Err(_) => drop(fs::remove_file(path)),
    }
    written
}

fn write(
    kubectl: Kubectl<'_>,
    args: &ClusterBundleArgs,
    interrupt: &Interrupt,
    out: impl Write,
) -> anyhow::Result<ExitCode> {
    let kubectl = kubectl.within(interrupt);
    let agents = agents(kubectl)?;
    let nodes = kubectl.list(&["nodes"]);
    let mut errors = BTreeMap::new();
    let names = match &nodes {
        Ok(nodes) => nodes.iter().map(|node| text_at(node, "/metadata/name").to_owned()).collect(),
        Err(error) if is_forbidden(error) => summary::names_without_list(&agents, &args.node)?,
        // Any other error is temporary, and an archive without the Nodes that have no agent's Pod would be misleading.
        Err(error) => bail!("{error:#}: repeat the command"),
    };
    let plans = summary::plan(&names, &args.node, &agents)?;
    let mut archive = ClusterArchive::new(out)?;
    let pods = node_pods(kubectl, args, &plans, &agents, interrupt)?;
    let created = pods.as_ref().map_or(Ok(()), NodePods::create);
    let added = created.and_then(|()| add_nodes(kubectl, args, pods.as_ref(), &plans, &mut archive));
    let are_removed = pods.as_ref().is_none_or(NodePods::remove);
    let (rows, statuses) = added?;
    let documents = [
        ("status.json", document(&statuses)),
        ("nodes.json", nodes.map(|nodes| views::nodes(&nodes))),
        ("agents.json", Ok(views::agents(&agents))),
        ("mappings.json", views::mappings(kubectl)),
        ("check.json", views::check(kubectl)),
    ];
    for (name, document) in documents {
        match document {
            Ok(document) => archive.add_cluster_document(name, &document)?,
            Err(error) => drop(errors.insert(name, summary::shortened(&format!("{error:#}")))),
        }
    }
    let summary = Summary::new(rows, errors);
    archive.finish(&summary)?;
    note(&summary.to_string());
    let is_complete = summary.is_complete() && are_removed;
    Ok(if is_complete { ExitCode::SUCCESS } else { ExitCode::from(HealthVerdict::CannotTell.exit_code()) })
}

/// Plans the Pods on Nodes where no agent runs, without creating them. Returns `None` without `--create-pods`, or if an
/// agent runs on every selected Node.
fn node_pods<'a>(
    kubectl: Kubectl<'a>,
    args: &'a ClusterBundleArgs,
    plans: &[NodePlan<'_>],
    agents: &'a BTreeMap<String, AgentPod>,
    interrupt: &'a Interrupt,
) -> anyhow::Result<Option<NodePods<'a>>> {
    let without_agent: Vec<&str> =
        plans.iter().filter(|plan| plan.running_agent().is_none()).map(|plan| plan.node).collect();
    if !args.create_pods || without_agent.is_empty() {
        return Ok(None);
    }
    let pods = NodePods::new(kubectl, &NAMESPACE, image(args.image.as_deref(), agents)?, interrupt)?;
    note(&format!("no agent runs on {}: {}", without_agent.join(", "), pods.description()));
    Ok(Some(pods))
}

/// Collects the documents of the selected Nodes and adds the documents to the archive. Returns for each Node the row of
/// the summary and the row of `kubectl npl status`, in the order of the Nodes.
fn add_nodes(
    kubectl: Kubectl<'_>,
    args: &ClusterBundleArgs,
    pods: Option<&NodePods<'_>>,
    plans: &[NodePlan<'_>],
    archive: &mut ClusterArchive<impl Write>,
) -> anyhow::Result<(Vec<NodeRow>, Vec<Row>)> {
    let mut collected: BTreeMap<usize, (NodeRow, Row)> = BTreeMap::new();
    let mut bytes = 0;
    parallel::for_each(
        plans,
        |plan| fetch(kubectl, plan, pods, args.flows),
        |index, plan, fetched| {
            let unpacked = fetched.and_then(|compressed| {
                ensure!(
                    bytes + compressed.len() <= TOTAL_BYTES,
                    "with the archive of this Node, all archives together would exceed {} MiB: collect this Node \
                     separately with --node",
                    TOTAL_BYTES >> 20
                );
                bytes += compressed.len();
                archive::unpack(&compressed)
            });
            let (row, status) = match unpacked {
                Ok(unpacked) => {
                    archive.add_node(plan.node, &unpacked)?;
                    (NodeRow::collected(plan, &unpacked), status_of(plan, &unpacked))
                }
                Err(error) => {
                    let reason = summary::shortened(&format!("{error:#}"));
                    (NodeRow::missing(plan, &reason), status::unknown(plan.node, plan.agent, reason))
                }
            };
            note(&format!("{} of {}: {row}", collected.len() + 1, plans.len()));
            collected.insert(index, (row, status));
            anyhow::Ok(())
        },
    )?;
    Ok(collected.into_values().unzip())
}

/// Returns the compressed archive of a Node.
fn fetch(
    kubectl: Kubectl<'_>,
    plan: &NodePlan<'_>,
    pods: Option<&NodePods<'_>>,
    with_flows: bool,
) -> anyhow::Result<Vec<u8>> {
    let flags: &[&str] = if with_flows { &["bundle", "--flows"] } else { &["bundle"] };
    kubectl.check()?;
    let exec = match (plan.running_agent(), pods) {
        (Some(agent), _) => exec_arguments(kubectl, agent, flags),
        (None, Some(pods)) => {
            pods.start(plan.node).with_context(|| plan.why_no_agent())?;
            pods.exec_arguments(plan.node, flags)
        }
        (None, None) => bail!(
            "{}: `kubectl npl bundle --node {} --create-pods` collects the documents of this Node in a new Pod",
            plan.why_no_agent(),
            plan.node
        ),
    };
    let begin = Instant::now();
    let check = || {
        kubectl.check()?;
        ensure!(begin.elapsed() < NODE_LIMIT, "no archive after {} s", NODE_LIMIT.as_secs());
        Ok(())
    };
    let mut command = kubectl.command(&exec);
    let output = child::output_within(start(&mut command)?, NODE_BYTES, check)?;
    if !output.status.success() {
        bail!("`npl-agent bundle`: {}", String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(output.stdout)
}

fn status_of(plan: &NodePlan<'_>, unpacked: &Unpacked) -> Row {
    let document = unpacked.documents.iter().find(|(name, _)| *name == "status.json");
    let status = document.and_then(|(_, content)| serde_json::from_slice::<Value>(content).ok());
    match status {
        Some(status) => status::read(plan.node, plan.agent, &status),
        None => status::unknown(plan.node, plan.agent, "the Node's archive has no readable status.json".to_owned()),
    }
}

#[cfg(test)]
mod tests;
