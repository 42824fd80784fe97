// SPDX-License-Identifier: Apache-2.0
//! `kubectl npl why`: finds the Nodes of a Pod or a Service, and runs `npl-agent why` there.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
};

use anyhow::{Context as _, bail};

use super::{
    Kubectl, cluster,
    nodes::{AgentPod, agents, exec, for_each},
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

/// Prints the chains of conditions of a Pod or a Service. The exit code is 1 if a condition does not hold; otherwise 2
/// if the agent of a Node gives no answer; otherwise 0.
pub(super) fn show(kubectl: Kubectl<'_>, args: &ClusterWhyArgs) -> anyhow::Result<ExitCode> {
    let namespace = match &args.object {
        Question::Pod(key, _) | Question::Service(key) => &key.namespace,
    };
    let cluster = cluster::read(kubectl, Some(namespace))?;
    if let Question::Service(key) = &args.object {
        let service = cluster.services.iter().find(|service| service.key == *key);
        let service = service.with_context(|| format!("the cluster has no Service {key}"))?;
        if let Some(reason) = inactive(service, &kubectl.connection.annotation_domain) {
            return report(&Explanation::of_inactive_service(key, reason), args.output);
        }
    }
    let nodes = nodes_of(&cluster, &args.object)?;
    let agents = agents(kubectl)?;
    let answers = for_each(&nodes, |node| answer_of(kubectl, &agents, node, &args.object));
    report(&merged(answers), args.output)
}

/// Prints the chains, and returns the exit code.
fn report(explanation: &Explanation, output: OutputFormat) -> anyhow::Result<ExitCode> {
    match output {
        OutputFormat::Json => print_json(explanation)?,
        OutputFormat::Table | OutputFormat::Wide => print(&as_text(explanation))?,
    }
    Ok(ExitCode::from(explanation.verdict().exit_code()))
}

/// Asks the agent on a Node for the chains of conditions. The error is one sentence that names the Node and states why
/// the agent gave no answer.
fn answer_of(
    kubectl: Kubectl<'_>,
    agents: &BTreeMap<String, AgentPod>,
    node: &str,
    question: &Question,
) -> Result<Explanation, String> {
    let missing = |reason: String| format!("the Pods on Node {node} are not examined: {reason}");
    let Some(agent) = agents.get(node) else { return Err(missing("no agent's Pod is on this Node".to_owned())) };
    if !agent.is_running {
        return Err(missing(format!("the container of Pod {} does not run", agent.name)));
    }
    let answer = exec(kubectl, agent, &["why", &argument(question), "--output", "json"]);
    let (code, text) = answer.map_err(|error| missing(one_line(&error)))?;
    serde_json::from_str(&text).map_err(|error| {
        missing(format!(
            "the answer of `npl-agent why` in Pod {} (exit code {code}) cannot be read: {error}",
            agent.name
        ))
    })
}

/// Formats an error in one line; an error message of kubectl may have several lines.
fn one_line(error: &anyhow::Error) -> String {
    format!("{error:#}").lines().collect::<Vec<_>>().join("; ")
}

/// Merges the Nodes' answers: all chains, and one sentence for each Node that gave no answer.
fn merged(answers: Vec<Result<Explanation, String>>) -> Explanation {
    let mut all = Explanation { chains: Vec::new(), missing: Vec::new() };
    for answer in answers {
        match answer {
            Ok(Explanation { chains, missing }) => {
                all.chains.extend(chains);
                all.missing.extend(missing);
            }
            Err(sentence) => all.missing.push(sentence),
        }
    }
    all
}

/// Returns the Pod or Service in the format of `npl-agent why`'s argument.
fn argument(question: &Question) -> String {
    match question {
        Question::Pod(key, None) => format!("pod/{key}"),
        Question::Pod(key, Some(port)) => format!("pod/{key}:{port}"),
        Question::Service(key) => format!("service/{key}"),
    }
}

/// Returns the reason why NPL ignores a Service; `None` if NPL allocates node ports for the Service.
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

/// Returns the Nodes on which the Pod, or the Service's Pods, run.
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
    anyhow::ensure!(
        !nodes.is_empty(),
        "the Pod, or every Pod of the Service, is not scheduled on a Node yet: `kubectl describe pod` shows the cause"
    );
    Ok(nodes.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{verdict::HealthVerdict, why::Chain};

    fn served() -> Explanation {
        let chain =
            Chain { subject: "pod shop/web-0, port 8080/tcp IPv4".to_owned(), frontend: None, links: Vec::new() };
        Explanation { chains: vec![chain], missing: Vec::new() }
    }

    fn broken() -> Explanation {
        Explanation::of_inactive_service(&ObjectKey::new("shop", "web"), "the selector is empty")
    }

    #[test]
    fn a_node_without_an_answer_is_named_below_the_chains_of_the_other_nodes() {
        let missing = "the Pods on Node node-2 are not examined: no agent's Pod is on this Node";
        let all = merged(vec![Err(missing.to_owned()), Ok(served())]);
        assert_eq!(all, Explanation { missing: vec![missing.to_owned()], ..served() });
        let text = as_text(&all);
        assert!(text.starts_with("pod shop/web-0") && text.ends_with(&format!("{missing}\n")), "{text}");
    }

    #[test]
    fn a_missing_answer_decides_the_exit_code_only_if_no_link_is_broken() {
        let verdict = |answers| merged(answers).verdict();
        let no_answer = || Err("no answer".to_owned());
        assert_eq!(verdict(vec![Ok(served())]), HealthVerdict::Healthy);
        assert_eq!(verdict(vec![Ok(served()), no_answer()]), HealthVerdict::CannotTell);
        assert_eq!(verdict(vec![Ok(served()), no_answer(), Ok(broken())]), HealthVerdict::AtRisk);
    }

    #[test]
    fn a_service_that_npl_ignores_is_a_chain_with_one_broken_link() {
        let text = as_text(&broken());
        assert!(text.contains("──► enabled") && text.contains("the selector is empty"), "{text}");
        let json = serde_json::to_value(broken()).unwrap();
        assert_eq!(json["chains"][0]["links"][0]["holds"], "no", "{json}");
    }
}
