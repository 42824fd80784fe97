// SPDX-License-Identifier: Apache-2.0
//! Finds the agents' Pods, and runs commands in them.

use std::{collections::BTreeMap, convert::Infallible, process::ExitCode};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::{Kubectl, items_at, node_pod, parallel, text_at};
use crate::config::kubectl_args::OnArgs;

/// The label selector of the agents' Pods.
const SELECTOR: &str = "app.kubernetes.io/name=npl,app.kubernetes.io/component=agent";
/// The name of the agent's container.
pub(super) const CONTAINER: &str = "npl-agent";
/// The path of the binary `npl-agent` in the agents' image.
pub(super) const PROGRAM: &str = "/npl-agent";
/// The Pod of a Node's agent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct AgentPod {
    pub(super) name: String,
    pub(super) is_running: bool,
    /// The state of the agent's container, such as `waiting: CrashLoopBackOff, 7 restarts, last exit code 1`.
    pub(super) state: String,
    /// The image of the agent's container.
    pub(super) image: String,
    /// The environment variables of the agent's container that have a literal value.
    pub(super) variables: BTreeMap<String, String>,
}

/// Lists the agents' Pods, each by the name of the Pod's Node.
pub(super) fn agents(kubectl: Kubectl<'_>) -> anyhow::Result<BTreeMap<String, AgentPod>> {
    let namespace = &kubectl.connection.agent_namespace;
    let pods = kubectl.list(&["pods", "--namespace", namespace, "--selector", SELECTOR])?;
    let mut agents = BTreeMap::new();
    for pod in pods.iter().filter(|pod| pod.pointer("/metadata/deletionTimestamp").is_none()) {
        let is_running = container_is_running(pod);
        let (image, variables) = container(pod);
        let (name, state) = (text_at(pod, "/metadata/name").to_owned(), container_state(pod));
        let agent = AgentPod { name, is_running, state, image, variables };
        // While an agent is being replaced, its Node has two agent Pods. Of these two, the running Pod is used.
        let node = text_at(pod, "/spec/nodeName").to_owned();
        if is_running || !agents.contains_key(&node) {
            agents.insert(node, agent);
        }
    }
    Ok(agents)
}

/// Returns the image and the environment variables of the agent's container.
fn container(pod: &Value) -> (String, BTreeMap<String, String>) {
    let container = items_at(pod, "/spec/containers").find(|container| text_at(container, "/name") == CONTAINER);
    let Some(container) = container else { return (String::new(), BTreeMap::new()) };
    let variables = items_at(container, "/env").filter_map(|variable| {
        let value = variable.get("value")?.as_str()?;
        Some((text_at(variable, "/name").to_owned(), value.to_owned()))
    });
    (text_at(container, "/image").to_owned(), variables.collect())
}

fn container_is_running(pod: &Value) -> bool {
    items_at(pod, "/status/containerStatuses").any(|status| status.pointer("/state/running").is_some())
}

/// Describes the state of the agent's container. The field `message` of a state is left out, because it may contain
/// lines of the container's log.
fn container_state(pod: &Value) -> String {
    let status = items_at(pod, "/status/containerStatuses").find(|status| text_at(status, "/name") == CONTAINER);
    let Some(status) = status else { return format!("the Pod is {}", text_at(pod, "/status/phase")) };
    let state = match status.pointer("/state").and_then(Value::as_object).and_then(|state| state.iter().next()) {
        Some((kind, detail)) => {
            let reason = text_at(detail, "/reason");
            if reason.is_empty() { kind.clone() } else { format!("{kind}: {reason}") }
        }
        None => "waiting".to_owned(),
    };
    let restarts = status.pointer("/restartCount").and_then(Value::as_u64).unwrap_or_default();
    let of_last_end = ["/state/terminated/exitCode", "/lastState/terminated/exitCode"];
    let code = of_last_end.into_iter().find_map(|pointer| status.pointer(pointer)?.as_i64());
    let last_end = code.map(|code| format!(", last exit code {code}")).unwrap_or_default();
    format!("{state}, {restarts} restarts{last_end}")
}

/// Runs a command in an agent's Pod, and returns its exit code and standard output.
pub(super) fn exec(kubectl: Kubectl<'_>, agent: &AgentPod, arguments: &[&str]) -> anyhow::Result<(i32, String)> {
    kubectl.output(&exec_arguments(kubectl, agent, arguments))
}

/// Returns the arguments with which kubectl runs a command in an agent's Pod.
pub(super) fn exec_arguments<'a>(kubectl: Kubectl<'a>, agent: &'a AgentPod, arguments: &[&'a str]) -> Vec<&'a str> {
    let namespace = kubectl.connection.agent_namespace.as_str();
    exec_in([namespace, &agent.name, CONTAINER], &[], arguments)
}

/// Returns the arguments with which kubectl runs a command of `npl-agent` in a container.
pub(super) fn exec_in<'a>(
    [namespace, pod, container]: [&'a str; 3],
    options: &[&'a str],
    arguments: &[&'a str],
) -> Vec<&'a str> {
    let exec = ["exec", "--namespace", namespace, pod, "--container", container];
    [&exec, options, &["--", PROGRAM], arguments].concat()
}

/// Runs `work` for each Node, several at a time, and returns the results in the order of the Nodes.
pub(super) fn for_each<T: Send>(nodes: &[String], work: impl Fn(&str) -> T + Sync) -> Vec<T> {
    let mut results = BTreeMap::new();
    let accept = |index, _node: &String, result| {
        results.insert(index, result);
        Ok::<_, Infallible>(())
    };
    let Ok(()) = parallel::for_each(nodes, |node| work(node), accept);
    results.into_values().collect()
}

/// Runs a command of the agent on a Node, with this process's standard output, and returns the command's exit code.
pub(super) fn run_on(kubectl: Kubectl<'_>, args: &OnArgs) -> anyhow::Result<ExitCode> {
    let agents = agents(kubectl)?;
    let Some(agent) = agents.get(&args.node).filter(|agent| agent.is_running) else {
        let is_absent = !agents.contains_key(&args.node);
        ensure!(args.create_pod, "{}", no_agent(&kubectl.connection.agent_namespace, &args.node, is_absent));
        return node_pod::run(kubectl, args, image(args.image.as_deref(), &agents)?);
    };
    let arguments: Vec<&str> = args.arguments.iter().map(String::as_str).collect();
    let status = kubectl.command(&exec_arguments(kubectl, agent, &arguments)).status();
    let code = status.context("run kubectl: it must be on the PATH")?.code();
    Ok(code.and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Returns the reason why a command cannot run on a Node, with the remedy.
fn no_agent(namespace: &str, node: &str, is_absent: bool) -> String {
    let reason = if is_absent {
        format!("no agent's Pod is on Node {node}: namespace {namespace} has no Pod with the labels {SELECTOR} there")
    } else {
        format!("the agent's container on Node {node} does not run")
    };
    format!(
        "{reason}; with --create-pod, the command runs with the agent's rights in a new Pod, which is removed \
    afterwards"
    )
}

/// Returns the image for a Pod on a Node without a running agent: the `given` image, or that of another agent.
pub(super) fn image<'a>(given: Option<&'a str>, agents: &'a BTreeMap<String, AgentPod>) -> anyhow::Result<&'a str> {
    let used = || agents.values().map(|agent| agent.image.as_str()).find(|image| !image.is_empty());
    given.or_else(used).with_context(|| {
        format!(
            "no agent's Pod shows which image to use: give --image with an image of npl-agent {}",
            env!("CARGO_PKG_VERSION")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_is_that_of_the_flag_or_of_an_agent_on_another_node() {
        let agent = AgentPod { image: "registry.example/npl:1".to_owned(), ..AgentPod::default() };
        let agents = [("node-1".to_owned(), agent)].into();
        assert_eq!(image(None, &agents).unwrap(), "registry.example/npl:1");
        assert!(image(None, &BTreeMap::new()).unwrap_err().to_string().contains("give --image"));
        assert_eq!(image(Some("localhost/npl:2"), &agents).unwrap(), "localhost/npl:2");
    }

    #[test]
    fn the_state_of_a_container_names_the_reason_and_the_restarts() {
        let of = |status: Value| container_state(&serde_json::json!({"status": {"containerStatuses": [status]}}));
        let waiting = serde_json::json!({
            "name": CONTAINER,
            "restartCount": 7,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
            "lastState": {"terminated": {"exitCode": 1, "message": "a line of the log"}},
        });
        assert_eq!(of(waiting), "waiting: CrashLoopBackOff, 7 restarts, last exit code 1");
        let running = serde_json::json!({"name": CONTAINER, "restartCount": 0, "state": {"running": {}}});
        assert_eq!(of(running), "running, 0 restarts");
        assert_eq!(container_state(&serde_json::json!({"status": {"phase": "Pending"}})), "the Pod is Pending");
    }

    #[test]
    fn a_node_without_a_running_agent_is_named_with_the_remedy() {
        for (is_absent, reason) in [(true, "no agent's Pod is on Node n"), (false, "container on Node n does not run")]
        {
            let text = no_agent("npl-system", "n", is_absent);
            assert!(text.contains(reason) && text.contains("--create-pod"), "{text}");
        }
    }
}
