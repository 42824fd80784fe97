// SPDX-License-Identifier: Apache-2.0
//! Measures the API server's own speed, without the agent: a client sends the patches that an agent would send, and
//! does no other work.

use std::time::Instant;

use anyhow::{Result, anyhow};
use npl_testkit::api_client::ApiClient;
use npl_testkit::cluster::MAPPING_ANNOTATION;
use serde_json::{Value, json};

use super::environment::{Environment, LIMIT, NAMESPACE, OTHER_NODE, share_out};

/// The number of connections. An agent also sends at most this number of patches concurrently.
const CONNECTIONS: usize = 8;

/// The client that sends the patches: its connections, and the Pods whose annotations it patches. No agent runs on the
/// Node of these Pods.
#[derive(Debug)]
pub(crate) struct Plain {
    pub(crate) pods: Vec<String>,
    clients: Vec<ApiClient>,
    written: usize,
}

impl Plain {
    /// Creates the Pods.
    pub(crate) fn new(env: &Environment<'_>, pods: Vec<String>) -> Result<Self> {
        env.create_pods(&pods, OTHER_NODE, "plain")?;
        env.run_pods(&pods)?;
        let clients: Result<_> = (0..CONNECTIONS).map(|_| Ok(env.plane.client()?.from_inside())).collect();
        Ok(Self { pods, clients: clients?, written: 0 })
    }

    /// Returns the time in milliseconds from sending a patch until the watch delivers the event of this patch.
    pub(crate) fn one(&mut self, env: &Environment<'_>, number: usize) -> Result<f64> {
        let value = self.new_value();
        let pod = self.pods.get(number % self.pods.len()).ok_or_else(|| anyhow!("no Pods to patch"))?;
        let client = self.clients.first().ok_or_else(|| anyhow!("no connection"))?;
        let began = Instant::now();
        annotate(client, pod, Some(&value))?;
        let seen = env.annotations.wait_for(pod, LIMIT, |now| now == Some(&value))?;
        Ok(seen.at.duration_since(began).as_secs_f64() * 1e3)
    }

    /// Patches each of the first `count` Pods once. Returns the time in seconds until the watch has delivered the last
    /// event.
    pub(crate) fn all(&mut self, env: &Environment<'_>, count: usize) -> Result<f64> {
        let value = self.new_value();
        self.timed(env, count, &[Some(&value)])
    }

    /// Patches the Pods as [`Self::all`] does, with the two patches of a withdrawal: one writes an empty list, and the
    /// other removes the annotation. Returns the time as [`Self::all`] does.
    pub(crate) fn all_withdrawn(&mut self, env: &Environment<'_>, count: usize) -> Result<f64> {
        let value = self.new_value();
        self.timed(env, count, &[Some(&value)])?;
        self.timed(env, count, &[Some("[]"), None])
    }

    fn timed(&self, env: &Environment<'_>, count: usize, values: &[Option<&str>]) -> Result<f64> {
        let pods = self.pods.get(..count).ok_or_else(|| anyhow!("fewer than {count} Pods to patch"))?;
        env.collect_garbage()?;
        let began = Instant::now();
        patch(&self.clients, pods, values)?;
        let last = env.wait_for_all(pods, |now| values.last() == Some(&now))?;
        Ok(last.duration_since(began).as_secs_f64())
    }

    /// Removes the annotations of Pods.
    pub(crate) fn clear(&self, pods: &[String]) -> Result<()> {
        patch(&self.clients, pods, &[None])
    }

    /// Returns a new value of the same length as an agent's annotation. The value must differ from the previous value,
    /// because a patch without a change would be cheaper.
    fn new_value(&mut self) -> String {
        self.written += 1;
        let node_port = 20_000 + self.written;
        json!([{
            "podPort": 8080,
            "nodeIP": "192.0.2.20",
            "nodePort": node_port,
            "protocol": "tcp",
            "protocols": ["tcp"],
        }])
        .to_string()
    }
}

fn patch(clients: &[ApiClient], pods: &[String], values: &[Option<&str>]) -> Result<()> {
    share_out(clients, pods, |client, pod| values.iter().try_for_each(|value| annotate(client, pod, *value)))
}

fn annotate(client: &ApiClient, pod: &str, value: Option<&str>) -> Result<()> {
    let value = value.map_or(Value::Null, Value::from);
    let patch = json!({"metadata": {"annotations": {MAPPING_ANNOTATION: value}}});
    client.merge_patch_unread(&format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}/status"), &patch)
}
