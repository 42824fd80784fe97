// SPDX-License-Identifier: Apache-2.0
//! The delta variant of xDS: a request subscribes to names or unsubscribes from names, and a response contains only
//! changed resources.

use std::collections::{BTreeMap, BTreeSet};

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;

use super::{
    encode::Reply,
    request::DeltaRequest,
    resources::{self, Kind},
    session::{MOST_NAMES, Session, Subscribed, answer, is_short_enough},
};
use crate::core::snapshot::{Snapshot, Version};

/// The state of one xDS stream of the delta variant.
#[derive(Debug, Default)]
pub(super) struct Delta {
    subscriptions: BTreeMap<Kind, Subscription>,
    responses: u64,
}

#[derive(Debug, Default)]
struct Subscription {
    is_wildcard: bool,
    names: BTreeSet<String>,
    /// The versions of the resources that the client has, by name. A version is a string, because the client sends
    /// versions as strings after a reconnect.
    known: BTreeMap<String, String>,
    /// The subscribed names for which no resource exists, and that a response has already reported as removed.
    absent: BTreeSet<String>,
}

impl Subscription {
    fn subscribe(&mut self, kind: Kind, request: &DeltaRequest, is_new: bool) {
        if is_new {
            self.is_wildcard = kind.is_complete() && request.resource_names_subscribe.is_empty();
            let known = request.initial_resource_versions.iter();
            let known =
                known.filter(|(name, version)| is_short_enough(name) && is_short_enough(version)).take(MOST_NAMES);
            self.known = known.map(|(name, version)| (name.clone(), version.clone())).collect();
        }
        for name in &request.resource_names_unsubscribe {
            if name == "*" {
                self.is_wildcard = false;
            }
            self.names.remove(name);
            self.known.remove(name);
            self.absent.remove(name);
        }
        for name in &request.resource_names_subscribe {
            if name == "*" {
                self.is_wildcard = kind.is_complete();
            } else if self.names.len() < MOST_NAMES && is_short_enough(name) {
                self.names.insert(name.clone());
                if !is_new {
                    // If the client subscribes to a name again, the feed sends the resource again, as the protocol
                    // requires.
                    self.known.remove(name);
                }
                self.absent.remove(name);
            }
        }
    }

    fn wanted(&self, kind: Kind, snapshot: &Snapshot) -> BTreeMap<String, Version> {
        let all = if self.is_wildcard { resources::all_names(kind, snapshot) } else { Vec::new() };
        let names = all.into_iter().chain(self.names.iter().cloned());
        names.filter_map(|name| resources::version(kind, &name, snapshot).map(|version| (name, version))).collect()
    }
}

impl Session for Delta {
    type Request = DeltaRequest;

    fn subscribe(&mut self, request: &DeltaRequest) -> Subscribed {
        let Some(kind) = Kind::of_url(&request.type_url) else {
            return Subscribed { kind: "unknown", event: "unknown_type", due: None };
        };
        let is_new = !self.subscriptions.contains_key(&kind);
        self.subscriptions.entry(kind).or_default().subscribe(kind, request, is_new);
        let event = match (request.response_nonce.is_empty(), &request.error_detail) {
            (false, error) => answer(error.is_some()),
            (true, _) => "subscribe",
        };
        Subscribed { kind: kind.as_str(), event, due: Some((kind, is_new)) }
    }

    fn kinds(&self) -> Vec<Kind> {
        self.subscriptions.keys().copied().collect()
    }

    fn names(&self) -> usize {
        self.subscriptions.values().map(|subscription| subscription.names.len().max(subscription.known.len())).sum()
    }

    /// Returns a response with the resources whose versions differ from the client's versions. If `is_due`, returns a
    /// response even without changes, so that a client with a wildcard subscription knows that it has all resources.
    fn respond(&mut self, kind: Kind, snapshot: &Snapshot, is_due: bool) -> Option<Reply> {
        let subscription = self.subscriptions.get_mut(&kind)?;
        let wanted = subscription.wanted(kind, snapshot);
        let mut changed = Vec::new();
        for (name, version) in &wanted {
            let version = version.to_string();
            if subscription.known.get(name) == Some(&version) {
                continue;
            }
            if let Some(resource) = resources::resource(kind, name, snapshot) {
                changed.push((name, version.clone(), resource));
                subscription.known.insert(name.clone(), version);
            }
        }
        let mut removed: Vec<String> =
            subscription.known.keys().filter(|name| !wanted.contains_key(*name)).cloned().collect();
        for name in subscription.names.iter().filter(|name| !wanted.contains_key(*name)) {
            if subscription.absent.insert(name.clone()) && !removed.contains(name) {
                removed.push(name.clone());
            }
        }
        subscription.known.retain(|name, _| wanted.contains_key(name));
        subscription.absent.retain(|name| !wanted.contains_key(name));
        if changed.is_empty() && removed.is_empty() && !is_due {
            return None;
        }
        self.responses += 1;
        let mut reply = Reply::new(&DeltaDiscoveryResponse {
            system_version_info: snapshot.version().to_string(),
            type_url: kind.url(),
            removed_resources: removed,
            nonce: self.responses.to_string(),
            ..DeltaDiscoveryResponse::default()
        });
        for (name, version, resource) in changed {
            reply.push_named(name, &version, resource);
        }
        Some(reply)
    }
}
