// SPDX-License-Identifier: Apache-2.0
//! Reports problems to users by Kubernetes Events on the affected Pod or Service.
//!
//! The agent writes mappings without waiting for Events. If an Event could not be sent, the agent sends the Event again
//! later.

use std::time::Duration;

use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
    core::Status,
};
use serde_json::json;
use tokio::{
    sync::watch::Receiver,
    time::{Instant, sleep_until, timeout},
};
use tracing::{debug, warn};

use super::{
    backoff::Throttle,
    failure::{FailureKind, root_cause},
    limit::RateLimit,
    wall_clock,
};
use crate::{
    core::{
        model::Moment,
        pages,
        publish::{
            problem::{AffectedObject, Problem},
            report::{FRESH_MILLIS, Report, Reports},
        },
    },
    metrics::{EventOutcome, Metrics},
};

/// The field `reportingController` of the Events, which the API server requires.
const CONTROLLER: &str = "npl-agent";
/// The field `action` of the Events, which the API server requires.
const ACTION: &str = "Publish";
/// Time limit for sending one Event, including the requests that read and increment the count of an existing Event.
const DEADLINE: Duration = Duration::from_secs(10);
/// The number of Events that may be sent in a burst: one for each Pod of a large Node, because one cause may affect all
/// these Pods.
const BURST: u32 = 100;
/// The number of Events per second after a burst. The number is low, because hundreds of Nodes may have the same
/// problem.
const PER_SECOND: u32 = 2;
/// The API server's limit in bytes for the name of an object.
const NAME_BYTES: usize = 253;
/// The API server's limit in bytes for `reportingInstance`.
const INSTANCE_BYTES: usize = 128;
/// The API server's limit in bytes for the note of an Event.
const NOTE_BYTES: usize = 1024;

/// Sends Kubernetes Events about problems to the API server.
pub struct Recorder {
    client: Client,
    instance: String,
    metrics: Metrics,
    reports: Reports,
    limit: RateLimit,
    started: Instant,
    denial_log: Throttle,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("instance", &self.instance).finish_non_exhaustive()
    }
}

impl Recorder {
    /// Creates the recorder for the agent of the Node `node_name`.
    pub fn new(client: Client, node_name: &str, metrics: Metrics) -> Self {
        Self {
            client,
            instance: shortened(node_name, INSTANCE_BYTES).to_owned(),
            metrics,
            reports: Reports::of_node(node_name),
            limit: RateLimit::new(BURST, PER_SECOND),
            started: Instant::now(),
            denial_log: Throttle::default(),
        }
    }

    /// Sends an Event for each problem, until the sender of `problems` is dropped.
    pub async fn run(mut self, mut problems: Receiver<Vec<Problem>>) {
        loop {
            let due = self.reports.next_due().map(|at| self.started + Duration::from_millis(at.0));
            let is_admitted = tokio::select! {
                changed = problems.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    false
                }
                () = sleep_until(due.unwrap_or(self.started)), if due.is_some() => {
                    self.limit.admit().await;
                    true
                }
            };
            // The rate limit may have delayed the due report. Reports of problems that have been solved in the meantime
            // are therefore dropped first.
            self.reports.observe(&problems.borrow_and_update(), self.now());
            if is_admitted
                && let Some(report) = self.reports.take_due(self.now())
                && !self.send(&report).await
            {
                self.reports.record_failure(&report, self.now());
            }
        }
    }

    fn now(&self) -> Moment {
        Moment(u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// Sends a report as an Event. Returns false if the report must be sent again.
    async fn send(&mut self, report: &Report) -> bool {
        let reported = timeout(DEADLINE, self.record(report)).await;
        let (outcome, err) = match reported.unwrap_or_else(|late| Err(kube::Error::Service(late.into()))) {
            Ok(outcome) => (outcome, None),
            Err(kube::Error::Api(status)) if is_namespace_gone(&status) => (EventOutcome::Gone, None),
            Err(err) if FailureKind::of(&err) == FailureKind::Forbidden => (EventOutcome::Denied, Some(err)),
            Err(err) => (EventOutcome::Failed, Some(err)),
        };
        self.metrics.count_event(outcome);
        if let Some(err) = &err {
            let err = root_cause(err);
            if outcome == EventOutcome::Denied && self.denial_log.acquire() {
                warn!(
                    see = pages::url(pages::EVENTS),
                    err,
                    "the agent may not create and patch Events, so users do not see why Pod ports are not mapped: \
                     apply deploy/npl.yaml, which grants the permission"
                );
            } else {
                debug!(err, reason = report.reason, "sending the Event failed; the agent sends the Event again later");
            }
        }
        err.is_none()
    }

    /// Creates the Event that reports `report`. If the Event already exists, because an earlier agent or the agent of
    /// another Node has created it, increments the Event's count instead. If an agent has written the Event of a
    /// Service in the last [`FRESH_MILLIS`], the Event is not written again.
    async fn record(&self, report: &Report) -> kube::Result<EventOutcome> {
        let event = self.event(report);
        let name = event.metadata.name.clone().unwrap_or_default();
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let events = Api::<Event>::namespaced(self.client.clone(), &namespace);
        match events.create(&PostParams::default(), &event).await {
            Err(kube::Error::Api(status)) if status.reason == "AlreadyExists" => {}
            other => return other.map(|_event| EventOutcome::Created),
        }
        // The agent has no permission to read Events, but the answer to an empty patch contains the existing Event.
        let params = PatchParams::default();
        let known = events.patch(&name, &params, &Patch::Merge(json!({}))).await?;
        let observed = known.series.as_ref().map(|series| &series.last_observed_time).or(known.event_time.as_ref());
        if !report.increments_event(observed.map(age_millis)) {
            return Ok(EventOutcome::Shared);
        }
        let count = known.series.map_or(1, |series| series.count).saturating_add(1);
        let series = json!({ "series": { "count": count, "lastObservedTime": MicroTime(wall_clock()) } });
        events.patch(&name, &params, &Patch::Merge(series)).await.map(|_event| EventOutcome::Repeated)
    }

    fn event(&self, report: &Report) -> Event {
        let (kind, key, uid) = match &report.subject {
            AffectedObject::Pod(key, uid) => ("Pod", key, &uid.0),
            AffectedObject::Service(key, uid) => ("Service", key, &uid.0),
        };
        let suffix = format!(".{:016x}", report.mark());
        let name = format!("{}{suffix}", shortened(&key.name, NAME_BYTES - suffix.len()));
        let metadata = ObjectMeta { namespace: Some(key.namespace.to_string()), name: Some(name), ..<_>::default() };
        let regarding = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some(kind.to_owned()),
            namespace: Some(key.namespace.to_string()),
            name: Some(key.name.to_string()),
            uid: Some(uid.to_string()),
            ..ObjectReference::default()
        };
        Event {
            metadata,
            regarding: Some(regarding),
            type_: Some("Warning".to_owned()),
            reason: Some(report.reason.to_owned()),
            note: Some(note_with_page(report)),
            action: Some(ACTION.to_owned()),
            event_time: Some(MicroTime(wall_clock())),
            reporting_controller: Some(CONTROLLER.to_owned()),
            reporting_instance: Some(self.instance.clone()),
            ..Event::default()
        }
    }
}

/// The time in milliseconds since `at`, a time of another Node's clock. The clocks of Nodes differ, so `at` may be in
/// the future; the result is then 0. If `at` is more than [`FRESH_MILLIS`] in the future, one of the clocks is wrong.
/// The result is then `u64::MAX`, so that the Event counts as old.
fn age_millis(at: &MicroTime) -> u64 {
    let age = wall_clock().duration_since(at.0).as_millis();
    if age < -i128::from(FRESH_MILLIS) { u64::MAX } else { u64::try_from(age).unwrap_or_default() }
}

/// Returns whether the API server rejected the Event because its namespace is deleted or terminating.
fn is_namespace_gone(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == 404 || causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
}

/// Returns the note of an Event: the text of the report, and the URL of the section about the reason. Cuts a text that
/// is too long, so that the URL stays complete.
fn note_with_page(report: &Report) -> String {
    const CUT: &str = "…";
    let page = format!("; see {}", pages::url(&pages::of_event(report.reason)));
    let bytes = NOTE_BYTES.saturating_sub(page.len());
    if report.note.len() <= bytes {
        return format!("{}{page}", report.note);
    }
    format!("{}{CUT}{page}", prefix(&report.note, bytes.saturating_sub(CUT.len())))
}

/// Returns the longest prefix of `name` that has at most `bytes` bytes and is itself a valid name of an object.
fn shortened(name: &str, bytes: usize) -> &str {
    prefix(name, bytes).trim_end_matches(['.', '-'])
}

/// Returns the longest prefix of `text` that has at most `bytes` bytes.
fn prefix(text: &str, bytes: usize) -> &str {
    text.split_at(text.floor_char_boundary(bytes)).0
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
