// SPDX-License-Identifier: Apache-2.0
//! The documents of the whole cluster. Each document has a fixed list of fields, so that the archive contains no
//! environment variable, and no label or annotation of an object.

use std::{collections::BTreeMap, time::Duration};

use serde_json::{Value, json};

use crate::cli::{
    bundle::document,
    kubectl::{Kubectl, check, cluster, is_ready, items_at, mappings, nodes::AgentPod, text_at},
};

/// The archive contains only inconsistencies that last for this time, which is the default of `kubectl npl check
/// --settle`.
const SETTLE: Duration = Duration::from_secs(3);

pub(super) fn mappings(kubectl: Kubectl<'_>) -> anyhow::Result<Value> {
    document(mappings::rows(&cluster::read(kubectl, None)?, None))
}

pub(super) fn check(kubectl: Kubectl<'_>) -> anyhow::Result<Value> {
    document(check::lasting(kubectl, None, SETTLE)?)
}

/// Returns the fields of Node objects that NPL uses, and the versions of the Nodes' software.
pub(super) fn nodes(nodes: &[Value]) -> Value {
    let fields = |node: &Value| {
        let info = |field: &str| text_at(node, &format!("/status/nodeInfo/{field}")).to_owned();
        let addresses: Vec<Value> = items_at(node, "/status/addresses")
            .map(|address| json!({"type": text_at(address, "/type"), "address": text_at(address, "/address")}))
            .collect();
        json!({
            "name": text_at(node, "/metadata/name"),
            "ready": is_ready(node),
            "cordoned": node.pointer("/spec/unschedulable").and_then(Value::as_bool).unwrap_or_default(),
            "addresses": addresses,
            "kubelet": info("kubeletVersion"),
            "containerRuntime": info("containerRuntimeVersion"),
            "kernel": info("kernelVersion"),
            "osImage": info("osImage"),
            "architecture": info("architecture"),
        })
    };
    nodes.iter().map(fields).collect()
}

pub(super) fn agents(agents: &BTreeMap<String, AgentPod>) -> Value {
    let fields = |(node, agent): (&String, &AgentPod)| {
        json!({
            "node": node,
            "pod": agent.name,
            "image": agent.image,
            "running": agent.is_running,
            "state": agent.state,
        })
    };
    agents.iter().map(fields).collect()
}
