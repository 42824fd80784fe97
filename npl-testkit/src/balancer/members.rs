// SPDX-License-Identifier: Apache-2.0
//! Watches Pods, and reads the members of a load balancer's pools from their annotations.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::pool::Pool;
use crate::api_client::ApiClient;
use crate::cluster::annotation_of;
use crate::consumers::Ako;
use crate::echo::Protocol;
use crate::real_cluster::is_ready;

/// The duration of one watch, which limits how long a stopped balancer keeps watching.
const WATCH: Duration = Duration::from_secs(5);

/// The delay between attempts to watch while the API server is unavailable.
const AWAY: Duration = Duration::from_millis(100);

/// A port of a Service; the load balancer has one pool per port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// The target port, a Pod port.
    pub target: u16,
    /// The protocol. Consumers take the protocol from the Service, not from the annotation.
    pub protocol: Protocol,
}

/// One member of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The Pod whose annotation contains the member.
    pub pod: String,
    pub protocol: Protocol,
    /// The address to which requests are sent.
    pub server: SocketAddr,
}

/// Fills the pool and updates it from the API server until the pool is closed.
pub(super) fn follow(client: &ApiClient, namespace: &str, ports: &[Port], pool: &Arc<Pool>) -> Result<()> {
    let path = format!("/api/v1/namespaces/{namespace}/pods");
    let mut watcher =
        Watcher { client: client.clone(), path, ports: ports.to_vec(), pool: Arc::clone(pool), pods: BTreeMap::new() };
    let mut version = watcher.list()?;
    thread::spawn(move || {
        while !watcher.pool.is_closed() {
            // While the API server is unavailable, the balancer keeps the members that it knows. Afterwards, the
            // resource version of the watch may have expired, so the balancer reads a new list.
            if watcher.watch(&mut version).is_err() {
                thread::park_timeout(AWAY);
                if let Ok(newer) = watcher.list() {
                    version = newer;
                }
            }
        }
    });
    Ok(())
}

struct Watcher {
    client: ApiClient,
    path: String,
    ports: Vec<Port>,
    pool: Arc<Pool>,
    pods: BTreeMap<String, Vec<Member>>,
}

impl Watcher {
    fn list(&mut self) -> Result<String> {
        let list = self.client.get(&self.path)?;
        let items = list.get("items").and_then(Value::as_array).context("the list has no items")?;
        self.pods = items.iter().filter_map(|pod| Some((name(pod)?, members(pod, &self.ports)))).collect();
        self.publish();
        let version = list.pointer("/metadata/resourceVersion").and_then(Value::as_str);
        version.map(str::to_owned).context("the list has no resource version")
    }

    fn watch(&mut self, version: &mut String) -> Result<()> {
        let (client, path) = (self.client.clone(), format!("{}?resourceVersion={version}", self.path));
        let mut refused = None;
        client.watch(&path, WATCH, |event| {
            let Some(pod) = event.get("object") else { return false };
            if event["type"] == "ERROR" {
                refused = Some(event);
                return false;
            }
            if let Some(newer) = pod.pointer("/metadata/resourceVersion").and_then(Value::as_str) {
                newer.clone_into(version);
            }
            self.apply(pod, event["type"] == "DELETED");
            !self.pool.is_closed()
        })?;
        refused.map_or(Ok(()), |event| Err(anyhow::anyhow!("the watch was ended by {event}")))
    }

    fn apply(&mut self, pod: &Value, is_gone: bool) {
        let Some(name) = name(pod) else { return };
        let members = if is_gone { Vec::new() } else { members(pod, &self.ports) };
        if self.pods.get(&name).is_none_or(|before| *before != members) {
            self.pods.insert(name, members);
            self.publish();
        }
    }

    fn publish(&self) {
        self.pool.set(self.pods.values().flatten().cloned().collect());
    }
}

fn name(pod: &Value) -> Option<String> {
    pod.pointer("/metadata/name")?.as_str().map(str::to_owned)
}

/// Returns the members that AKO reads from the Pod's annotation. A Pod that is not ready, or is terminating, has none.
fn members(pod: &Value, ports: &[Port]) -> Vec<Member> {
    let annotation = annotation_of(pod);
    let is_leaving = pod.pointer("/metadata/deletionTimestamp").is_some();
    let (Some(annotation), Some(pod_name), true, false) = (annotation, name(pod), is_ready(pod), is_leaving) else {
        return Vec::new();
    };
    let of_port = |port: &Port| {
        let servers = Ako::Current.members(annotation, port.target, |_| true);
        let (pod, protocol) = (pod_name.clone(), port.protocol);
        servers.into_iter().map(move |server| Member { pod: pod.clone(), protocol, server })
    };
    ports.iter().flat_map(of_port).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cluster::MAPPING_ANNOTATION;

    const PORTS: [Port; 1] = [Port { target: 8080, protocol: Protocol::Tcp }];

    fn pod(ready: &str) -> Value {
        let annotation = r#"[{"podPort":8080,"nodeIP":"192.0.2.11","nodePort":61000,"protocol":"tcp"}]"#;
        json!({
            "metadata": {"name": "web-0", "annotations": {MAPPING_ANNOTATION: annotation}},
            "status": {"conditions": [{"type": "Ready", "status": ready}]},
        })
    }

    #[test]
    fn a_ready_pod_is_a_member() {
        let members = members(&pod("True"), &PORTS);
        let [member] = members.as_slice() else { panic!("{members:?}") };
        assert_eq!((member.pod.as_str(), member.server), ("web-0", ([192, 0, 2, 11], 61000).into()));
    }

    #[test]
    fn an_unready_or_terminating_pod_is_no_member() {
        assert_eq!(members(&pod("False"), &PORTS), []);
        let mut leaving = pod("True");
        leaving["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        assert_eq!(members(&leaving, &PORTS), []);
    }
}
