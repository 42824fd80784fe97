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
    core::{
        model::namespaces::{Namespaces, ServiceScope},
        view::{WatchFailure, WatchView},
    },
    metrics::WatchedResource,
};

/// The watched resources, in the order in which commands show them.
const RESOURCES: [WatchedResource; 3] = [WatchedResource::Pods, WatchedResource::Services, WatchedResource::Node];

/// For each watch: when it last received an answer of the API server, and its current failure. Clones of this value
/// share the recorded times and failures.
#[derive(Debug, Clone)]
pub struct WatchContacts(Arc<Mutex<BTreeMap<WatchKey, Contact>>>);

/// A watched resource, and the namespace to which the watch is limited.
type WatchKey = (&'static str, ServiceScope);

#[derive(Debug, Default, Clone)]
struct Contact {
    heard: Option<Instant>,
    failure: Option<(Instant, String)>,
}

impl WatchContacts {
    /// Creates the record of an agent that watches the Services of these namespaces. No watch has had an answer yet.
    pub fn new(namespaces: &Namespaces) -> Self {
        let mut contacts: BTreeMap<WatchKey, Contact> = BTreeMap::new();
        for resource in RESOURCES {
            let scopes = if resource == WatchedResource::Services { namespaces.scopes() } else { [None].into() };
            contacts.extend(scopes.into_iter().map(|scope| ((resource.as_str(), scope), Contact::default())));
        }
        Self(Arc::new(Mutex::new(contacts)))
    }

    /// Records that the API server answered a list, accepted the watch, or sent an event of the watch.
    pub(super) fn record_success(&self, resource: WatchedResource, namespace: &ServiceScope) {
        let contact = Contact { heard: Some(Instant::now()), failure: None };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert((resource.as_str(), namespace.clone()), contact);
    }

    /// Records that a list or the watch failed with this error.
    pub(super) fn record_failure(&self, resource: WatchedResource, namespace: &ServiceScope, error: &str) {
        let mut contacts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let contact = contacts.entry((resource.as_str(), namespace.clone())).or_default();
        let since = contact.failure.take().map_or_else(Instant::now, |(since, _)| since);
        contact.failure = Some((since, error.to_owned()));
    }

    /// Returns, for the output of commands, the time of the last answer and the current failure for every resource. If
    /// a resource has several watches, returns the oldest of the times of the last answers, and the failure that has
    /// lasted longest.
    pub fn views(&self) -> Vec<WatchView> {
        let contacts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let view = |resource: WatchedResource| {
            let of_resource = || contacts.iter().filter(move |((name, _), _)| *name == resource.as_str());
            // `None`, which means that a watch has had no answer, is less than any time.
            let heard = of_resource().map(|(_, contact)| contact.heard).min().flatten();
            let failing =
                of_resource().filter_map(|((_, namespace), contact)| Some((namespace, contact.failure.as_ref()?)));
            let failure =
                failing.min_by_key(|(_, (since, _))| *since).map(|(namespace, (since, error))| WatchFailure {
                    for_millis: millis(since.elapsed()),
                    error: match namespace {
                        Some(namespace) => format!("namespace {namespace}: {error}"),
                        None => error.clone(),
                    },
                });
            WatchView {
                resource: resource.as_str().to_owned(),
                heard_millis_ago: heard.map(|at| millis(at.elapsed())),
                failure,
            }
        };
        RESOURCES.map(view).to_vec()
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Namespaces, ServiceScope, WatchContacts};
    use crate::metrics::WatchedResource;

    #[tokio::test(start_paused = true)]
    async fn a_failure_lasts_until_the_api_server_answers_again() {
        let contacts = WatchContacts::new(&Namespaces::default());
        assert!(contacts.views().iter().all(|view| view.heard_millis_ago.is_none() && view.failure.is_none()));
        contacts.record_success(WatchedResource::Services, &None);
        tokio::time::advance(Duration::from_secs(5)).await;
        contacts.record_failure(WatchedResource::Services, &None, "connection refused");
        tokio::time::advance(Duration::from_secs(7)).await;
        contacts.record_failure(WatchedResource::Services, &None, "connection reset");
        let [pods, services, _] = <[_; 3]>::try_from(contacts.views()).unwrap();
        assert!(pods.failure.is_none());
        assert_eq!(services.heard_millis_ago, Some(12_000));
        let failure = services.failure.unwrap();
        assert_eq!((failure.for_millis, failure.error.as_str()), (7_000, "connection reset"));
        contacts.record_success(WatchedResource::Services, &None);
        let services = &contacts.views()[1];
        assert_eq!((services.heard_millis_ago, &services.failure), (Some(0), &None));
    }

    #[tokio::test(start_paused = true)]
    async fn of_several_watches_of_services_the_worst_one_is_shown() {
        let contacts = WatchContacts::new(&"billing,shop".parse().unwrap());
        let (billing, shop): (ServiceScope, ServiceScope) = (Some("billing".into()), Some("shop".into()));
        contacts.record_success(WatchedResource::Services, &shop);
        assert_eq!(contacts.views()[1].heard_millis_ago, None, "the list of `billing` has not arrived");
        contacts.record_failure(WatchedResource::Services, &billing, "forbidden");
        tokio::time::advance(Duration::from_secs(5)).await;
        // An answer to the watch of one namespace says nothing about the watch of another namespace.
        contacts.record_success(WatchedResource::Services, &shop);
        contacts.record_failure(WatchedResource::Services, &shop, "connection reset");
        let failure = contacts.views()[1].failure.clone().unwrap();
        assert_eq!((failure.for_millis, failure.error.as_str()), (5_000, "namespace billing: forbidden"));
        contacts.record_success(WatchedResource::Services, &billing);
        tokio::time::advance(Duration::from_secs(1)).await;
        contacts.record_success(WatchedResource::Services, &billing);
        let services = &contacts.views()[1];
        assert_eq!(services.heard_millis_ago, Some(1_000));
        assert_eq!(services.failure.clone().unwrap().error, "namespace shop: connection reset");
    }
}
