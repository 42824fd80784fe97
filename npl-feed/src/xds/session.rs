// SPDX-License-Identifier: Apache-2.0
//! The code that both variants of xDS share: state of the world and delta.

use super::{encode::Reply, resources::Kind};
use crate::core::snapshot::{LONGEST_NAME, Snapshot};

/// The result of a request to a session: the resource type and the event for the metrics, and the response that is due.
#[derive(Debug)]
pub(super) struct Subscribed {
    /// The short name of the resource type.
    pub(super) kind: &'static str,
    /// The event for the metrics: `subscribe`, `ack`, `nack`, `stale` or `unknown_type`.
    pub(super) event: &'static str,
    /// The type for which the caller must call [`Session::respond`], and the value of `is_due`; `None` if the request
    /// gets no response.
    pub(super) due: Option<(Kind, bool)>,
}

/// The state machine of one xDS stream.
pub(super) trait Session: Default + Send + 'static {
    type Request: prost::Message + prost::Name + Default + 'static;

    /// Changes the subscriptions as the request demands.
    fn subscribe(&mut self, request: &Self::Request) -> Subscribed;
    /// Returns the types with subscriptions, in the order in which a client needs their responses.
    fn kinds(&self) -> Vec<Kind>;
    /// Returns the response with the changes since the last response of the type; `None` if there are none and
    /// `is_due` is false.
    fn respond(&mut self, kind: Kind, snapshot: &Snapshot, is_due: bool) -> Option<Reply>;
    /// Returns the number of names in memory: for each type, the subscribed names or the names of the resources that
    /// the client has, whichever are more.
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
