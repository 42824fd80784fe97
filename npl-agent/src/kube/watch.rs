// SPDX-License-Identifier: Apache-2.0
//! Watches the cluster, and sends [`Change`]s in the API server's order.

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
    failure::{FailureKind, REFUSALS_TO_BELIEVE, root_cause},
    objects::{NodeObject, PodObject, ServiceObject},
};
use crate::{
    core::model::{Node, Pod, Service, snapshot::Change},
    metrics::{Metrics, WatchedResource},
};

/// How long the API server keeps a watch open. The client notices a dead connection 5 s after that.
pub(super) const WATCH_SECONDS: u32 = 240;

/// Starts the three watches. They end only when `changes` is closed, so the end of one is an error.
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

/// A watched object, and its changes.
trait Watched: Resource<DynamicType = ()> + Clone + fmt::Debug + DeserializeOwned + Send + 'static {
    const SUBJECT: WatchedResource;
    /// Lists are read in their newest state, not from a cache that may lack a Pod. An unpaged list does not read the
    /// API server's database, a paged one does. Pages are for lists that may be too large to decode at once.
    const PAGE_SIZE: Option<u32>;
    type Model: Send;

    fn convert(self, keys: &AnnotationKeys) -> Option<Converted<Self::Model>>;
    /// Whether an object of a list is kept. Of ten thousand Services few matter.
    fn matters(_object: &Self::Model) -> bool {
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

    fn matters(service: &Service) -> bool {
        service.is_active()
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
                    health.failed(&err);
                    None
                }
            };
            if let Some(change) = change {
                health.works();
                trace!(subject = %W::SUBJECT, ?change, "change");
                if self.changes.send(change).await.is_err() {
                    break;
                }
            }
        }
        W::SUBJECT
    }

    /// The objects of a list are collected until it is complete: in a partial list, the others would look deleted.
    fn change<W: Watched>(&self, event: Event<W>, listed: &mut Vec<W::Model>) -> Option<Change> {
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(object) => listed.extend(self.convert(object).filter(W::matters)),
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
            debug!(subject = %W::SUBJECT, namespace, name, "object without name, namespace or uid ignored");
            return None;
        };
        for value in skipped {
            debug!(subject = %W::SUBJECT, namespace, name, %value, "invalid value ignored");
        }
        Some(object)
    }
}

/// Logs the failures of a watch: each kind at once, then once a minute, and its recovery.
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

    fn works(&mut self) {
        self.refusals = 0;
        if !mem::take(&mut self.failing).is_empty() {
            info!(subject = %self.subject, "watch works again");
        }
    }

    fn failed(&mut self, err: &watcher::Error) {
        let kind = FailureKind::of_watch(err);
        self.metrics.count_watch_failure(self.subject, kind);
        if kind == FailureKind::Expired {
            debug!(subject = %self.subject, "watch expired; it starts again with a list");
            return;
        }
        if matches!(kind, FailureKind::Forbidden | FailureKind::Unauthorized) {
            self.refusals += 1;
            if self.refusals < REFUSALS_TO_BELIEVE {
                debug!(subject = %self.subject, err = root_cause(err), "the API server refuses the watch; the agent asks again");
                return;
            }
        }
        if self.failing.entry(kind).or_default().allows() {
            self.warn(kind, &root_cause(err));
        }
    }

    fn warn(&self, kind: FailureKind, err: &str) {
        let subject = self.subject;
        match kind {
            FailureKind::Forbidden => warn!(
                %subject, err,
                "the agent may not list and watch {subject}: apply deploy/npl.yaml, which grants it. Until then \
                 the last known state is served"
            ),
            FailureKind::Unauthorized => warn!(
                %subject, err,
                "the API server does not accept the agent's credentials: check its service account. Until then the \
                 last known state is served"
            ),
            FailureKind::Malformed => {
                warn!(%subject, err, "the API server's answer cannot be decoded; the last known state is served");
            }
            FailureKind::Unavailable | FailureKind::Unreachable | FailureKind::Rejected | FailureKind::Expired => {
                warn!(%subject, err, "watch is interrupted; the last known state is served");
            }
        }
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
