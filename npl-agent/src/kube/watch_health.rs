// SPDX-License-Identifier: Apache-2.0
//! The log and the metric of failed lists and watches.

use std::{collections::BTreeMap, mem};

use tracing::{debug, info, warn};

use super::{
    backoff::Throttle,
    contacts::WatchContacts,
    failure::{CERTIFICATE_ADVICE, FailureKind, REFUSALS_TO_CONFIRM, RequestFailure, is_certificate_error},
};
use crate::metrics::{Metrics, WatchedResource};

/// Receivers of the successes and failures of all watches.
#[derive(Clone)]
pub(super) struct Observers {
    pub(super) metrics: Metrics,
    pub(super) contacts: WatchContacts,
}

/// Logs failures of a watch: each kind immediately and then once per minute, and the recovery.
pub(super) struct WatchHealth {
    subject: WatchedResource,
    observers: Observers,
    failing: BTreeMap<FailureKind, Throttle>,
    refusals: u32,
}

impl WatchHealth {
    pub(super) fn new(subject: WatchedResource, observers: Observers) -> Self {
        Self { subject, observers, failing: BTreeMap::new(), refusals: 0 }
    }

    pub(super) fn record_success(&mut self) {
        self.refusals = 0;
        self.observers.contacts.record_success(self.subject);
        if !mem::take(&mut self.failing).is_empty() {
            info!(subject = %self.subject, "watch has recovered; the agent receives changes again");
        }
    }

    pub(super) fn record_failure(&mut self, failure: &RequestFailure) {
        let RequestFailure { kind, cause, .. } = failure;
        self.observers.metrics.count_watch_failure(self.subject, *kind);
        if *kind == FailureKind::Expired {
            debug!(subject = %self.subject, "the resource version has expired; the watch starts again with a list");
            return;
        }
        self.observers.contacts.record_failure(self.subject, cause);
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

    /// Records that the API server's newest version is older than the last one that the watch has seen.
    pub(super) fn record_restore(&self, seen: &str, newest: &str) {
        self.observers.metrics.count_watch_failure(self.subject, FailureKind::Restored);
        warn!(
            subject = %self.subject, seen, newest,
            "the API server's resource versions decreased, as after a restore of etcd from a backup: the agent lists \
             {} again; restart controllers and kubelets, which may miss changes",
            self.subject
        );
    }

    fn log_failure(&self, kind: FailureKind, err: &str) {
        let subject = self.subject;
        match kind {
            FailureKind::Unreachable if is_certificate_error(err) => warn!(%subject, err, "{CERTIFICATE_ADVICE}"),
            FailureKind::Forbidden => warn!(
                %subject, err,
                "the agent may not list and watch {subject}: apply deploy/npl.yaml, which grants the permission; \
                 until then the agent serves the last known state"
            ),
            FailureKind::Unauthorized => warn!(
                %subject, err,
                "the API server does not accept the agent's credentials: check that its service account exists; until \
                 then the agent serves the last known state"
            ),
            FailureKind::Malformed => {
                warn!(
                    %subject, err,
                    "the answer to the watch of {subject} cannot be decoded: check for a proxy in front of the API \
                     server; until then the agent serves the last known state"
                );
            }
            FailureKind::Unavailable
            | FailureKind::Unreachable
            | FailureKind::Rejected
            | FailureKind::Expired
            | FailureKind::Restored => {
                warn!(
                    %subject, err,
                    "watch of {subject} is interrupted: the agent retries and serves the last known state; check that \
                     the API server is reachable from this Node"
                );
            }
        }
    }
}
