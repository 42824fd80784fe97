// SPDX-License-Identifier: Apache-2.0
//! Measures when a watch first delivers the address, the annotation and the readiness of each of many new Pods.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;

use super::is_ready;
use crate::api_client::ApiClient;
use crate::cluster::{Entry, annotation_of, pods_with_label};

/// The longest duration of one watch request.
const WATCH_LIMIT: Duration = Duration::from_secs(10);

/// The times at which the states of one Pod were first observed.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// The Pod object exists.
    pub created: Option<Instant>,
    /// The Pod has an address.
    pub addressed: Option<Instant>,
    /// The Pod has its annotation.
    pub annotated: Option<Instant>,
    /// The Pod is ready.
    pub ready: Option<Instant>,
    /// The node address and node port of the Pod's only mapping.
    pub frontend: Option<SocketAddr>,
}

impl Seen {
    /// Whether the Pod is ready and annotated.
    fn is_complete(&self) -> bool {
        self.ready.is_some() && self.annotated.is_some()
    }

    /// The time from the Pod's annotation to its readiness. `None` if the Pod became ready without the annotation, or
    /// if one update contained both.
    pub fn margin(&self) -> Option<Duration> {
        self.ready?.checked_duration_since(self.annotated?).filter(|margin| !margin.is_zero())
    }

    /// The time from the Pod's address to its annotation.
    pub fn delay(&self) -> Option<Duration> {
        self.annotated?.checked_duration_since(self.addressed?)
    }
}

/// Calls `make`, which creates Pods with a label such as `app=web` in a namespace. Watches until `count` of these Pods
/// are ready and annotated, or until no further Pod has become ready and annotated for the duration of `limit`.
pub fn watch_pods(
    client: &ApiClient,
    namespace: &str,
    label: &str,
    count: usize,
    limit: Duration,
    make: impl FnOnce() -> Result<()>,
) -> Result<BTreeMap<String, Seen>> {
    let path = pods_with_label(namespace, label);
    let version = version(&client.get(&path)?)?;
    thread::scope(|scope| {
        let watching = scope.spawn(|| follow(client, &path, version, count, limit));
        make()?;
        watching.join().map_err(|_panic| anyhow!("the watch of {namespace} panicked"))?
    })
}

/// Watches from a resource version. The server closes watches with slow readers, and every watch after some time. The
/// next watch resumes at the last version, so no change is missed.
fn follow(
    client: &ApiClient,
    path: &str,
    mut version: String,
    count: usize,
    limit: Duration,
) -> Result<BTreeMap<String, Seen>> {
    let (mut pods, mut complete, mut progress) = (BTreeMap::<String, Seen>::new(), 0, Instant::now());
    while complete < count && progress.elapsed() < limit {
        let (left, mut refused) = (limit.saturating_sub(progress.elapsed()), None);
        client.watch(&format!("{path}&resourceVersion={version}"), left.min(WATCH_LIMIT), |event| {
            record(&mut pods, &event["object"]);
            match self::version(&event["object"]) {
                Ok(reached) => version = reached,
                Err(_none) => refused = Some(event),
            }
            let now_complete = pods.values().filter(|seen| seen.is_complete()).count();
            if now_complete > complete {
                (complete, progress) = (now_complete, Instant::now());
            }
            refused.is_none() && complete < count
        })?;
        ensure!(refused.is_none(), "the watch of {path} ended with {refused:?}");
    }
    Ok(pods)
}

/// Returns the resource version of a list or of an object in an event.
fn version(shown: &Value) -> Result<String> {
    Ok(shown["metadata"]["resourceVersion"].as_str().context("the object has no resource version")?.to_owned())
}

fn record(pods: &mut BTreeMap<String, Seen>, pod: &Value) {
    let now = Instant::now();
    let Some(name) = pod.pointer("/metadata/name").and_then(Value::as_str) else { return };
    let seen = pods.entry(name.to_owned()).or_default();
    seen.created.get_or_insert(now);
    if pod.pointer("/status/podIP").is_some() {
        seen.addressed.get_or_insert(now);
    }
    // If annotation and readiness arrive in one update, both get the same time, so the Pod does not count as annotated
    // before it was ready.
    if is_ready(pod) {
        seen.ready.get_or_insert(now);
    }
    let annotation = annotation_of(pod);
    if let Some([entry]) = annotation.and_then(|text| Entry::parse(text).ok()).as_deref() {
        seen.annotated.get_or_insert(now);
        seen.frontend = Some(entry.address());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::{Seen, record};

    #[test]
    fn annotation_and_readiness_in_one_update_have_no_margin() {
        let annotation = r#"[{"podPort":1,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp"}]"#;
        let annotated = json!({"name": "a", "annotations": {"nodeportlocal.antrea.io": annotation}});
        let ready = json!({"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]});
        let mut pods = BTreeMap::<String, Seen>::new();
        record(&mut pods, &json!({"metadata": &annotated, "status": &ready}));
        assert!(pods["a"].margin().is_none() && pods["a"].frontend.is_some());
        pods.clear();
        record(&mut pods, &json!({"metadata": &annotated, "status": {"podIP": "10.0.0.1"}}));
        record(&mut pods, &json!({"metadata": &annotated, "status": &ready}));
        assert!(pods["a"].margin().is_some() && pods["a"].delay().is_some());
    }
}
