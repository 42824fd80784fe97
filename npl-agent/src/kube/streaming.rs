// SPDX-License-Identifier: Apache-2.0
//! Collects the events of a streaming list: a watch that first sends all objects, then a bookmark that marks the end of
//! these initial events.

use std::{collections::BTreeMap, mem, time::Duration};

use futures::StreamExt as _;
use kube::api::WatchEvent;
use tokio::time::{Instant, timeout_at};

use super::{
    failure::{FailureKind, RequestFailure},
    source::{OpenWatch, Source, WatchStart},
    watched::Watched,
};

/// A streaming list counts as unsupported if its end has not arrived after this time. The API server sends the initial
/// events without a pause, and their end about one second later.
const INITIAL_EVENTS: Duration = Duration::from_secs(20);

/// The annotation of the bookmark that ends the initial events.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// The status codes of answers that need a reaction of their own.
const TOO_MANY_REQUESTS: u16 = 429;
const GATEWAY_TIMEOUT: u16 = 504;

/// Why a streaming list gave no complete list.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum StreamFailure {
    /// The API server, or a proxy in front of it, does not support streaming lists, for this reason.
    Unsupported(String),
    /// The API server limits the rate of requests (429).
    Throttled(RequestFailure),
    /// The API server's watch cache has not reached the newest state of etcd in time (504). A list does not need the
    /// watch cache.
    OutdatedCache(RequestFailure),
    /// The request failed for a reason that does not depend on streaming lists.
    Failed(RequestFailure),
}

impl StreamFailure {
    /// The API server accepted the watch, but has not sent the end of the initial events. API servers that ignore the
    /// parameters of a streaming list send the same events as for a watch without a resource version.
    pub(super) fn without_end() -> Self {
        Self::Unsupported("the answer does not mark the end of the initial events".to_owned())
    }
}

impl From<RequestFailure> for StreamFailure {
    fn from(failure: RequestFailure) -> Self {
        match failure.kind {
            _ if failure.status == Some(TOO_MANY_REQUESTS) => Self::Throttled(failure),
            _ if failure.status == Some(GATEWAY_TIMEOUT) => Self::OutdatedCache(failure),
            // An API server whose feature gate `WatchList` is off answers 422.
            FailureKind::Rejected | FailureKind::Malformed | FailureKind::Expired | FailureKind::Restored => {
                Self::Unsupported(failure.cause)
            }
            FailureKind::Unauthorized
            | FailureKind::Forbidden
            | FailureKind::Unavailable
            | FailureKind::Unreachable => Self::Failed(failure),
        }
    }
}

/// The complete list at one resource version.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CompleteList<M> {
    pub(super) objects: Vec<M>,
    pub(super) version: String,
}

/// Requests and receives a streaming list. The API server ends the watch after `seconds`. Returns the list only after
/// the end of the initial events, because objects that are not in a list count as deleted. The returned watch then
/// sends the changes.
pub(super) async fn receive<W: Watched>(
    source: &Source<W>,
    seconds: u32,
    convert: impl Fn(W) -> Option<W::Model>,
) -> Result<(CompleteList<W::Model>, OpenWatch<W>), StreamFailure> {
    let mut watch = source.watch(WatchStart::InitialEvents, seconds).await?;
    let mut objects = InitialObjects::new();
    let limit = Instant::now() + INITIAL_EVENTS;
    while let Ok(next) = timeout_at(limit, watch.events.next()).await {
        let event = next.unwrap_or_else(|| Err(RequestFailure::interrupted()))?;
        if let Some(list) = objects.apply(event, &convert)? {
            return Ok((list, watch));
        }
    }
    Err(StreamFailure::without_end())
}

/// Namespace and name of an object.
type Key = (Option<String>, Option<String>);

/// The objects that a streaming list has sent so far. The API server may send changes of objects among the initial
/// events, so each event replaces the previous state of its object.
#[derive(Debug)]
pub(super) struct InitialObjects<M>(BTreeMap<Key, M>);

impl<M> InitialObjects<M> {
    pub(super) const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Applies one event. `convert` returns the model of an object, or `None` for an object that the agent does not
    /// need. Returns the complete list if the event is the end of the initial events.
    pub(super) fn apply<W: kube::Resource>(
        &mut self,
        event: WatchEvent<W>,
        convert: impl FnOnce(W) -> Option<M>,
    ) -> Result<Option<CompleteList<M>>, StreamFailure> {
        let key = |object: &W| (object.meta().namespace.clone(), object.meta().name.clone());
        match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                let key = key(&object);
                match convert(object) {
                    Some(object) => self.0.insert(key, object),
                    None => self.0.remove(&key),
                };
                Ok(None)
            }
            WatchEvent::Deleted(object) => {
                self.0.remove(&key(&object));
                Ok(None)
            }
            WatchEvent::Bookmark(bookmark) => {
                let is_end = bookmark.metadata.annotations.get(INITIAL_EVENTS_END).is_some_and(|value| value == "true");
                // An API server that supports streaming lists sends no bookmark before the end of the initial events.
                if !is_end {
                    return Err(StreamFailure::without_end());
                }
                let version = bookmark.metadata.resource_version;
                if version.is_empty() {
                    return Err(RequestFailure::without_version().into());
                }
                Ok(Some(CompleteList { objects: mem::take(&mut self.0).into_values().collect(), version }))
            }
            WatchEvent::Error(status) => Err(RequestFailure::of_status(&status).into()),
        }
    }
}

#[cfg(test)]
#[path = "streaming_tests.rs"]
mod tests;
