// SPDX-License-Identifier: Apache-2.0
//! A Namespace with the Pods of one command. The command removes the Namespace at its end.

use std::time::Duration;

use anyhow::{bail, ensure};
use serde_json::{Value, json};

use super::{Kubectl, interrupt::Interrupt, text_at};
use crate::cli::note;

/// The time limit for the removal of a Namespace.
const REMOVAL: Duration = Duration::from_mins(5);
/// The option of `kubectl delete` with the time limit of one attempt to remove a Namespace.
const ATTEMPT: &str = "--timeout=90s";
/// The number of attempts to remove a Namespace.
const ATTEMPTS: usize = 3;
/// The key of the label by which a later command finds Namespaces that were not removed.
pub(super) const NAME_LABEL: &str = "app.kubernetes.io/name";

/// The properties that all Namespaces of a command have.
#[derive(Debug)]
pub(super) struct Kind {
    /// The value of [`NAME_LABEL`], which is also the beginning of the Namespace's name.
    pub(super) label: &'static str,
    /// The level of Pod Security Admission.
    pub(super) level: &'static str,
}

/// A Namespace of one command.
#[derive(Debug)]
pub(super) struct TemporaryNamespace<'a> {
    kubectl: Kubectl<'a>,
    kind: &'static Kind,
    pub(super) name: String,
}

impl<'a> TemporaryNamespace<'a> {
    /// Chooses a random name, without creating the Namespace.
    pub(super) fn new(kubectl: Kubectl<'a>, kind: &'static Kind) -> Self {
        let suffix: String = std::iter::repeat_with(fastrand::lowercase).take(5).collect();
        Self { kubectl, kind, name: format!("{}-{suffix}", kind.label) }
    }

    /// Creates the Namespace.
    pub(super) fn create(&self) -> anyhow::Result<()> {
        let labels = json!({NAME_LABEL: self.kind.label, "pod-security.kubernetes.io/enforce": self.kind.level});
        let metadata = json!({"name": self.name, "labels": labels});
        self.kubectl.create(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}))
    }

    /// Returns an object that is in the Namespace and has only metadata.
    pub(super) fn object(&self, kind: &str, name: &str) -> Value {
        let metadata = json!({"name": name, "namespace": self.name, "labels": {NAME_LABEL: self.kind.label}});
        json!({"apiVersion": "v1", "kind": kind, "metadata": metadata})
    }

    /// Waits until every Pod of the Namespace runs.
    pub(super) fn wait_for_pods(&self, interrupt: &Interrupt, limit: Duration) -> anyhow::Result<()> {
        self.wait_for(&[], interrupt, limit)
    }

    /// Waits until one Pod of the Namespace runs.
    pub(super) fn wait_for_pod(&self, pod: &str, interrupt: &Interrupt, limit: Duration) -> anyhow::Result<()> {
        self.wait_for(&["--field-selector", &format!("metadata.name={pod}")], interrupt, limit)
    }

    fn wait_for(&self, selection: &[&str], interrupt: &Interrupt, limit: Duration) -> anyhow::Result<()> {
        let arguments = [&["pods", "--namespace", &self.name], selection].concat();
        let mut obstacles = Vec::new();
        let are_running = interrupt.until(limit, || {
            obstacles.clear();
            for pod in self.kubectl.list(&arguments)? {
                match progress(&pod) {
                    Progress::Running => {}
                    Progress::Waiting(reason) => obstacles.push(reason),
                    Progress::Ended(reason) => {
                        bail!("{reason}: give --image if the agent's image is older than this command")
                    }
                }
            }
            Ok(obstacles.is_empty().then_some(()))
        })?;
        ensure!(are_running.is_some(), "after {} s: {}", limit.as_secs(), obstacles.join("; "));
        Ok(())
    }

    /// Removes the Namespace with all objects. If the removal fails, writes a command for the user to standard error,
    /// and returns `false`.
    pub(super) fn remove(&self, interrupt: &Interrupt) -> bool {
        note(&format!(
            "removing Namespace {}; a Ctrl-C now ends this command and leaves the Namespace behind",
            self.name
        ));
        let removed = self.try_remove(&interrupt.renewed(REMOVAL));
        if let Err(error) = &removed {
            let remedy = self.kubectl.line(&["delete", "namespace", &self.name]);
            note(&format!("Namespace {} is left behind; remove it with `{remedy}`: {error:#}", self.name));
        }
        removed.is_ok()
    }

    fn try_remove(&self, limit: &Interrupt) -> anyhow::Result<()> {
        let arguments = ["namespace", &self.name, "--ignore-not-found", "--wait", ATTEMPT];
        let (mut last, mut attempts) = (Ok(()), 0);
        let removed = limit.until(REMOVAL, || {
            attempts += 1;
            last = self.kubectl.within(limit).delete(&arguments);
            Ok((last.is_ok() || attempts == ATTEMPTS).then_some(()))
        });
        // kubectl's error is more specific than the error of the time limit, so kubectl's error takes precedence.
        last.and(removed.map(drop))
    }
}

/// Writes to standard error the names of Namespaces that another command of this kind has created and not yet removed.
pub(super) fn name_leftovers(kubectl: Kubectl<'_>, kind: &Kind) -> anyhow::Result<()> {
    let selector = format!("{NAME_LABEL}={}", kind.label);
    for namespace in kubectl.list(&["namespaces", "--selector", &selector])? {
        if let Some(name) = leftover(&namespace, kind) {
            let remedy = kubectl.line(&["delete", "namespace", name]);
            note(&format!("another command has created Namespace {name}: if that command has ended, run `{remedy}`"));
        }
    }
    Ok(())
}

/// Returns the name of the Namespace if a command of this kind created the Namespace and the Namespace is not being
/// removed. Other Namespaces may have the same label, so the beginning of the name is checked too.
fn leftover<'a>(namespace: &'a Value, kind: &Kind) -> Option<&'a str> {
    let is_being_removed = namespace.pointer("/metadata/deletionTimestamp").is_some();
    let is_own = |name: &&str| name.strip_prefix(kind.label).is_some_and(|suffix| suffix.starts_with('-'));
    Some(text_at(namespace, "/metadata/name")).filter(|name| !is_being_removed && is_own(name))
}

/// The state of a Pod's container.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    Running,
    Waiting(String),
    Ended(String),
}

fn progress(pod: &Value) -> Progress {
    let name = text_at(pod, "/metadata/name");
    let state = |pointer: &str| pod.pointer(&format!("/status/containerStatuses/0{pointer}"));
    if let Some(ended) = state("/lastState/terminated").or_else(|| state("/state/terminated")) {
        let message = text_at(ended, "/message").trim_end();
        return Progress::Ended(format!(
            "the container of Pod {name} has ended: {} {message}",
            text_at(ended, "/reason")
        ));
    }
    if text_at(pod, "/status/phase") == "Failed" {
        let (reason, message) = (text_at(pod, "/status/reason"), text_at(pod, "/status/message"));
        return Progress::Ended(format!("Pod {name} has failed: {reason} {message}"));
    }
    if state("/state/running").is_some() {
        return Progress::Running;
    }
    let text = |pointer| state(pointer).and_then(Value::as_str).unwrap_or_default();
    let reason = format!("{} {}", text("/state/waiting/reason"), text("/state/waiting/message"));
    Progress::Waiting(format!("Pod {name} does not run: {}", reason.trim()))
}

#[cfg(test)]
#[path = "temporary_tests.rs"]
mod tests;
