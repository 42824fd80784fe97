// SPDX-License-Identifier: Apache-2.0
//! Watches this Node, its Pods and the selected Services. Sends the changes of each kind of object to a receiver, such
//! as the agent's main loop, in the API server's order.
//!
//! A watch resumes at the last resource version that it has received. After the API server's store was restored from a
//! backup, the store's versions may be lower. The API server would then send no event until the store has reached the
//! last received version. After a watch that did not end on time, the agent therefore requests the store's newest
//! version. If the newest version is lower than the last received version, the agent lists all objects again.

use std::{convert::Infallible, fmt, mem, sync::Arc, time::Duration};

use futures::StreamExt as _;
use kube::{Client, api::WatchEvent};
use tokio::{
    sync::mpsc::Sender,
    task::JoinSet,
    time::{sleep, timeout},
};
use tracing::{debug, trace};

use super::{
    backoff::Jittered,
    convert::{AnnotationKeys, Converted},
    failure::{FailureKind, RequestFailure},
    objects::{NodeObject, PodObject, ServiceObject},
    source::{Events, OpenWatch, Page, Selection, Source, WatchStart},
    streaming::{self, CompleteList, StreamFailure},
    watch_health::{Observers, WatchHealth, WatchObserver},
    watched::Watched,
};
use crate::{
    core::model::{namespaces::Namespaces, snapshot::Change},
    metrics::WatchedResource,
};

/// Time in seconds after which the API server ends a watch and the agent starts the next one.
pub(super) const WATCH_SECONDS: u32 = 240;
const WATCH_LENGTH: Duration = Duration::from_secs(WATCH_SECONDS as u64);
/// How much later than requested the API server may end a watch. If the API server sends no bookmarks, the agent starts
/// the next watch after [`WATCH_LENGTH`] plus this time without an event.
const WATCH_TOLERANCE: Duration = Duration::from_secs(5);

/// If the API server has sent bookmarks before, a watch counts as dead after this time without an event. The API server
/// sends a bookmark at least every 75 s. This limit is needed behind a proxy that uses HTTP/1.1, because HTTP/1.1 has
/// no pings.
const LONGEST_SILENCE: Duration = Duration::from_secs(90);

/// The number of streaming lists that the agent requests in succession, while the API server answers that there are too
/// many requests (429). A list after a single such answer would burden the API server more than a streaming list. After
/// this number, the agent requests a list, because the API server may refuse only streaming lists.
const STREAMING_ATTEMPTS: u32 = 5;

/// If a watch was open for this time, the delay after its end is again as short as the first delay. The time that a
/// request waits for its answer does not count, so an API server that does not answer does not shorten the delays.
const STABLE_AFTER: Duration = Duration::from_mins(1);

/// The objects that the agent of a Node watches.
#[derive(Debug, Clone)]
pub struct WatchedObjects {
    /// The name by which the watches select the Node and its Pods.
    pub node_name: String,
    /// The namespaces of the watched Services.
    pub namespaces: Namespaces,
    /// The label selector of the watched Services; `None` selects all Services.
    pub service_selector: Option<String>,
}

/// Starts the watches of the Node, its Pods and the selected Services. Services have one watch for each selected
/// namespace. Pods always have a single watch: the API server sends only the Pods of this Node, and mappings must not
/// conflict with host ports and addresses of Pods in other namespaces. The watches run until the receiver of `changes`
/// is dropped; a watch that ends earlier is a fatal error.
pub(super) fn spawn(
    client: &Client,
    objects: &WatchedObjects,
    keys: &AnnotationKeys,
    observers: &Observers,
    changes: &Sender<Change>,
) -> JoinSet<WatchedResource> {
    let WatchedObjects { node_name, namespaces, service_selector } = objects;
    let watch = Watch::new(keys, Arc::new(observers.clone()), changes);
    let mut tasks = JoinSet::new();
    tasks.spawn(
        watch.clone().follow::<PodObject>(client.clone(), Selection::of_fields(&format!("spec.nodeName={node_name}"))),
    );
    for scope in namespaces.scopes() {
        let observer = Observers { namespace: scope.clone(), ..observers.clone() };
        let namespace = scope.map(|namespace| namespace.to_string());
        let services = Selection { namespace, labels: service_selector.clone(), ..Selection::default() };
        tasks.spawn(Watch::new(keys, Arc::new(observer), changes).follow::<ServiceObject>(client.clone(), services));
    }
    tasks
        .spawn(watch.follow::<NodeObject>(client.clone(), Selection::of_fields(&format!("metadata.name={node_name}"))));
    tasks
}

/// Watches objects and sends their changes to a receiver. Watches of different kinds of objects can share one receiver.
#[derive(Debug)]
pub struct Watch<C> {
    keys: AnnotationKeys,
    observer: Arc<dyn WatchObserver>,
    changes: Sender<C>,
}

// `Clone` is not derived, because a derived `Clone` would require `C: Clone`.
impl<C> Clone for Watch<C> {
    fn clone(&self) -> Self {
        Self { keys: self.keys.clone(), observer: Arc::clone(&self.observer), changes: self.changes.clone() }
    }
}

impl<C: fmt::Debug + Send + 'static> Watch<C> {
    /// Creates a watch that reports failures and recoveries to `observer`.
    pub fn new(keys: &AnnotationKeys, observer: Arc<dyn WatchObserver>, changes: &Sender<C>) -> Self {
        Self { keys: keys.clone(), observer, changes: changes.clone() }
    }

    /// Lists the selected objects of one kind and watches their changes, until the receiver of the changes is dropped.
    pub async fn follow<W: Watched<Change = C>>(self, client: Client, selection: Selection) -> WatchedResource {
        let health = WatchHealth::new(W::SUBJECT, Arc::clone(&self.observer));
        let (source, delays) = (Source::new(client, selection), Jittered::new());
        let mut follower = Follower::<W> {
            watch: self,
            source,
            delays,
            health,
            receives_bookmarks: false,
            supports_streaming: W::IS_STREAMED,
        };
        let Err(ReceiverDropped) = follower.run().await;
        W::SUBJECT
    }

    async fn send<W: Watched<Change = C>>(&self, change: C) -> Result<(), ReceiverDropped> {
        trace!(subject = %W::SUBJECT, ?change, "watch received a change");
        self.changes.send(change).await.map_err(|_returned| ReceiverDropped)
    }

    fn convert<W: Watched<Change = C>>(&self, object: W) -> Option<W::Model> {
        let name = object.meta().name.clone().unwrap_or_default();
        let namespace = object.meta().namespace.clone().unwrap_or_default();
        let Some(Converted { object, skipped }) = object.convert(&self.keys) else {
            debug!(subject = %W::SUBJECT, namespace, name, "skipped an object without name, namespace or uid");
            return None;
        };
        for value in skipped {
            debug!(subject = %W::SUBJECT, namespace, name, %value, "skipped an invalid value of an object");
        }
        Some(object)
    }
}

/// The receiver of the changes was dropped, because the agent stops.
struct ReceiverDropped;

/// How a watch ended.
enum End {
    /// The API server ended the watch at the requested time.
    OnTime,
    /// The watch ended before the requested time, for example because the API server stopped. `was_idle` is true if the
    /// watch received no event.
    Early { was_idle: bool },
    /// The watch failed, for example because the API server did not answer.
    Failed(RequestFailure),
}

/// The state after the first objects were sent to the receiver. The watch of their changes begins in this state.
struct Beginning<W> {
    /// The resource version of the objects.
    version: String,
    /// The watch that has sent the objects by a streaming list; `None` if the objects were listed.
    watch: Option<OpenWatch<W>>,
}

/// Lists objects of one kind and watches their changes.
struct Follower<W: Watched> {
    watch: Watch<W::Change>,
    source: Source<W>,
    delays: Jittered,
    health: WatchHealth,
    /// Whether the API server sends bookmarks. Each bookmark sets this field, and a due bookmark that does not arrive
    /// clears the field.
    receives_bookmarks: bool,
    /// Whether to request streaming lists. The value becomes false, until the agent exits, when the agent learns that
    /// the API server does not support streaming lists, or that the API server's store was restored.
    supports_streaming: bool,
}

impl<W: Watched> Follower<W> {
    async fn run(&mut self) -> Result<Infallible, ReceiverDropped> {
        loop {
            let beginning = self.begin().await?;
            self.follow_from(beginning).await?;
        }
    }

    /// Requests all objects, and sends them to the receiver. Requests a streaming list first, if the API server may
    /// support streaming lists. If there is no complete streaming list, requests lists until one succeeds.
    async fn begin(&mut self) -> Result<Beginning<W>, ReceiverDropped> {
        let mut attempts = 0..STREAMING_ATTEMPTS;
        while self.supports_streaming && attempts.next().is_some() {
            let convert = |object| self.watch.convert::<W>(object).filter(W::is_relevant);
            match streaming::receive(&self.source, WATCH_SECONDS, convert).await {
                Ok((CompleteList { objects, version }, watch)) => {
                    // A bookmark marks the end of the initial events, so the API server sends bookmarks.
                    self.receives_bookmarks = true;
                    self.health.record_success();
                    self.watch.send::<W>(W::listed(self.source.namespace(), objects)).await?;
                    return Ok(Beginning { version, watch: Some(watch) });
                }
                Err(StreamFailure::Unsupported(reason)) => {
                    debug!(
                        subject = %W::SUBJECT, reason,
                        "the API server does not support streaming lists; the agent requests a list"
                    );
                    self.supports_streaming = false;
                }
                Err(StreamFailure::Throttled(failure)) => self.record_failure_and_wait(&failure).await,
                Err(StreamFailure::OutdatedCache(failure)) => {
                    self.health.record_outdated_cache(&failure);
                    self.wait(failure.after).await;
                    break;
                }
                Err(StreamFailure::Failed(failure)) => {
                    self.record_failure_and_wait(&failure).await;
                    break;
                }
            }
        }
        Ok(Beginning { version: self.list().await?, watch: None })
    }

    /// Requests and sends a complete list, and returns its resource version. All pages are collected before the list is
    /// sent, because the receiver treats objects that are not in the list as deleted.
    async fn list(&mut self) -> Result<String, ReceiverDropped> {
        let mut listed = Vec::new();
        let mut page = Page { size: W::PAGE_SIZE, token: None };
        loop {
            match self.source.page(&page).await {
                Ok(list) => {
                    let relevant = list.items.into_iter().filter_map(|object| self.watch.convert(object));
                    listed.extend(relevant.filter(W::is_relevant));
                    page.token = list.metadata.continue_.filter(|token| !token.is_empty());
                    if page.token.is_some() {
                        continue;
                    }
                    if let Some(version) = list.metadata.resource_version.filter(|version| !version.is_empty()) {
                        self.health.record_success();
                        self.watch.send::<W>(W::listed(self.source.namespace(), listed)).await?;
                        return Ok(version);
                    }
                    listed.clear();
                    self.record_failure_and_wait(&RequestFailure::without_version()).await;
                }
                Err(failure) => {
                    if let Some(first) = start_over(&page, failure.kind) {
                        page = first;
                        listed.clear();
                    }
                    self.record_failure_and_wait(&failure).await;
                }
            }
        }
    }

    /// Watches the changes of the first objects and sends each change, until the agent must list all objects again.
    async fn follow_from(&mut self, beginning: Beginning<W>) -> Result<(), ReceiverDropped> {
        let Beginning { mut version, mut watch } = beginning;
        let mut may_be_restored = false;
        loop {
            if may_be_restored {
                match self.source.newest_version().await {
                    Ok(newest) if is_older(&newest, &version) => {
                        self.health.record_restore(&version, &newest);
                        // The watch cache of an API server that was not restarted contains the former objects with
                        // higher versions. The API server would send these former objects as a streaming list, even
                        // much later, for example after the watch has expired.
                        self.supports_streaming = false;
                        return match W::restored() {
                            Some(change) => self.watch.send::<W>(change).await,
                            None => Ok(()),
                        };
                    }
                    Ok(_newer) => {}
                    Err(failure) => {
                        self.record_failure_and_wait(&failure).await;
                        continue;
                    }
                }
            }
            let end = self.follow_one_watch(watch.take(), &mut version).await?;
            may_be_restored = !matches!(end, End::OnTime);
            match end {
                End::OnTime | End::Early { was_idle: false } => {}
                // The delay prevents a busy loop if a proxy ends every watch immediately.
                End::Early { was_idle: true } => self.wait(None).await,
                End::Failed(failure) => {
                    self.record_failure_and_wait(&failure).await;
                    if failure.kind == FailureKind::Expired {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Sends the changes that the watch `open` receives, or a new watch if `open` is `None`. Sets `version` to the last
    /// received resource version.
    async fn follow_one_watch(
        &mut self,
        open: Option<OpenWatch<W>>,
        version: &mut String,
    ) -> Result<End, ReceiverDropped> {
        let opened = match open {
            Some(open) => Ok(open),
            None => self.source.watch(WatchStart::After(version), WATCH_SECONDS).await,
        };
        let OpenWatch { started, events } = match opened {
            Ok(open) => open,
            Err(failure) => return Ok(End::Failed(failure)),
        };
        self.health.record_start();
        let end = self.follow_events(events, version).await?;
        if started.elapsed() >= STABLE_AFTER {
            self.delays.reset();
        }
        let is_on_time = matches!(end, End::Early { .. }) && started.elapsed() >= WATCH_LENGTH;
        Ok(if is_on_time { End::OnTime } else { end })
    }

    /// Sends the changes of these events until the watch ends. Sets `version` to the last received resource version. The
    /// result is never [`End::OnTime`].
    async fn follow_events(&mut self, mut events: Events<W>, version: &mut String) -> Result<End, ReceiverDropped> {
        let mut was_idle = true;
        loop {
            let limit = if self.receives_bookmarks { LONGEST_SILENCE } else { WATCH_LENGTH + WATCH_TOLERANCE };
            let event = match timeout(limit, events.next()).await {
                Ok(Some(event)) => event,
                Err(_silent) if mem::take(&mut self.receives_bookmarks) => {
                    return Ok(End::Failed(RequestFailure::without_bookmark(limit)));
                }
                Ok(None) | Err(_) => break,
            };
            let (seen, change) = match event {
                Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
                    (object.meta().resource_version.clone(), self.watch.convert(object).map(W::applied))
                }
                Ok(WatchEvent::Deleted(object)) => {
                    (object.meta().resource_version.clone(), self.watch.convert(object).map(W::gone))
                }
                Ok(WatchEvent::Bookmark(bookmark)) => {
                    self.receives_bookmarks = true;
                    (Some(bookmark.metadata.resource_version), None)
                }
                Ok(WatchEvent::Error(status)) => return Ok(End::Failed(RequestFailure::of_status(&status))),
                Err(failure) => return Ok(End::Failed(failure)),
            };
            let Some(seen) = seen.filter(|seen| !seen.is_empty()) else {
                return Ok(End::Failed(RequestFailure::without_version()));
            };
            *version = seen;
            was_idle = false;
            self.health.record_success();
            if let Some(change) = change {
                self.watch.send::<W>(change).await?;
            }
        }
        Ok(End::Early { was_idle })
    }

    async fn record_failure_and_wait(&mut self, failure: &RequestFailure) {
        self.health.record_failure(failure);
        self.wait(failure.after).await;
    }

    /// Waits for the next delay of the back-off, but at least for `at_least`, the delay that the API server requests.
    async fn wait(&mut self, at_least: Option<Duration>) {
        let delay = self.delays.next().unwrap_or_default();
        sleep(delay.max(at_least.unwrap_or_default())).await;
    }
}

/// Returns the page to request instead of `page` if another request for `page` would fail again; `None` if `page` can
/// be retried.
fn start_over(page: &Page, failure: FailureKind) -> Option<Page> {
    match failure {
        // etcd has compacted the revision of the first page, so the remaining pages of the list are lost. The agent
        // requests an unpaged list, because an unpaged list cannot expire.
        FailureKind::Expired => Some(Page { size: None, token: None }),
        FailureKind::Rejected | FailureKind::Malformed | FailureKind::Restored => {
            Some(Page { size: page.size, token: None })
        }
        FailureKind::Unauthorized | FailureKind::Forbidden | FailureKind::Unavailable | FailureKind::Unreachable => {
            None
        }
    }
}

/// Returns whether the resource version `version` is lower than `than`; false if one of the two is not a number.
fn is_older(version: &str, than: &str) -> bool {
    let number = |text: &str| text.parse::<u64>().ok();
    number(version).zip(number(than)).is_some_and(|(version, than)| version < than)
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
