// SPDX-License-Identifier: Apache-2.0
//! The one write: a Pod's mapping annotation, and the condition that its readiness may wait for, by patches of
//! `pods/status`, which need no right to change Pods.

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
/// All Pods of the largest Node at once, each twice where annotations are withdrawn.
const BURST: u32 = 2_000;
/// What goes on for longer is a Service that somebody toggles or a webhook that fights: the API server has other work.
const PER_SECOND: u32 = 200;
/// Whoever answers: an annotation that is out of date is not left so for an hour.
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

/// A write that the API server has taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patched {
    /// The Pod as the API server answered it, so that its new resource version is known before the watch tells it.
    pub pod: Pod,
}

/// What a failed patch asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The Pod is gone or is another one of the same name: nothing to do until a watch says otherwise.
    Gone,
    /// Again, with back-off, and not sooner than the API server asked for.
    Retry {
        /// `Retry-After`.
        after: Option<Duration>,
    },
    /// Again, but slowly: it takes a person to change the answer.
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
        /// What the API server said.
        #[source]
        status: Box<Status>,
    },
    /// Another refusal: an admission policy, or annotations that are too large together.
    #[error("write to pod {pod}: the API server refuses it")]
    Refused {
        /// The Pod.
        pod: PodKey,
        /// What the API server said.
        #[source]
        status: Box<Status>,
    },
    /// 409, 429 or 5xx.
    #[error("write to pod {pod}: the API server is not available")]
    Unavailable {
        /// The Pod.
        pod: PodKey,
        /// What the API server said.
        #[source]
        status: Box<Status>,
        /// `Retry-After`.
        after: Option<Duration>,
    },
    /// No answer: the patch may or may not have been done.
    #[error("write to pod {pod}: no answer from the API server: {reason}")]
    Unreachable {
        /// The Pod.
        pod: PodKey,
        /// What the connection said.
        reason: String,
    },
    /// No answer in time: the patch may or may not have been done.
    #[error("write to pod {pod}: no answer from the API server within {} s", DEADLINE.as_secs())]
    TimedOut {
        /// The Pod.
        pod: PodKey,
    },
    /// The answer is no Pod.
    #[error("write to pod {pod}: the API server's answer is not a Pod")]
    Malformed {
        /// The Pod.
        pod: PodKey,
    },
}

impl PatchError {
    /// What to do about it.
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
    /// A patcher of annotations with these keys. Clones share its limit.
    pub fn new(client: Client, keys: AnnotationKeys, metrics: Metrics) -> Self {
        Self { client, keys, metrics, rate: Arc::new(RateLimit::new(BURST, PER_SECOND)) }
    }

    /// Does `write` to the Pod of this name if it still has this uid. Idempotent.
    ///
    /// Withdrawing takes two patches: a consumer that does not look at Pods without the key learns of the change from
    /// the empty list before the key goes (contract C-12).
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

    /// A strategic patch, since that merges conditions by their types and leaves the kubelet's alone.
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
        // Not `Api::patch_status`, whose error has lost the Retry-After header.
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

/// In seconds; the other form, a date, is one that the API server never sends.
fn retry_after(response: &Response<Body>) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST_RETRY_AFTER))
}

/// The API server's own words, or none where something on the way answered in its place.
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

/// Only the API server's own way to say it: an admission policy's text may well speak of uids too.
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
