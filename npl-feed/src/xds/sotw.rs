// SPDX-License-Identifier: Apache-2.0
//! Implements the state-of-the-world variant of xDS. A request names all subscribed resources of one type. Clients
//! remove clusters and listeners that a response lacks, so a response with clusters or listeners contains all
//! subscribed ones. After a new snapshot, a response with endpoints or routes contains only changed ones.

use std::{collections::BTreeMap, mem};

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryResponse;

use super::{
    encode::Reply,
    request::StateOfTheWorldRequest,
    resources::{self, Kind},
    session::{MOST_NAMES, Session, Subscribed, SubscribedNames, Trigger, answer, is_short_enough},
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
    names: SubscribedNames,
    /// Whether a request for resources of this type has named resources. After such a request, an empty list of names
    /// unsubscribes from all resources. Before such a request, an empty list of clusters or listeners is a wildcard
    /// subscription, and an empty list of endpoints or routes subscribes to nothing.
    has_named: bool,
    /// By resource name: the version that was last sent to the client.
    sent: BTreeMap<String, Version>,
    /// The nonce of the last response; empty before the first response.
    nonce: String,
}

impl Subscription {
    /// Replaces the subscribed names with the names in a request. Returns whether the subscribed names have changed.
    fn subscribe(&mut self, kind: Kind, names: &[String]) -> bool {
        let is_all = |name: &String| name == "*";
        self.has_named |= !names.is_empty();
        let is_wildcard = kind.is_complete() && (!self.has_named || names.iter().any(is_all));
        let explicit = names.iter().filter(|name| !is_all(name) && is_short_enough(name)).take(MOST_NAMES);
        let former =
            mem::replace(&mut self.names, SubscribedNames { is_wildcard, explicit: explicit.cloned().collect() });
        let explicit = &self.names.explicit;
        if !is_wildcard {
            self.sent.retain(|name, _| explicit.contains(name));
        }
        self.names != former
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
        let has_changed = subscription.subscribe(kind, &request.resource_names);
        let event = if is_answer { answer(request.error_detail.is_some()) } else { "subscribe" };
        // A request without a nonce, such as the first request after a reconnect, always gets a response. A request
        // that only acknowledges or rejects a response gets no response, because each new snapshot is sent at once.
        let trigger = if is_answer { has_changed.then_some(Trigger::Subscription) } else { Some(Trigger::Request) };
        Subscribed { kind: kind.as_str(), event, due: trigger.map(|trigger| (kind, trigger)) }
    }

    fn kinds(&self) -> Vec<Kind> {
        self.subscriptions.keys().copied().collect()
    }

    fn names(&self) -> usize {
        self.subscriptions
            .values()
            .map(|subscription| subscription.names.explicit.len().max(subscription.sent.len()))
            .sum()
    }

    /// Returns a response if a subscribed resource is new or has changed, if a subscribed cluster or listener was
    /// removed, or if the trigger demands an answer; otherwise returns `None`.
    fn respond(&mut self, kind: Kind, snapshot: &Snapshot, trigger: Trigger<'_>) -> Option<Reply> {
        let Subscription { names, sent, nonce, .. } = self.subscriptions.get_mut(&kind)?;
        let is_due = trigger == Trigger::Request;
        let mut changed = Vec::new();
        let mut is_one_gone = false;
        for name in names.affected(trigger, snapshot, sent) {
            match names.version(kind, &name, snapshot) {
                Some(version) if sent.get(&name) == Some(&version) => {}
                Some(version) => {
                    sent.insert(name.clone(), version);
                    changed.push(name);
                }
                None => is_one_gone |= sent.remove(&name).is_some(),
            }
        }
        if changed.is_empty() && !(kind.is_complete() && is_one_gone) && !is_due {
            return None;
        }
        self.responses += 1;
        *nonce = self.responses.to_string();
        let mut reply = Reply::new(&DiscoveryResponse {
            version_info: snapshot.version().to_string(),
            type_url: kind.url(),
            nonce: nonce.clone(),
            ..DiscoveryResponse::default()
        });
        let names: Vec<&String> =
            if kind.is_complete() || is_due { sent.keys().collect() } else { changed.iter().collect() };
        for resource in names.into_iter().filter_map(|name| resources::resource(kind, name, snapshot)) {
            reply.push(resource);
        }
        Some(reply)
    }
}
