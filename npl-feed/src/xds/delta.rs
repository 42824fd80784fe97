// SPDX-License-Identifier: Apache-2.0
//! Implements the delta variant of xDS: a request subscribes to names or unsubscribes from names, and a response
//! contains only changed resources.

use std::collections::{BTreeMap, BTreeSet};

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;

use super::{
    encode::Reply,
    request::DeltaRequest,
    resources::{self, Kind},
    session::{MOST_NAMES, Session, Subscribed, SubscribedNames, Trigger, answer, is_short_enough},
};
use crate::core::snapshot::Snapshot;

/// The state of one xDS stream of the delta variant.
#[derive(Debug, Default)]
pub(super) struct Delta {
    subscriptions: BTreeMap<Kind, Subscription>,
    responses: u64,
}

#[derive(Debug, Default)]
struct Subscription {
    names: SubscribedNames,
    /// The versions of the resources that the client has, by name. A version is a string, because the client sends
    /// versions as strings after a reconnect.
    known: BTreeMap<String, String>,
    /// The subscribed names for which no resource exists, and that a response has already reported as removed.
    absent: BTreeSet<String>,
}

impl Subscription {
    fn subscribe(&mut self, kind: Kind, request: &DeltaRequest, is_new: bool) {
        if is_new {
            self.names.is_wildcard = kind.is_complete() && request.resource_names_subscribe.is_empty();
            let known = request.initial_resource_versions.iter();
            let known =
                known.filter(|(name, version)| is_short_enough(name) && is_short_enough(version)).take(MOST_NAMES);
            self.known = known.map(|(name, version)| (name.clone(), version.clone())).collect();
        }
        for name in &request.resource_names_unsubscribe {
            if name == "*" {
                self.names.is_wildcard = false;
            }
            self.names.explicit.remove(name);
            self.known.remove(name);
            self.absent.remove(name);
        }
        for name in &request.resource_names_subscribe {
            if name == "*" {
                self.names.is_wildcard = kind.is_complete();
            } else if self.names.explicit.len() < MOST_NAMES && is_short_enough(name) {
                self.names.explicit.insert(name.clone());
                if !is_new {
                    // If the client subscribes to a name again, the feed sends the resource again, as the protocol
                    // requires.
                    self.known.remove(name);
                }
                self.absent.remove(name);
            }
        }
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
        // A request that only acknowledges or rejects a response gets no response, because each new snapshot is sent at
        // once.
        let has_changed =
            !request.resource_names_subscribe.is_empty() || !request.resource_names_unsubscribe.is_empty();
        let trigger = if is_new { Some(Trigger::Request) } else { has_changed.then_some(Trigger::Subscription) };
        Subscribed { kind: kind.as_str(), event, due: trigger.map(|trigger| (kind, trigger)) }
    }

    fn kinds(&self) -> Vec<Kind> {
        self.subscriptions.keys().copied().collect()
    }

    fn names(&self) -> usize {
        self.subscriptions
            .values()
            .map(|subscription| subscription.names.explicit.len().max(subscription.known.len()))
            .sum()
    }

    /// Returns a response with the resources whose versions differ from the client's versions. If the trigger demands
    /// an answer, returns a response even without changes, so that a client with a wildcard subscription knows that it
    /// has all resources.
    fn respond(&mut self, kind: Kind, snapshot: &Snapshot, trigger: Trigger<'_>) -> Option<Reply> {
        let Subscription { names, known, absent } = self.subscriptions.get_mut(&kind)?;
        let (mut changed, mut removed) = (Vec::new(), Vec::new());
        for name in names.affected(trigger, snapshot, known) {
            if let Some(version) = names.version(kind, &name, snapshot) {
                absent.remove(&name);
                let version = version.to_string();
                if known.get(&name) != Some(&version)
                    && let Some(resource) = resources::resource(kind, &name, snapshot)
                {
                    known.insert(name.clone(), version.clone());
                    changed.push((name, version, resource));
                }
            } else {
                let was_known = known.remove(&name).is_some();
                let is_new = names.explicit.contains(&name) && absent.insert(name.clone());
                if was_known || is_new {
                    removed.push(name);
                }
            }
        }
        if changed.is_empty() && removed.is_empty() && trigger != Trigger::Request {
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
            reply.push_named(&name, &version, resource);
        }
        Some(reply)
    }
}
