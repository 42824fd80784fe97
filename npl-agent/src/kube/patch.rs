// SPDX-License-Identifier: Apache-2.0
//! Patches of `pods/status`: a Pod's mapping annotation, and the condition of its readiness gate. They need no
//! permission to change Pods.

use std::{sync::Arc, time::Duration};

use http::{Response, header::RETRY_AFTER};
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
    failure::{FailureKind, root_cause},
    limit::RateLimit,
    objects::PodObject,
    shown_time,
};
use crate::{
    core::{
        model::{Pod, PodKey, PodUid},
        op::PodWrite,
    },
    metrics::{Metrics, PatchOutcome},
};

const FIELD_MANAGER: &str = "npl-agent";
const DEADLINE: Duration = Duration::from_secs(10);
/// All Pods of the largest Node at once, each twice if annotations are withdrawn.
const BURST: u32 = 2_000;
/// A higher rate comes from a Service that is toggled or a webhook that reverts the annotation, and would overload the
/// API server.
const PER_SECOND: u32 = 200;
/// An annotation must not stay outdated for an hour, whatever the API server or a proxy asks for.
const LONGEST_RETRY_AFTER: Duration = Duration::from_mins(1);

/// Writes annotations and conditions.
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

/// A successful patch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patched {
    /// The Pod in the API server's answer, which is newer than the watch.
    pub pod: Pod,
}

/// How to react to a failed patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The Pod is deleted or replaced: wait for the watch.
    Gone,
    /// Retry with back-off, and not sooner than the API server asked for.
    Retry {
        /// `Retry-After`.
        after: Option<Duration>,
    },
    /// Retry slowly: a person has to change something first.
    Denied,
}

/// Why a patch failed.
#[derive(Debug, thiserror::Error)]
pub enum PatchError {
    /// 404, or the uid is another one.
    #[error("write to pod {pod}: the Pod is deleted, or another one has its name")]
    Gone {
        /// The Pod.
        pod: PodKey,
    },
    /// 401 or 403.
    #[error("write to pod {pod}: the API server forbids it; apply deploy/npl.yaml, which grants patch on pods/status")]
    Denied {
        /// The Pod.
        pod: PodKey,
        /// The API server's status.
        #[source]
        status: Box<Status>,
    },
    /// Another refusal: by an admission policy, or because annotations are too large.
    #[error("write to pod {pod}: the API server refuses it")]
    Refused {
        /// The Pod.
        pod: PodKey,
        /// The API server's status.
        #[source]
        status: Box<Status>,
    },
    /// 409, 429 or 5xx.
    #[error("write to pod {pod}: the API server is not available")]
    Unavailable {
        /// The Pod.
        pod: PodKey,
        /// The API server's status.
        #[source]
        status: Box<Status>,
        /// `Retry-After`.
        after: Option<Duration>,
    },
    /// No answer: the patch may have been applied.
    #[error("write to pod {pod}: no answer from the API server: {reason}")]
    Unreachable {
        /// The Pod.
        pod: PodKey,
        /// The connection's error.
        reason: String,
    },
    /// No answer in time: the patch may have been applied.
    #[error("write to pod {pod}: no answer from the API server within {} s", DEADLINE.as_secs())]
    TimedOut {
        /// The Pod.
        pod: PodKey,
    },
    /// The answer is not a Pod.
    #[error("write to pod {pod}: the API server's answer is not a Pod")]
    Malformed {
        /// The Pod.
        pod: PodKey,
    },
}

impl PatchError {
    /// How to react.
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
    /// A patcher for these annotation keys. Clones share the rate limit.
    pub fn new(client: Client, keys: AnnotationKeys, metrics: Metrics) -> Self {
        Self { client, keys, metrics, rate: Arc::new(RateLimit::new(BURST, PER_SECOND)) }
    }

    /// Applies `write` to the Pod, if it still has this uid. Idempotent.
    ///
    /// Withdrawing takes two patches: consumers that ignore Pods without the key see the empty list before the key is
    /// removed (contract C-12).
    pub async fn write(&self, pod: &PodKey, uid: &PodUid, write: &PodWrite) -> Result<Patched, PatchError> {
        match write {
            PodWrite::Set(value) => self.patch(pod, &self.annotation(uid, Some(value))).await,
            PodWrite::Withdraw => {
                self.patch(pod, &self.annotation(uid, Some("[]"))).await?;
                self.patch(pod, &self.annotation(uid, None)).await
            }
            PodWrite::OpenGate => self.patch(pod, &self.open_gate(uid)).await,
        }
    }

    fn annotation(&self, uid: &PodUid, value: Option<&str>) -> Patch<Value> {
        Patch::Merge(json!({ "metadata": { "uid": &*uid.0, "annotations": { &self.keys.mapping: value } } }))
    }

    /// A strategic merge patch, which merges conditions by type and keeps the kubelet's.
    fn open_gate(&self, uid: &PodUid) -> Patch<Value> {
        let condition = json!({
            "type": &self.keys.gate,
            "status": "True",
            "reason": "Published",
            "message": "all node ports of the Pod are published",
            "lastTransitionTime": Time(shown_time()),
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
        // `Api::patch_status` would lose the Retry-After header.
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

/// In seconds; the API server never sends a date.
fn retry_after(response: &Response<Body>) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST_RETRY_AFTER))
}

/// The API server's status; built from the code if a proxy answered.
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
        _ if status.code == 404 || is_other_uid => PatchError::Gone { pod },
        _ if status.code == 409 => PatchError::Unavailable { pod, status, after },
        FailureKind::Unavailable => PatchError::Unavailable { pod, status, after },
        FailureKind::Unauthorized | FailureKind::Forbidden => PatchError::Denied { pod, status },
        FailureKind::Expired | FailureKind::Rejected | FailureKind::Unreachable | FailureKind::Malformed => {
            PatchError::Refused { pod, status }
        }
    }
}

/// Recognizes the API server's own messages only, since an admission policy's text may also mention uids.
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
