// SPDX-License-Identifier: Apache-2.0
//! For the agent's commands: records when each watch last received an answer of the API server, and whether the watch
//! is failing.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    core::view::{WatchFailure, WatchView},
    metrics::WatchedResource,
};

/// For each watch: when it last received an answer of the API server, and its current failure. Clones of this value
/// share the recorded times and failures.
#[derive(Debug, Clone, Default)]
pub struct WatchContacts(Arc<Mutex<BTreeMap<&'static str, Contact>>>);

#[derive(Debug, Default)]
struct Contact {
    heard: Option<Instant>,
    failure: Option<(Instant, String)>,
}

impl WatchContacts {
    /// Records that the API server answered a list, accepted the watch, or sent an event of the watch.
    pub(super) fn record_success(&self, resource: WatchedResource) {
        let contact = Contact { heard: Some(Instant::now()), failure: None };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(resource.as_str(), contact);
    }

    /// Records that a list or the watch failed with this error.
    pub(super) fn record_failure(&self, resource: WatchedResource, error: &str) {
        let mut contacts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let contact = contacts.entry(resource.as_str()).or_default();
        let since = contact.failure.take().map_or_else(Instant::now, |(since, _)| since);
        contact.failure = Some((since, error.to_owned()));
    }

    /// Returns, for the output of commands, the time of the last answer and the current failure of every watch.
    pub fn views(&self) -> Vec<WatchView> {
        let contacts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let resources = [WatchedResource::Pods, WatchedResource::Services, WatchedResource::Node];
        let view = |resource: WatchedResource| {
            let contact = contacts.get(resource.as_str());
            let failure = contact.and_then(|contact| contact.failure.as_ref());
            WatchView {
                resource: resource.as_str().to_owned(),
                heard_millis_ago: contact.and_then(|contact| contact.heard).map(|at| millis(at.elapsed())),
                failure: failure
                    .map(|(since, error)| WatchFailure { for_millis: millis(since.elapsed()), error: error.clone() }),
            }
        };
        resources.map(view).to_vec()
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::WatchContacts;
    use crate::metrics::WatchedResource;

    #[tokio::test(start_paused = true)]
    async fn a_failure_lasts_until_the_api_server_answers_again() {
        let contacts = WatchContacts::default();
        assert!(contacts.views().iter().all(|view| view.heard_millis_ago.is_none() && view.failure.is_none()));
        contacts.record_success(WatchedResource::Services);
        tokio::time::advance(Duration::from_secs(5)).await;
        contacts.record_failure(WatchedResource::Services, "connection refused");
        tokio::time::advance(Duration::from_secs(7)).await;
        contacts.record_failure(WatchedResource::Services, "connection reset");
        let [pods, services, _] = <[_; 3]>::try_from(contacts.views()).unwrap();
        assert!(pods.failure.is_none());
        assert_eq!(services.heard_millis_ago, Some(12_000));
        let failure = services.failure.unwrap();
        assert_eq!((failure.for_millis, failure.error.as_str()), (7_000, "connection reset"));
        contacts.record_success(WatchedResource::Services);
        let services = &contacts.views()[1];
        assert_eq!((services.heard_millis_ago, &services.failure), (Some(0), &None));
    }
}
