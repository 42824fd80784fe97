// SPDX-License-Identifier: Apache-2.0
//! The code that both variants of xDS share: state of the world and delta.

use super::encode::Reply;
use crate::core::snapshot::Snapshot;

/// The result of a request to a session: the resource type and the event for the metrics and, if a response must be
/// sent, the response.
#[derive(Debug)]
pub(super) struct Handled {
    /// The short name of the resource type.
    pub(super) kind: &'static str,
    /// The event for the metrics: `subscribe`, `ack`, `nack`, `stale` or `unknown_type`.
    pub(super) event: &'static str,
    pub(super) response: Option<(&'static str, Reply)>,
}

/// The state machine of one xDS stream.
pub(super) trait Session: Default + Send + 'static {
    type Request: prost::Message + prost::Name + Default + 'static;

    fn on_request(&mut self, request: &Self::Request, snapshot: &Snapshot) -> Handled;
    /// Returns the responses to send after a new snapshot, in the order in which a client needs them.
    fn on_snapshot(&mut self, snapshot: &Snapshot) -> Vec<(&'static str, Reply)>;
    /// Returns the number of names that the session keeps, of subscriptions or of resources that the client has.
    fn names(&self) -> usize;
}

/// The maximum number of names per type to which one stream can subscribe. Names in excess of this number are ignored.
pub(super) const MOST_NAMES: usize = 20_000;
/// The maximum length of a name or version in bytes. Longer ones are ignored: no resource has such a name, because a
/// namespace, the name of a Service and the name of a port have at most 63 bytes each.
const LONGEST_NAME: usize = 256;

/// Returns whether a resource can have this name or version.
pub(super) const fn is_possible(name: &str) -> bool {
    name.len() <= LONGEST_NAME
}

/// Returns the event of a request that answers a response: `nack` if the request contains an error, otherwise `ack`.
pub(super) const fn answer(has_error: bool) -> &'static str {
    if has_error { "nack" } else { "ack" }
}
