// SPDX-License-Identifier: Apache-2.0
//! The state-of-the-world variant of xDS. A request names all subscribed resources. A response to a new snapshot
//! contains all subscribed clusters and listeners, but only the changed endpoints and routes.

use std::collections::{BTreeMap, BTreeSet};

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryResponse;

use super::{
    encode::Reply,
    request::StateOfTheWorldRequest,
    resources::{self, Kind},
    session::{MOST_NAMES, Session, Subscribed, answer, is_short_enough},
};
use crate::core::snapshot::{Snapshot, Version};

/// The state of one xDS stream of the state-of-the-world variant.
#[derive(Debug, Default)]
pub(super) struct StateOfTheWorld {
    subscriptions: BTreeMap<Kind, Subscription>,
    responses: u64,
}

#[derive(Debug, Default)]
struct Subscription {
    is_wildcard: bool,
    /// Whether a request for resources of this type has named resources. After such a request, an empty list of names
    /// unsubscribes from all resources. Before such a request, an empty list of clusters or listeners is a wildcard
    /// subscription, and an empty list of endpoints or routes subscribes to nothing.
    has_named: bool,
    names: BTreeSet<String>,
    /// By name: the versions of the resources that were sent to the client.
    sent: BTreeMap<String, Version>,
    /// The nonce of the last response; empty before the first response.
    nonce: String,
}

impl Subscription {
    /// Replaces the subscribed names with the names in a request.
    fn subscribe(&mut self, kind: Kind, names: &[String]) {
        let is_all = |name: &String| name == "*";
        self.has_named |= !names.is_empty();
        self.is_wildcard = kind.is_complete() && (!self.has_named || names.iter().any(is_all));
        self.names =
            names.iter().filter(|name| !is_all(name) && is_short_enough(name)).take(MOST_NAMES).cloned().collect();
        let names = &self.names;
        if !self.is_wildcard {
            self.sent.retain(|name, _| names.contains(name));
        }
    }

    fn wanted(&self, kind: Kind, snapshot: &Snapshot) -> BTreeMap<String, Version> {
        let all = if self.is_wildcard { resources::all_names(kind, snapshot) } else { Vec::new() };
        let names = all.into_iter().chain(self.names.iter().cloned());
        names.filter_map(|name| resources::version(kind, &name, snapshot).map(|version| (name, version))).collect()
    }
}

impl Session for StateOfTheWorld {
    type Request = StateOfTheWorldRequest;

    fn subscribe(&mut self, request: &StateOfTheWorldRequest) -> Subscribed {
        let Some(kind) = Kind::of_url(&request.type_url) else {
            return Subscribed { kind: "unknown", event: "unknown_type", due: None };
        };
        let is_new = !self.subscriptions.contains_key(&kind);
        let subscription = self.subscriptions.entry(kind).or_default();
        let is_answer = !is_new && !request.response_nonce.is_empty();
        if is_answer && request.response_nonce != subscription.nonce {
            return Subscribed { kind: kind.as_str(), event: "stale", due: None };
        }
        subscription.subscribe(kind, &request.resource_names);
        let event = if is_answer { answer(request.error_detail.is_some()) } else { "subscribe" };
        // A request without a nonce, such as the first request after a reconnect, always gets a response.
        Subscribed { kind: kind.as_str(), event, due: Some((kind, !is_answer)) }
    }

    fn kinds(&self) -> Vec<Kind> {
        self.subscriptions.keys().copied().collect()
    }

    fn names(&self) -> usize {
        self.subscriptions.values().map(|subscription| subscription.names.len().max(subscription.sent.len())).sum()
    }

    /// Returns a response if a subscribed resource is new or has changed, if a subscribed cluster or listener was
    /// removed, or if `is_due` is true; otherwise returns `None`.
    fn respond(&mut self, kind: Kind, snapshot: &Snapshot, is_due: bool) -> Option<Reply> {
        let subscription = self.subscriptions.get_mut(&kind)?;
        let wanted = subscription.wanted(kind, snapshot);
        let is_changed = |(name, version): &(&String, &Version)| subscription.sent.get(*name) != Some(*version);
        let changed: Vec<&String> = wanted.iter().filter(is_changed).map(|(name, _)| name).collect();
        let is_one_gone = subscription.sent.keys().any(|name| !wanted.contains_key(name));
        if changed.is_empty() && !(kind.is_complete() && is_one_gone) && !is_due {
            return None;
        }
        let names: Vec<&String> = if kind.is_complete() || is_due { wanted.keys().collect() } else { changed };
        self.responses += 1;
        subscription.nonce = self.responses.to_string();
        let mut reply = Reply::new(&DiscoveryResponse {
            version_info: snapshot.version().to_string(),
            type_url: kind.url(),
            nonce: subscription.nonce.clone(),
            ..DiscoveryResponse::default()
        });
        for resource in names.into_iter().filter_map(|name| resources::resource(kind, name, snapshot)) {
            reply.push(resource);
        }
        subscription.sent = wanted;
        Some(reply)
    }
}
