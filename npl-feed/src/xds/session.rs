// SPDX-License-Identifier: Apache-2.0
//! Contains the code that the two variants of xDS, state of the world and delta, share.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
};

use npl_agent::core::model::ServiceKey;

use super::{
    encode::Reply,
    names,
    resources::{self, Kind},
};
use crate::core::snapshot::{LONGEST_NAME, Snapshot, Version};

/// The result of a request to a session: the resource type and the event for the metrics, and the response that is due.
#[derive(Debug)]
pub(super) struct Subscribed {
    /// The short name of the resource type.
    pub(super) kind: &'static str,
    /// The event for the metrics: `subscribe`, `ack`, `nack`, `stale` or `unknown_type`.
    pub(super) event: &'static str,
    /// The type for which the caller must call [`Session::respond`], and the trigger; `None` if the request gets no
    /// response.
    pub(super) due: Option<(Kind, Trigger<'static>)>,
}

/// The reason why a response may be necessary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trigger<'a> {
    /// A request that must be answered even if the client already has all resources.
    Request,
    /// A request that has changed the subscriptions.
    Subscription,
    /// A new snapshot, in which only the groups of these Services differ from the snapshot of the last response.
    Snapshot(&'a BTreeSet<ServiceKey>),
}

/// The names of one resource type to which a client subscribes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct SubscribedNames {
    pub(super) is_wildcard: bool,
    pub(super) explicit: BTreeSet<String>,
}

impl SubscribedNames {
    /// Returns the version of a resource; `None` if the client does not subscribe to the name, or the resource does not
    /// exist.
    pub(super) fn version(&self, kind: Kind, name: &str, snapshot: &Snapshot) -> Option<Version> {
        let group = names::find(snapshot, name);
        let is_included = |group| resources::is_in_wildcard(kind, group) && names::is_canonical(name, group);
        let is_wanted = self.explicit.contains(name) || self.is_wildcard && group.is_some_and(|it| is_included(it));
        if is_wanted { resources::version_of(kind, name, group) } else { None }
    }

    /// Returns the names whose resources may differ from the resources that the client has. `known` contains the names
    /// of these resources.
    ///
    /// After a new snapshot, only the names of the changed Services are returned, so that the work for a client with
    /// thousands of clusters depends only on the number of changes.
    pub(super) fn affected<V>(
        &self,
        trigger: Trigger<'_>,
        snapshot: &Snapshot,
        known: &BTreeMap<String, V>,
    ) -> BTreeSet<String> {
        let mut affected = BTreeSet::new();
        let Trigger::Snapshot(services) = trigger else {
            affected.extend(self.explicit.iter().chain(known.keys()).cloned());
            if self.is_wildcard {
                affected.extend(snapshot.groups().map(|group| names::of(group)));
            }
            return affected;
        };
        for service in services {
            let prefix = names::of_service(service);
            let range = (Bound::Included(prefix.as_str()), Bound::Unbounded);
            let is_of_service = |name: &&String| name.starts_with(&prefix);
            affected.extend(self.explicit.range::<str, _>(range).take_while(is_of_service).cloned());
            affected.extend(known.range::<str, _>(range).map(|(name, _)| name).take_while(is_of_service).cloned());
            if self.is_wildcard {
                affected.extend(snapshot.service(&service.namespace, &service.name).map(|group| names::of(group)));
            }
        }
        affected
    }
}

/// The state machine of one xDS stream.
pub(super) trait Session: Default + Send + 'static {
    type Request: prost::Message + prost::Name + Default + 'static;

    /// Applies a request to the subscriptions.
    fn subscribe(&mut self, request: &Self::Request) -> Subscribed;
    /// Returns the types with subscriptions, in the order in which a client needs their responses.
    fn kinds(&self) -> Vec<Kind>;
    /// Returns the response with the changes since the last response of the type; `None` if there are no changes and
    /// the trigger demands no answer.
    fn respond(&mut self, kind: Kind, snapshot: &Snapshot, trigger: Trigger<'_>) -> Option<Reply>;
    /// Returns the number of names in memory: the sum over all types, where each type counts its subscribed names or
    /// the names of the resources that the client has, whichever are more.
    fn names(&self) -> usize;
}

/// The maximum number of names per type to which one stream can subscribe. Names in excess of this number are ignored.
pub(super) const MOST_NAMES: usize = 20_000;
/// Returns whether a resource can have this name or version. The feed ignores longer names and versions.
pub(super) const fn is_short_enough(name: &str) -> bool {
    name.len() <= LONGEST_NAME
}

/// Returns the event of a request that answers a response: `nack` if the request contains an error, otherwise `ack`.
pub(super) const fn answer(has_error: bool) -> &'static str {
    if has_error { "nack" } else { "ack" }
}
