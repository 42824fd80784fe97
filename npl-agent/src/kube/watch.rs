// SPDX-License-Identifier: Apache-2.0
//! Watches the Pods of this Node, all Services and this Node, and sends their changes in the API server's order.

use std::{collections::BTreeMap, fmt, mem, pin::pin};

use futures::StreamExt;
use kube::{
    Api, Client, Resource,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::{sync::mpsc::Sender, task::JoinSet};
use tracing::{debug, info, trace, warn};

use super::{
    backoff::{Jittered, Throttle},
    convert::{self, AnnotationKeys, Converted},
    failure::{FailureKind, REFUSALS_TO_CONFIRM, root_cause},
    objects::{NodeObject, PodObject, ServiceObject},
};
use crate::{
    core::model::{Node, Pod, Service, snapshot::Change},
    metrics::{Metrics, WatchedResource},
};

/// Time in seconds after which the API server ends a watch and the agent starts the next one. A connection that died
/// silently is detected 5 s later, by kube's client-side timeout.
pub(super) const WATCH_SECONDS: u32 = 240;

/// Starts the three watches. They run until the receiver of `changes` is dropped, so an earlier end is a fatal error.
pub fn spawn(
    client: &Client,
    node_name: &str,
    keys: &AnnotationKeys,
    metrics: &Metrics,
    changes: &Sender<Change>,
) -> JoinSet<WatchedResource> {
    let watch = Watch { keys: keys.clone(), metrics: metrics.clone(), changes: changes.clone() };
    let mut tasks = JoinSet::new();
    tasks.spawn(watch.clone().follow::<PodObject>(client.clone(), Some(format!("spec.nodeName={node_name}"))));
    tasks.spawn(watch.clone().follow::<ServiceObject>(client.clone(), None));
    tasks.spawn(watch.follow::<NodeObject>(client.clone(), Some(format!("metadata.name={node_name}"))));
    tasks
}

/// A watched kind of object, and its conversion to changes.
trait Watched: Resource<DynamicType = ()> + Clone + fmt::Debug + DeserializeOwned + Send + 'static {
    const SUBJECT: WatchedResource;
    /// Page size of lists; `None` lists everything in one answer. Lists always ask for the newest state, since an older
    /// one could lack a Pod that is served. The API server can answer an unpaged list from its watch cache, but reads
    /// etcd for each page, so only lists that may be too large for memory are paged.
    const PAGE_SIZE: Option<u32>;
    type Model: Send;

    fn convert(self, keys: &AnnotationKeys) -> Option<Converted<Self::Model>>;
    /// Whether to keep an object of a list. Few of ten thousand Services are relevant, and the list is held in memory
    /// until it is complete.
    fn is_relevant(_object: &Self::Model) -> bool {
        true
    }
    fn listed(all: Vec<Self::Model>) -> Change;
    fn applied(object: Self::Model) -> Change;
    fn gone(object: Self::Model) -> Change;
}

impl Watched for PodObject {
    const SUBJECT: WatchedResource = WatchedResource::Pods;
    const PAGE_SIZE: Option<u32> = None;
    type Model = Pod;

    fn convert(self, keys: &AnnotationKeys) -> Option<Converted<Pod>> {
        convert::pod(self, keys)
    }

    fn listed(all: Vec<Pod>) -> Change {
        Change::Pods(all)
    }

    fn applied(pod: Pod) -> Change {
        Change::Pod(pod)
    }

    fn gone(pod: Pod) -> Change {
        Change::PodGone(pod.key, pod.uid)
    }
}

impl Watched for ServiceObject {
    const SUBJECT: WatchedResource = WatchedResource::Services;
    const PAGE_SIZE: Option<u32> = Some(500);
    type Model = Service;

    fn convert(self, keys: &AnnotationKeys) -> Option<Converted<Service>> {
        convert::service(self, keys)
    }

    fn is_relevant(service: &Service) -> bool {
        service.is_active() || !service.node_ports.is_empty()
    }

    fn listed(all: Vec<Service>) -> Change {
        Change::Services(all)
    }

    fn applied(service: Service) -> Change {
        Change::Service(service)
    }

    fn gone(service: Service) -> Change {
        Change::ServiceGone(service.key)
    }
}

impl Watched for NodeObject {
    const SUBJECT: WatchedResource = WatchedResource::Node;
    const PAGE_SIZE: Option<u32> = None;
    type Model = Node;

    fn convert(self, _: &AnnotationKeys) -> Option<Converted<Node>> {
        convert::node(self)
    }

    fn listed(all: Vec<Node>) -> Change {
        all.into_iter().next().map_or(Change::NodeGone, Change::Node)
    }

    fn applied(node: Node) -> Change {
        Change::Node(node)
    }

    fn gone(_: Node) -> Change {
        Change::NodeGone
    }
}

#[derive(Clone)]
struct Watch {
    keys: AnnotationKeys,
    metrics: Metrics,
    changes: Sender<Change>,
}

impl Watch {
    async fn follow<W: Watched>(self, client: Client, fields: Option<String>) -> WatchedResource {
        let mut config = watcher::Config::default().timeout(WATCH_SECONDS);
        config.field_selector = fields;
        config.page_size = W::PAGE_SIZE;
        let mut events = pin!(watcher(Api::<W>::all(client), config).backoff(Jittered::new()));
        let mut listed = Vec::new();
        let mut health = WatchHealth::new(W::SUBJECT, self.metrics.clone());
        while let Some(event) = events.next().await {
            let change = match event {
                Ok(event) => self.change::<W>(event, &mut listed),
                Err(err) => {
                    health.record_failure(&err);
                    None
                }
            };
            if let Some(change) = change {
                health.record_success();
                trace!(subject = %W::SUBJECT, ?change, "watch received a change");
                if self.changes.send(change).await.is_err() {
                    break;
                }
            }
        }
        W::SUBJECT
    }

    /// Converts an event. Objects of a list are collected until the list is complete, since a partial list would look
    /// as if the other objects were deleted.
    fn change<W: Watched>(&self, event: Event<W>, listed: &mut Vec<W::Model>) -> Option<Change> {
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(object) => listed.extend(self.convert(object).filter(W::is_relevant)),
            Event::InitDone => return Some(W::listed(mem::take(listed))),
            Event::Apply(object) => return self.convert(object).map(W::applied),
            Event::Delete(object) => return self.convert(object).map(W::gone),
        }
        None
    }

    fn convert<W: Watched>(&self, object: W) -> Option<W::Model> {
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

/// Logs failures of a watch: each kind at once and then once per minute, and the recovery.
struct WatchHealth {
    subject: WatchedResource,
    metrics: Metrics,
    failing: BTreeMap<FailureKind, Throttle>,
    refusals: u32,
}

impl WatchHealth {
    fn new(subject: WatchedResource, metrics: Metrics) -> Self {
        Self { subject, metrics, failing: BTreeMap::new(), refusals: 0 }
    }

    fn record_success(&mut self) {
        self.refusals = 0;
        if !mem::take(&mut self.failing).is_empty() {
            info!(subject = %self.subject, "watch has recovered; the agent follows changes again");
        }
    }

    fn record_failure(&mut self, err: &watcher::Error) {
        let kind = FailureKind::of_watch(err);
        self.metrics.count_watch_failure(self.subject, kind);
        if kind == FailureKind::Expired {
            debug!(subject = %self.subject, "the resource version has expired; the watch starts again with a list");
            return;
        }
        if matches!(kind, FailureKind::Forbidden | FailureKind::Unauthorized) {
            self.refusals += 1;
            if self.refusals < REFUSALS_TO_CONFIRM {
                debug!(subject = %self.subject, err = root_cause(err), "the API server refused the watch; retrying");
                return;
            }
        }
        if self.failing.entry(kind).or_default().acquire() {
            self.log_failure(kind, &root_cause(err));
        }
    }

    fn log_failure(&self, kind: FailureKind, err: &str) {
        let subject = self.subject;
        match kind {
            FailureKind::Forbidden => warn!(
                %subject, err,
                "the agent may not list and watch {subject}: apply deploy/npl.yaml, which grants the permission; \
                 until then the agent serves the last known state"
            ),
            FailureKind::Unauthorized => warn!(
                %subject, err,
                "the API server does not accept the agent's credentials: check that its service account exists; until \
                 then the agent serves the last known state"
            ),
            FailureKind::Malformed => {
                warn!(
                    %subject, err,
                    "the answer to the watch of {subject} cannot be decoded: check for a proxy in front of the API \
                     server; until then the agent serves the last known state"
                );
            }
            FailureKind::Unavailable | FailureKind::Unreachable | FailureKind::Rejected | FailureKind::Expired => {
                warn!(
                    %subject, err,
                    "watch of {subject} is interrupted: the agent retries and serves the last known state; check that \
                     the API server is reachable from this Node"
                );
            }
        }
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
