// SPDX-License-Identifier: Apache-2.0
//! Records every value of an annotation with the time at which a watch delivers it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::api_client::ApiClient;
use crate::poll;

/// One value of an annotation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The time at which the watch first delivered the value.
    pub at: Instant,
    /// The value; `None` if the annotation is absent.
    pub value: Option<String>,
}

/// The history of one annotation on the objects of a collection.
#[derive(Debug)]
pub struct AnnotationLog {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    error: Mutex<Option<String>>,
    objects: Mutex<BTreeMap<String, Vec<Seen>>>,
}

impl AnnotationLog {
    /// Starts to record, beginning with the values of existing objects. The recording ends after `limit`.
    pub(super) fn start(client: &ApiClient, path: &str, key: &'static str, limit: Duration) -> Result<Self> {
        let list = client.get(path)?;
        let version = list
            .pointer("/metadata/resourceVersion")
            .and_then(Value::as_str)
            .context("the list has no resource version")?;
        let shared = Arc::new(Shared::default());
        for object in list.get("items").and_then(Value::as_array).into_iter().flatten() {
            shared.record(object, key);
        }
        let (client, path, version) = (client.clone(), path.to_owned(), version.to_owned());
        let log = Self { shared: Arc::clone(&shared) };
        thread::spawn(move || {
            if let Err(err) = shared.follow(&client, &path, version, key, limit) {
                *shared.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{err:#}"));
            }
        });
        Ok(log)
    }

    /// Returns all values that an object's annotation has had, in order.
    pub fn history(&self, name: &str) -> Vec<Seen> {
        self.shared.objects.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned().unwrap_or_default()
    }

    /// Waits until the last value of an object's annotation satisfies `wanted`.
    pub fn wait_for(&self, name: &str, limit: Duration, wanted: impl Fn(Option<&str>) -> bool) -> Result<Seen> {
        let last = || self.history(name).pop().filter(|seen| wanted(seen.value.as_deref()));
        let waited = poll::until(&format!("the annotation of {name}"), limit, last);
        let (seen, _) = match self.shared.error.lock().unwrap_or_else(PoisonError::into_inner).as_deref() {
            Some(err) => waited.with_context(|| format!("the watch of annotations failed: {err}"))?,
            None => waited?,
        };
        Ok(seen)
    }
}

impl Drop for AnnotationLog {
    fn drop(&mut self) {
        // The recording thread reads this flag at the next event, or at the end of its watch.
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    /// Watches until `limit` has passed. If the API server closes a watch, for example because the reader is slow, the
    /// next watch resumes at the last version.
    fn follow(&self, client: &ApiClient, path: &str, mut version: String, key: &str, limit: Duration) -> Result<()> {
        let began = Instant::now();
        let is_stopped = || self.stop.load(Ordering::Relaxed);
        while let Some(left) = limit.checked_sub(began.elapsed()).filter(|_| !is_stopped()) {
            let mut is_expired = false;
            client.watch(&format!("{path}?resourceVersion={version}"), left, |event| {
                is_expired = event.get("type").and_then(Value::as_str) == Some("ERROR");
                let Some(object) = event.get("object").filter(|_| !is_expired) else { return false };
                self.record(object, key);
                if let Some(newer) = object.pointer("/metadata/resourceVersion").and_then(Value::as_str) {
                    newer.clone_into(&mut version);
                }
                !is_stopped()
            })?;
            ensure!(!is_expired, "resource version {version} of {path} has expired");
        }
        Ok(())
    }

    fn record(&self, object: &Value, key: &str) {
        let at = Instant::now();
        let Some(name) = object.pointer("/metadata/name").and_then(Value::as_str) else { return };
        let value = annotation(object, key).map(str::to_owned);
        let mut objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        let history = objects.entry(name.to_owned()).or_default();
        if history.last().is_none_or(|last| last.value != value) {
            history.push(Seen { at, value });
        }
    }
}

/// Returns the value of an object's annotation.
pub(super) fn annotation<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object.pointer("/metadata/annotations")?.get(key)?.as_str()
}
