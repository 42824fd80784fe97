// SPDX-License-Identifier: Apache-2.0
//! Retires every Node before an uninstallation: sets `NPL_RETIRE` on the agents' DaemonSets, and waits until each Node
//! runs a ready agent of a template that contains this variable. Such an agent becomes ready only when its Node is
//! retired.

use std::{path::PathBuf, time::Duration};

use k8s_openapi::api::apps::v1::DaemonSet;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{
    client::{self, ConnectError, bounded},
    failure::{FailureKind, root_cause},
};

/// The time between two requests about a DaemonSet, and the delay before a failed request is repeated.
const EVERY: Duration = Duration::from_secs(1);

/// The DaemonSets of the agents to retire.
#[derive(Debug, Clone)]
pub struct Target {
    /// The kubeconfig file to use; with `None`, the service account of this Pod is used.
    pub kubeconfig: Option<PathBuf>,
    /// The namespace of the DaemonSets; with `None`, the namespace of the kubeconfig or of this Pod is used.
    pub namespace: Option<String>,
    /// The names of the DaemonSets.
    pub daemon_sets: Vec<String>,
    /// The maximum time to wait until every Node is retired.
    pub timeout: Duration,
}

/// Why the retirement of all Nodes failed.
#[derive(Debug, thiserror::Error)]
pub enum RetireError {
    /// The client for the API server cannot be created.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The API server refused a request.
    #[error("{action} DaemonSet {name}: {reason}; grant get and patch on this DaemonSet")]
    Refused {
        /// The action that the API server refused.
        action: &'static str,
        /// The name of the DaemonSet.
        name: String,
        /// The message with which the API server refused the request.
        reason: String,
    },
    /// The time limit has passed before every Node was retired.
    #[error(
        "{progress} after {timeout:?}: the agents' logs on the other Nodes state why; repeat the command, or uninstall \
         NPL without this command and remove the remaining kernel state with deploy/cleanup.yaml"
    )]
    TimedOut {
        /// The progress when the time limit passed.
        progress: Progress,
        /// The time limit for the retirement of all Nodes.
        timeout: Duration,
    },
}

/// The progress of the retirement: how many of the Nodes are retired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// The number of Nodes that should run an agent.
    pub nodes: i32,
    /// The minimum number of retired Nodes: the Nodes that certainly have a ready agent of a changed template.
    pub retired: i32,
    /// Whether `nodes` and `retired` already refer to the changed templates of the DaemonSets.
    pub is_current: bool,
}

impl Progress {
    /// Reads the status that the DaemonSet controller has written.
    fn of(daemon_set: &DaemonSet) -> Self {
        let Some(status) = &daemon_set.status else { return Self::default() };
        let (nodes, updated, ready) =
            (status.desired_number_scheduled, status.updated_number_scheduled.unwrap_or(0), status.number_ready);
        // `number_ready` also counts Pods of the earlier template. Even if all `nodes - updated` Pods of the earlier
        // template are ready, at least `ready - (nodes - updated)` Pods of the changed template are ready.
        let retired = (updated + ready - nodes).clamp(0, updated);
        Self { nodes, retired, is_current: status.observed_generation >= daemon_set.metadata.generation }
    }

    /// Adds the Nodes of another DaemonSet.
    fn and(self, other: Self) -> Self {
        Self {
            nodes: self.nodes + other.nodes,
            retired: self.retired + other.retired,
            is_current: self.is_current && other.is_current,
        }
    }

    fn is_complete(self) -> bool {
        self.is_current && self.retired == self.nodes
    }
}

impl std::fmt::Display for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_current {
            write!(f, "{} of {} Nodes are retired", self.retired, self.nodes)
        } else {
            write!(f, "the DaemonSet controller has not seen the change yet")
        }
    }
}

/// The retirement of the Nodes of one DaemonSet.
#[derive(Debug)]
struct Retirement<'a> {
    name: &'a str,
    /// Whether `NPL_RETIRE` is set.
    is_set: bool,
    /// The last known progress; `None` if the DaemonSet does not exist.
    progress: Option<Progress>,
}

impl<'a> Retirement<'a> {
    fn of(name: &'a str) -> Self {
        Self { name, is_set: false, progress: Some(Progress::default()) }
    }

    fn is_complete(&self) -> bool {
        self.progress.is_none_or(Progress::is_complete)
    }

    /// Sets `NPL_RETIRE`, or reads the progress if the variable is set. If the API server does not answer, or answers
    /// with a temporary error, this call changes nothing, and the next call repeats the request: the API server may be
    /// restarting.
    async fn advance(&mut self, daemon_sets: &Api<DaemonSet>) -> Result<(), RetireError> {
        let name = self.name;
        let (action, answer) = if self.is_set {
            ("get", bounded(daemon_sets.get(name)).await)
        } else {
            let patch = Patch::Strategic(retiring());
            ("patch", bounded(daemon_sets.patch(name, &PatchParams::default(), &patch)).await)
        };
        match answer {
            Ok(daemon_set) => {
                self.is_set = true;
                self.progress = Some(Progress::of(&daemon_set));
            }
            Err(kube::Error::Api(status)) if status.code == 404 => self.progress = None,
            Err(err) if matches!(FailureKind::of(&err), FailureKind::Forbidden | FailureKind::Rejected) => {
                return Err(RetireError::Refused { action, name: name.to_owned(), reason: root_cause(&err) });
            }
            Err(_) => {}
        }
        Ok(())
    }
}

/// Sets `NPL_RETIRE` on the agents, reports the progress, and returns when every Node is retired. A DaemonSet that does
/// not exist has no Nodes to retire.
///
/// # Errors
///
/// If the client cannot be created, if the API server refuses a request, or if the time limit has passed.
pub async fn retire_all(target: &Target, mut report: impl FnMut(Progress)) -> Result<(), RetireError> {
    let (client, _url) = client::open(target.kubeconfig.as_deref(), "npl-agent").await?;
    let daemon_sets = match &target.namespace {
        Some(namespace) => Api::namespaced(client, namespace),
        None => Api::default_namespaced(client),
    };
    retire(&daemon_sets, target, &mut report).await
}

async fn retire(
    daemon_sets: &Api<DaemonSet>,
    target: &Target,
    report: &mut impl FnMut(Progress),
) -> Result<(), RetireError> {
    let started = Instant::now();
    let mut retirements: Vec<_> = target.daemon_sets.iter().map(|name| Retirement::of(name)).collect();
    let mut last = Progress::default();
    while started.elapsed() < target.timeout {
        for retirement in retirements.iter_mut().filter(|it| !it.is_complete()) {
            retirement.advance(daemon_sets).await?;
        }
        let progress = retirements.iter().filter_map(|it| it.progress).reduce(Progress::and);
        if let Some(progress) = progress.filter(|progress| *progress != last) {
            report(progress);
            last = progress;
        }
        if retirements.iter().all(Retirement::is_complete) {
            return Ok(());
        }
        sleep(EVERY).await;
    }
    Err(RetireError::TimedOut { progress: last, timeout: target.timeout })
}

/// Builds the patch of the DaemonSet. The patch retires all Nodes at the same time. A gradual retirement would not keep
/// Pods reachable, because no other Node serves the Pods of a retired Node.
fn retiring() -> Value {
    let env = json!([{ "name": "NPL_RETIRE", "value": "true" }]);
    json!({ "spec": {
        "updateStrategy": { "rollingUpdate": { "maxUnavailable": "100%" } },
        "template": { "spec": { "containers": [{ "name": "npl-agent", "env": env }] } },
    } })
}

#[cfg(test)]
#[path = "retire_tests.rs"]
mod tests;
