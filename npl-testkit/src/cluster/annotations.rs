// SPDX-License-Identifier: Apache-2.0
//! A record of every annotation that is written, with the time at which a watch shows it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;

use super::MAPPING_ANNOTATION;
use crate::api_client::ApiClient;
use crate::poll;

/// One value of a Pod's annotation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// When the watch showed it first.
    pub at: Instant,
    /// The value; nothing when the key is not there.
    pub value: Option<String>,
}

/// The history of the annotations of a namespace's Pods.
#[derive(Debug)]
pub struct AnnotationLog {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    error: Mutex<Option<String>>,
    pods: Mutex<BTreeMap<String, Vec<Seen>>>,
}

impl AnnotationLog {
    /// Starts with the Pods that are there; the watch ends by itself after `limit`.
    pub(super) fn start(client: &ApiClient, path: &str, limit: Duration) -> Result<Self> {
        let list = client.get(path)?;
        let version = list.pointer("/metadata/resourceVersion").and_then(Value::as_str).context("a list's version")?;
        let shared = Arc::new(Shared::default());
        for pod in list.get("items").and_then(Value::as_array).into_iter().flatten() {
            shared.record(pod);
        }
        let (client, watch) = (client.clone(), format!("{path}?resourceVersion={version}"));
        let log = Self { shared: Arc::clone(&shared) };
        thread::spawn(move || {
            let followed = client.watch(&watch, limit, |event| {
                event.get("object").into_iter().for_each(|pod| shared.record(pod));
                !shared.stop.load(Ordering::Relaxed)
            });
            if let Err(err) = followed {
                *shared.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{err:#}"));
            }
        });
        Ok(log)
    }

    /// All values that a Pod's annotation has had, in order.
    pub fn history(&self, pod: &str) -> Vec<Seen> {
        self.shared.pods.lock().unwrap_or_else(PoisonError::into_inner).get(pod).cloned().unwrap_or_default()
    }

    /// Waits until the last value of a Pod's annotation is as `wanted` says.
    pub fn wait_for(&self, pod: &str, limit: Duration, wanted: impl Fn(Option<&str>) -> bool) -> Result<Seen> {
        let last = || self.history(pod).pop().filter(|seen| wanted(seen.value.as_deref()));
        let waited = poll::until(&format!("the annotation of Pod {pod}"), limit, last);
        let (seen, _) = match self.shared.error.lock().unwrap_or_else(PoisonError::into_inner).as_deref() {
            Some(err) => waited.with_context(|| format!("the watch of annotations ended: {err}"))?,
            None => waited?,
        };
        Ok(seen)
    }
}

impl Drop for AnnotationLog {
    fn drop(&mut self) {
        // The thread ends with the next event or at the watch's own end, whichever is first.
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn record(&self, pod: &Value) {
        let at = Instant::now();
        let Some(name) = pod.pointer("/metadata/name").and_then(Value::as_str) else { return };
        let value = mapping(pod).map(str::to_owned);
        let mut pods = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        let history = pods.entry(name.to_owned()).or_default();
        if history.last().is_none_or(|last| last.value != value) {
            history.push(Seen { at, value });
        }
    }
}

/// The agent's annotation of a Pod object.
pub(super) fn mapping(pod: &Value) -> Option<&str> {
    pod.pointer("/metadata/annotations")?.get(MAPPING_ANNOTATION)?.as_str()
}
