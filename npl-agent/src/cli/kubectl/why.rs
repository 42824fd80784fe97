// SPDX-License-Identifier: Apache-2.0
//! `kubectl npl why`: finds the Nodes of a Pod or a Service, and runs `npl-agent why` there.

use std::{collections::BTreeSet, process::ExitCode};

use anyhow::{Context as _, bail};

use super::{
    Kubectl, cluster,
    nodes::{agents, exec, for_each},
};
use crate::{
    cli::{print, print_json, why::as_text},
    config::{args::OutputFormat, kubectl_args::ClusterWhyArgs},
    core::{
        check::Cluster,
        model::{ObjectKey, Service, ServiceType},
        why::{Explanation, Question},
    },
};

/// Prints the chains of a Pod or a Service. The exit code is 0 if every link holds, 1 if a link does not hold, and 2 if
/// no agent answers.
pub(super) fn show(kubectl: Kubectl<'_>, args: &ClusterWhyArgs) -> anyhow::Result<ExitCode> {
    let namespace = match &args.object {
        Question::Pod(key, _) | Question::Service(key) => &key.namespace,
    };
    let cluster = cluster::read(kubectl, Some(namespace))?;
    if let Question::Service(key) = &args.object {
        let service = cluster.services.iter().find(|service| service.key == *key);
        let service = service.with_context(|| format!("the cluster has no Service {key}"))?;
        if let Some(reason) = inactive(service, &kubectl.connection.annotation_domain) {
            print(&format!("service {key}\n──► enabled        {reason}\n"))?;
            return Ok(ExitCode::FAILURE);
        }
    }
    let nodes = nodes_of(&cluster, &args.object)?;
    let agents = agents(kubectl)?;
    let answers = for_each(&nodes, |node| -> anyhow::Result<Explanation> {
        let agent = agents.get(node).with_context(|| format!("no agent's Pod is on Node {node}"))?;
        let (code, text) = exec(kubectl, agent, &["why", &argument(&args.object), "--output", "json"])?;
        serde_json::from_str(&text).with_context(|| format!("the agent on Node {node} exited with {code}"))
    });
    let mut explanation = Explanation { chains: Vec::new() };
    for answer in answers {
        explanation.chains.extend(answer?.chains);
    }
    match args.output {
        OutputFormat::Json => print_json(&explanation)?,
        OutputFormat::Table | OutputFormat::Wide => print(&as_text(&explanation))?,
    }
    Ok(if explanation.is_served() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The Pod or Service in the format of `npl-agent why`'s argument.
fn argument(question: &Question) -> String {
    match question {
        Question::Pod(key, None) => format!("pod/{key}"),
        Question::Pod(key, Some(port)) => format!("pod/{key}:{port}"),
        Question::Service(key) => format!("service/{key}"),
    }
}

/// Why NPL ignores a Service; `None` if it acts on the Service.
fn inactive(service: &Service, domain: &str) -> Option<String> {
    if !service.is_enabled {
        return Some(format!("the annotation {domain}/enabled is not exactly \"true\""));
    }
    let kind = match service.service_type {
        ServiceType::NodePort => "NodePort",
        ServiceType::ExternalName => "ExternalName",
        ServiceType::ClusterIp | ServiceType::LoadBalancer => {
            return service.selector.is_empty().then(|| "the selector is empty".to_owned());
        }
    };
    Some(format!("the type is {kind}, which NPL ignores: use ClusterIP or LoadBalancer"))
}

/// The Nodes of the Pod, or of the Service's Pods.
fn nodes_of(cluster: &Cluster, question: &Question) -> anyhow::Result<Vec<String>> {
    let is_asked_for = |key: &ObjectKey| match question {
        Question::Pod(wanted, _) => key == wanted,
        Question::Service(_) => true,
    };
    let service = match question {
        Question::Pod(..) => None,
        Question::Service(key) => cluster.services.iter().find(|service| service.key == *key),
    };
    let pods = cluster
        .pods
        .iter()
        .filter(|(pod, _)| is_asked_for(&pod.key) && service.is_none_or(|service| service.has_labels_of(pod)));
    let mut pods = pods.peekable();
    if pods.peek().is_none() {
        match question {
            Question::Pod(key, _) => bail!("the cluster has no Pod {key}"),
            Question::Service(key) => bail!("no Pod has all labels of the selector of Service {key}"),
        }
    }
    let nodes: BTreeSet<String> = pods.filter_map(|(_, node)| node.clone()).collect();
    anyhow::ensure!(!nodes.is_empty(), "the Pod is not scheduled on a Node yet: `kubectl describe pod` says why");
    Ok(nodes.into_iter().collect())
}
