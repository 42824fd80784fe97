// SPDX-License-Identifier: Apache-2.0
//! Logs failed lists and watches, and reports them to an observer, for example to count the failures in a metric.

use std::{collections::BTreeMap, fmt, mem, sync::Arc};

use tracing::{debug, info, warn};

use super::{
    backoff::Throttle,
    contacts::WatchContacts,
    failure::{FailureKind, REFUSALS_TO_CONFIRM, RequestFailure},
};
use crate::{
    core::{certificate, model::namespaces::ServiceScope, pages},
    metrics::{Metrics, WatchedResource},
};

/// Receives the failures and successes of watches. Also names the process and its manifest for log lines about
/// failures.
pub trait WatchObserver: fmt::Debug + Send + Sync {
    /// Returns the name of the process in log lines, such as `agent`.
    fn process(&self) -> &'static str;
    /// Returns the file name of the manifest that grants the process its permissions.
    fn manifest(&self) -> &'static str;
    /// Returns the section of the documents about failures of watches, one of [`pages`].
    fn page(&self) -> String;
    /// Records that a list or a watch failed; `cause` is the text of the error.
    fn record_failure(&self, subject: WatchedResource, kind: FailureKind, cause: &str);
    /// Records that the API server has answered a list, accepted a watch, or sent an event.
    fn record_success(&self, subject: WatchedResource);
}

/// Forwards the successes and failures of all watches to the agent's metrics and to [`WatchContacts`].
#[derive(Debug, Clone)]
pub(super) struct Observers {
    pub(super) metrics: Metrics,
    pub(super) contacts: WatchContacts,
    /// The namespace to which the observed watch is limited; `None` for all namespaces.
    pub(super) namespace: ServiceScope,
}

impl WatchObserver for Observers {
    fn process(&self) -> &'static str {
        "agent"
    }

    fn manifest(&self) -> &'static str {
        "deploy/npl.yaml"
    }

    fn page(&self) -> String {
        pages::of_check("api_server")
    }

    fn record_failure(&self, subject: WatchedResource, kind: FailureKind, cause: &str) {
        self.metrics.count_watch_failure(subject, kind);
        if !kind.only_restarts_watch() {
            self.contacts.record_failure(subject, &self.namespace, cause);
        }
    }

    fn record_success(&self, subject: WatchedResource) {
        self.contacts.record_success(subject, &self.namespace);
    }
}

/// Logs when a watch fails and when it recovers. The first failure of each kind is logged as a warning immediately.
/// Further failures of the same kind are logged at most once per minute. A refusal (401 or 403) is logged as a warning
/// only if at least two other refusals came before it since the last success. An expired resource version is not logged
/// as a warning.
pub(super) struct WatchHealth {
    subject: WatchedResource,
    observer: Arc<dyn WatchObserver>,
    failing: BTreeMap<FailureKind, Throttle>,
    refusals: u32,
}

impl WatchHealth {
    pub(super) fn new(subject: WatchedResource, observer: Arc<dyn WatchObserver>) -> Self {
        Self { subject, observer, failing: BTreeMap::new(), refusals: 0 }
    }

    /// Records that the API server has accepted a watch. A watch that failed before counts as recovered only after its
    /// first event.
    pub(super) fn record_start(&self) {
        self.observer.record_success(self.subject);
    }

    pub(super) fn record_success(&mut self) {
        self.refusals = 0;
        self.observer.record_success(self.subject);
        if !mem::take(&mut self.failing).is_empty() {
            info!(subject = %self.subject, "watch has recovered; the {} receives changes again", self.observer.process());
        }
    }

    pub(super) fn record_failure(&mut self, failure: &RequestFailure) {
        let RequestFailure { kind, cause, .. } = failure;
        self.observer.record_failure(self.subject, *kind, cause);
        if *kind == FailureKind::Expired {
            debug!(subject = %self.subject, "the resource version has expired; the watch starts again with a list");
            return;
        }
        if matches!(kind, FailureKind::Forbidden | FailureKind::Unauthorized) {
            self.refusals += 1;
            if self.refusals < REFUSALS_TO_CONFIRM {
                debug!(subject = %self.subject, err = cause, "the API server rejected the watch; retrying");
                return;
            }
        }
        if self.failing.entry(*kind).or_default().acquire() {
            self.log_failure(*kind, cause);
        }
    }

    /// Records that the API server's watch cache was not current in time for a streaming list. The failure is not logged
    /// as a warning, because the list that the agent requests next does not need the watch cache.
    pub(super) fn record_outdated_cache(&self, failure: &RequestFailure) {
        self.observer.record_failure(self.subject, failure.kind, &failure.cause);
        debug!(
            subject = %self.subject, err = failure.cause,
            "the API server's watch cache is not current; the {} requests a list",
            self.observer.process()
        );
    }

    /// Records that the newest resource version of the API server's store is older than the last version that the watch
    /// has received.
    pub(super) fn record_restore(&self, seen: &str, newest: &str) {
        self.observer.record_failure(self.subject, FailureKind::Restored, "");
        warn!(
            see = pages::url(&self.observer.page()),
            subject = %self.subject, seen, newest,
            "the API server's resource versions decreased, as after a restore of etcd from a backup: the {} lists {} \
             again; restart controllers and kubelets, which may miss changes",
            self.observer.process(), self.subject
        );
    }

    fn log_failure(&self, kind: FailureKind, err: &str) {
        let subject = self.subject;
        let (process, manifest, page) = (self.observer.process(), self.observer.manifest(), self.observer.page());
        if let (FailureKind::Unreachable, Some(advice)) = (kind, certificate::advice(err)) {
            warn!(see = pages::url(&page), %subject, err, "{advice}");
            return;
        }
        match kind {
            FailureKind::Forbidden => warn!(
                see = pages::url(&page),
                %subject, err,
                "the {process} may not list and watch {subject}: apply {manifest}, which grants the permission; until \
                 then the {process} serves the last known state"
            ),
            FailureKind::Unauthorized => warn!(
                see = pages::url(&page),
                %subject, err,
                "the API server does not accept the {process}'s credentials: check that its service account exists; \
                 until then the {process} serves the last known state"
            ),
            FailureKind::Malformed => {
                warn!(
                    see = pages::url(&page),
                    %subject, err,
                    "the answer to the watch of {subject} cannot be decoded: check for a proxy in front of the API \
                     server; until then the {process} serves the last known state"
                );
            }
            FailureKind::Unavailable
            | FailureKind::Unreachable
            | FailureKind::Rejected
            | FailureKind::Expired
            | FailureKind::Restored => {
                warn!(
                    see = pages::url(&page),
                    %subject, err,
                    "watch of {subject} is interrupted: the {process} retries and serves the last known state; check that \
                     the API server is reachable from this Node"
                );
            }
        }
    }
}
