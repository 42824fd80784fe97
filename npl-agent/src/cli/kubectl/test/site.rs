// SPDX-License-Identifier: Apache-2.0
//! Chooses the Nodes on which the echo Pods run, and reads facts about these Nodes and their agents.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::{
    cli::kubectl::{
        Kubectl, is_ready, items_at,
        nodes::{AgentPod, agents, exec},
        text_at,
    },
    config::{kubectl_args::TestArgs, value},
    core::model::{Protocol, sources::SourceRange},
};

/// The maximum number of Nodes of a test.
const NODES: usize = 2;

/// A Node on which the test runs, with facts about the Node's agent.
#[derive(Debug, Clone, Default)]
pub(super) struct Site {
    pub(super) node: String,
    pub(super) agent: AgentPod,
    /// The addresses in the Node object.
    pub(super) node_ips: BTreeSet<IpAddr>,
    /// The addresses of all devices of the Node; empty if they are unknown.
    pub(super) device_ips: BTreeSet<IpAddr>,
    pub(super) pod_ranges: BTreeSet<SourceRange>,
}

impl Site {
    fn variable(&self, name: &str) -> Option<&str> {
        self.agent.variables.get(name).map(String::as_str)
    }

    /// Returns the protocols that the agent maps; the default of `--protocols` is tcp,udp.
    pub(super) fn protocols(&self) -> BTreeSet<Protocol> {
        let named = self.variable("NPL_PROTOCOLS").and_then(|text| value::protocols(text).ok());
        named.unwrap_or_else(|| [Protocol::Tcp, Protocol::Udp].into())
    }

    /// Returns whether the agent serves clients in Pods of the Node.
    pub(super) fn serves_local_pods(&self) -> bool {
        self.variable("NPL_LOCAL_CLIENTS") != Some("host") && self.variable("NPL_CGROUP") != Some("none")
    }

    /// Returns the agent's drain time; the default of `--drain` is 30s.
    pub(super) fn drain(&self) -> Duration {
        let named = self.variable("NPL_DRAIN").and_then(|text| value::duration(text).ok());
        named.unwrap_or(Duration::from_secs(30))
    }

    /// Returns the value of the agent's `--service-selector`; `None` if the flag is not set.
    pub(super) fn service_selector(&self) -> Option<&str> {
        self.variable("NPL_SERVICE_SELECTOR").filter(|text| !text.is_empty())
    }

    /// Returns the value of the agent's `--namespaces`; `None` if the agent reads the Services of all namespaces.
    pub(super) fn namespaces(&self) -> Option<&str> {
        self.variable("NPL_NAMESPACES").filter(|text| !text.is_empty())
    }

    /// Reads the addresses of the Node's devices in the agent's Pod, which runs on the host network. If the agent's
    /// version has no command that prints the addresses, the addresses remain unknown.
    fn with_device_ips(mut self, kubectl: Kubectl<'_>) -> Self {
        let output = exec(kubectl, &self.agent, &["echo", "addresses"]);
        self.device_ips = output.ok().and_then(|(_code, text)| serde_json::from_str(&text).ok()).unwrap_or_default();
        self
    }
}

/// Returns the Nodes of the test: the Nodes that the user has chosen. If the user has chosen none, returns the first
/// Nodes that are ready, are not cordoned and have a running agent.
pub(super) fn choose(kubectl: Kubectl<'_>, args: &TestArgs) -> anyhow::Result<Vec<Site>> {
    ensure!(args.node.len() <= NODES, "the test uses at most {NODES} Nodes");
    let mut agents = agents(kubectl)?;
    agents.retain(|_node, agent| agent.is_running);
    ensure!(
        !agents.is_empty(),
        "no agent runs in namespace {}: `kubectl npl status` shows the cause",
        kubectl.connection.agent_namespace
    );
    let nodes = kubectl.list(&["nodes"])?;
    if args.node.is_empty() {
        let is_cordoned =
            |node: &Value| node.pointer("/spec/unschedulable").and_then(Value::as_bool).unwrap_or_default();
        let ready = nodes.iter().filter(|node| is_ready(node) && !is_cordoned(node));
        let sites: Vec<Site> = ready.filter_map(|node| site(node, &agents)).take(NODES).collect();
        ensure!(!sites.is_empty(), "no Node with a running agent is ready and schedulable");
        return Ok(sites.into_iter().map(|site| site.with_device_ips(kubectl)).collect());
    }
    let wanted: BTreeSet<&String> = args.node.iter().collect();
    let named = wanted.into_iter().map(|name| {
        let node = nodes.iter().find(|node| text_at(node, "/metadata/name") == name);
        let node = node.with_context(|| format!("the cluster has no Node {name}"))?;
        let site = site(node, &agents);
        let site =
            site.with_context(|| format!("no agent runs on Node {name}: `kubectl npl status` shows the cause"))?;
        Ok(site.with_device_ips(kubectl))
    });
    named.collect()
}

fn site(node: &Value, agents: &BTreeMap<String, AgentPod>) -> Option<Site> {
    let name = text_at(node, "/metadata/name");
    let (addresses, ranges) = (items_at(node, "/status/addresses"), items_at(node, "/spec/podCIDRs"));
    Some(Site {
        node: name.to_owned(),
        agent: agents.get(name)?.clone(),
        node_ips: addresses.filter_map(|it| text_at(it, "/address").parse().ok()).collect(),
        device_ips: BTreeSet::new(),
        pod_ranges: ranges.filter_map(|it| it.as_str()?.parse().ok()).collect(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with_variables(variables: &[(&str, &str)]) -> Site {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let agent = AgentPod { name: "npl-agent-x".to_owned(), variables: variables.collect(), ..AgentPod::default() };
        let node = json!({
            "metadata": {"name": "node-1"},
            "spec": {"podCIDRs": ["10.244.1.0/24"]},
            "status": {"addresses": [
                {"type": "InternalIP", "address": "192.0.2.1"}, {"type": "Hostname", "address": "node-1"},
            ]},
        });
        site(&node, &[("node-1".to_owned(), agent)].into()).unwrap()
    }

    #[test]
    fn the_agents_variables_decide_what_can_be_tried() {
        let default = with_variables(&[("NPL_CGROUP", "/cgroup")]);
        assert_eq!(default.protocols(), [Protocol::Tcp, Protocol::Udp].into());
        assert!(default.serves_local_pods());
        assert_eq!(default.drain(), Duration::from_secs(30));
        assert_eq!(default.node_ips, ["192.0.2.1".parse().unwrap()].into());
        let set = with_variables(&[
            ("NPL_PROTOCOLS", "tcp,sctp"),
            ("NPL_LOCAL_CLIENTS", "host"),
            ("NPL_DRAIN", "1m"),
            ("NPL_SERVICE_SELECTOR", "team==a,zone in (c,d)"),
            ("NPL_NAMESPACES", "shop"),
        ]);
        assert_eq!(set.protocols(), [Protocol::Tcp, Protocol::Sctp].into());
        assert!(!set.serves_local_pods());
        assert_eq!(set.drain(), Duration::from_mins(1));
        assert_eq!((set.namespaces(), default.namespaces()), (Some("shop"), None));
        assert_eq!(with_variables(&[("NPL_NAMESPACES", "")]).namespaces(), None);
        assert_eq!((set.service_selector(), default.service_selector()), (Some("team==a,zone in (c,d)"), None));
    }
}
