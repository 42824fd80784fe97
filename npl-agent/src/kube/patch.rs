// SPDX-License-Identifier: Apache-2.0
//! Patches the mapping annotation and the readiness gate's condition of Pods. Both patches use the subresource
//! `pods/status`, so that the agent needs no permission to change the spec of Pods.

use std::{sync::Arc, time::Duration};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    Client, Resource,
    api::{Patch, PatchParams},
    client::Body,
    core::{Request, Status},
};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::{
    convert::{self, AnnotationKeys},
    failure::{FailureKind, retry_after, root_cause},
    limit::RateLimit,
    objects::PodObject,
    wall_clock,
};
use crate::{
    core::{
        model::{Pod, PodKey, PodUid},
        op::{GateReason, PodWrite},
    },
    metrics::{Metrics, PatchOutcome},
};

pub(super) const FIELD_MANAGER: &str = "npl-agent";
/// Time limit for the API server's answer to one patch.
const DEADLINE: Duration = Duration::from_secs(10);
/// The number of patches that may be sent in a burst. One burst is enough to withdraw the annotations of a thousand
/// Pods, with two patches per Pod.
const BURST: u32 = 2_000;
/// The number of patches per second after a burst. The agent needs more patches only if a Service is enabled and
/// disabled repeatedly, or if a webhook reverts annotations.
const PER_SECOND: u32 = 200;

/// Patches annotations and conditions of Pods.
#[derive(Clone)]
pub struct PodPatcher {
    client: Client,
    keys: AnnotationKeys,
    metrics: Metrics,
    rate: Arc<RateLimit>,
}

impl std::fmt::Debug for PodPatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PodPatcher").field("keys", &self.keys).finish_non_exhaustive()
    }
}

/// A patch that the API server applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patched {
    /// The Pod in the answer. The Pod's resource version shows which watch events are older than the patch.
    pub pod: Pod,
}

/// The agent's reaction to a failed patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The Pod was deleted, or another Pod has the same name now. The agent does not retry before a watch reports a
    /// change of the Pod.
    Gone,
    /// Retry with increasing delays, but not before the time in `Retry-After`.
    Retry {
        /// The delay in the header `Retry-After`, at most one minute.
        after: Option<Duration>,
    },
    /// Retry slowly, because an operator must first grant a permission or change a policy.
    Denied,
}

/// Why a patch failed.
#[derive(Debug, thiserror::Error)]
pub enum PatchError {
    /// The Pod does not exist (404 with the reason `NotFound`), or a Pod with a different uid has its name.
    #[error("patch pod {pod}: the pod was deleted or recreated")]
    Gone {
        /// The patched Pod.
        pod: PodKey,
    },
    /// The API server answered 401 or 403: it does not accept the agent's credentials, or the agent lacks a permission.
    #[error(
        "patch pod {pod}: the API server rejects the agent's credentials or denies the permission; apply \
         deploy/npl.yaml, which grants patch on pods/status"
    )]
    Denied {
        /// The patched Pod.
        pod: PodKey,
        /// The API server's answer.
        #[source]
        status: Box<Status>,
    },
    /// The API server rejected the patch, and an operator must remove the cause: for example, an admission policy, or
    /// annotations whose total size exceeds the API server's limit.
    #[error(
        "patch pod {pod}: the API server rejects the patch; check admission policies and the size of the annotations"
    )]
    Refused {
        /// The patched Pod.
        pod: PodKey,
        /// The API server's answer.
        #[source]
        status: Box<Status>,
    },
    /// The API server answered 409, 429 or 5xx, so a retry may succeed.
    #[error("patch pod {pod}: the API server is overloaded or not ready; the agent retries")]
    Unavailable {
        /// The patched Pod.
        pod: PodKey,
        /// The API server's answer.
        #[source]
        status: Box<Status>,
        /// The delay in the header `Retry-After`, at most one minute.
        after: Option<Duration>,
    },
    /// The connection failed. The API server may or may not have applied the patch.
    #[error("patch pod {pod}: connection to the API server failed: {reason}")]
    Unreachable {
        /// The patched Pod.
        pod: PodKey,
        /// The text of the last cause of the connection error.
        reason: String,
    },
    /// The answer did not arrive within the time limit. The API server may or may not have applied the patch.
    #[error("patch pod {pod}: no answer from the API server within {} s", DEADLINE.as_secs())]
    TimedOut {
        /// The patched Pod.
        pod: PodKey,
    },
    /// The answer could not be decoded as a Pod, or is a 404 that a proxy, not the API server, has sent.
    #[error("patch pod {pod}: the answer is not a Pod; check for a proxy in front of the API server")]
    Malformed {
        /// The patched Pod.
        pod: PodKey,
    },
}

impl PatchError {
    /// Returns how the agent reacts to the error.
    pub const fn class(&self) -> Class {
        match self {
            Self::Gone { .. } => Class::Gone,
            Self::Denied { .. } | Self::Refused { .. } => Class::Denied,
            Self::Unavailable { after, .. } => Class::Retry { after: *after },
            Self::Unreachable { .. } | Self::TimedOut { .. } | Self::Malformed { .. } => Class::Retry { after: None },
        }
    }

    const fn outcome(&self) -> PatchOutcome {
        match self {
            Self::Gone { .. } => PatchOutcome::Gone,
            Self::Denied { .. } => PatchOutcome::Denied,
            Self::Refused { .. } => PatchOutcome::Refused,
            Self::Unavailable { .. } => PatchOutcome::Unavailable,
            Self::Unreachable { .. } => PatchOutcome::Unreachable,
            Self::TimedOut { .. } => PatchOutcome::TimedOut,
            Self::Malformed { .. } => PatchOutcome::Malformed,
        }
    }
}

impl PodPatcher {
    /// Creates a patcher for annotations with these keys. Clones of the patcher share one rate limit.
    pub fn new(client: Client, keys: AnnotationKeys, metrics: Metrics) -> Self {
        Self { client, keys, metrics, rate: Arc::new(RateLimit::new(BURST, PER_SECOND)) }
    }

    /// Applies `write` to a Pod if the Pod still has this uid. A second application of the same write changes nothing.
    ///
    /// Withdrawing an annotation takes two patches: the first patch empties the annotation's list of mappings, and the
    /// second patch removes the annotation. Clients that ignore Pods without the annotation notice the withdrawal only
    /// by the first patch (row C-12 of docs/antrea-compatibility.md).
    ///
    /// # Errors
    ///
    /// [`PatchError`] lists the errors. Even if the result is an error, the API server may have applied the patch.
    pub async fn write(&self, pod: &PodKey, uid: &PodUid, write: &PodWrite) -> Result<Patched, PatchError> {
        match write {
            PodWrite::Set(value) => self.patch(pod, &self.annotation(uid, Some(value))).await,
            PodWrite::Withdraw => {
                self.patch(pod, &self.annotation(uid, Some("[]"))).await?;
                self.patch(pod, &self.annotation(uid, None)).await
            }
            PodWrite::OpenGate(reason) => self.patch(pod, &self.open_gate(uid, *reason)).await,
        }
    }

    fn annotation(&self, uid: &PodUid, value: Option<&str>) -> Patch<Value> {
        Patch::Merge(json!({ "metadata": { "uid": &*uid.0, "annotations": { &self.keys.mapping: value } } }))
    }

    /// Builds the patch that sets the condition of the readiness gate. The patch is a strategic merge patch, which
    /// merges conditions by type, so that the kubelet's conditions stay.
    fn open_gate(&self, uid: &PodUid, reason: GateReason) -> Patch<Value> {
        let condition = json!({
            "type": &self.keys.gate,
            "status": "True",
            "reason": reason.as_str(),
            "message": reason.message(),
            "lastTransitionTime": Time(wall_clock()),
        });
        Patch::Strategic(json!({ "metadata": { "uid": &*uid.0 }, "status": { "conditions": [condition] } }))
    }

    async fn patch(&self, pod: &PodKey, patch: &Patch<Value>) -> Result<Patched, PatchError> {
        self.rate.admit().await;
        let started = Instant::now();
        let result = match timeout(DEADLINE, self.send(pod, patch)).await {
            Ok(result) => result,
            Err(_elapsed) => Err(PatchError::TimedOut { pod: pod.clone() }),
        };
        let outcome = result.as_ref().map_or_else(PatchError::outcome, |_| PatchOutcome::Patched);
        self.metrics.count_patch(outcome, started.elapsed());
        result
    }

    async fn send(&self, pod: &PodKey, patch: &Patch<Value>) -> Result<Patched, PatchError> {
        let unreachable = |err| PatchError::Unreachable { pod: pod.clone(), reason: root_cause(&err) };
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let request = Request::new(PodObject::url_path(&(), Some(&pod.namespace)))
            .patch_subresource("status", &pod.name, &params, patch)
            .map_err(|err| unreachable(kube::Error::BuildRequest(err)))?;
        // The request is sent directly, because `Api::patch_status` drops the header `Retry-After`.
        let response = self.client.send(request.map(Body::from)).await.map_err(unreachable)?;
        let code = response.status();
        let after = retry_after(&response);
        let bytes = response.into_body().collect_bytes().await.map_err(unreachable)?;
        if !code.is_success() {
            return Err(refusal(pod, status(code.as_u16(), &bytes), after));
        }
        let answer = serde_json::from_slice::<PodObject>(&bytes).ok();
        let converted = answer.and_then(|object| convert::pod(object, &self.keys));
        converted
            .map(|converted| Patched { pod: converted.object })
            .ok_or_else(|| PatchError::Malformed { pod: pod.clone() })
    }
}

/// Returns the `Status` in the answer's body. If the body contains no `Status`, as in the answer of a proxy, returns a
/// `Status` with only the HTTP status code.
fn status(code: u16, body: &[u8]) -> Box<Status> {
    let mut status = serde_json::from_slice::<Status>(body).unwrap_or_default();
    status.code = code;
    if status.message.is_empty() {
        status.message = format!("HTTP {code}");
    }
    status.boxed()
}

fn refusal(pod: &PodKey, status: Box<Status>, after: Option<Duration>) -> PatchError {
    let pod = pod.clone();
    let is_other_uid = is_other_uid(&status);
    match FailureKind::of_status(status.code) {
        _ if is_other_uid || (status.code == 404 && status.reason == "NotFound") => PatchError::Gone { pod },
        // A proxy in front of the API server sends 404 without the reason `NotFound`.
        _ if status.code == 404 => PatchError::Malformed { pod },
        _ if status.code == 409 => PatchError::Unavailable { pod, status, after },
        FailureKind::Unavailable => PatchError::Unavailable { pod, status, after },
        FailureKind::Unauthorized | FailureKind::Forbidden => PatchError::Denied { pod, status },
        FailureKind::Expired
        | FailureKind::Restored
        | FailureKind::Rejected
        | FailureKind::Unreachable
        | FailureKind::Malformed => PatchError::Refused { pod, status },
    }
}

/// Returns whether the API server rejected the patch because the Pod has another uid. Only the API server's own message
/// counts, because the message of an admission policy may also mention a uid.
fn is_other_uid(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    match status.code {
        409 => status.message.contains("Precondition failed: UID in precondition"),
        422 => causes.into_iter().any(|cause| cause.field == "metadata.uid"),
        _ => false,
    }
}

#[cfg(test)]
#[path = "patch_tests.rs"]
mod tests;
