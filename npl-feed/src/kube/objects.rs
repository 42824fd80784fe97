// SPDX-License-Identifier: Apache-2.0
//! Decodes the watched objects. The agent's library decodes and converts most fields; this module adds the fields that
//! only the feed reads.

use std::{borrow::Cow, sync::Arc};

use ::kube::{
    Resource,
    core::{ClusterResourceScope, NamespaceResourceScope},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use npl_agent::{
    core::model::ServiceKey,
    kube::{
        convert::{self, AnnotationKeys, Converted},
        objects::{NodeObject, PodObject, ServiceObject},
        watched::Watched,
    },
    metrics::WatchedResource,
};
use serde::Deserialize;

use crate::core::{
    entries,
    model::{Change, NamedPort, Node, Pod, Service},
};

const ZONE: &str = "topology.kubernetes.io/zone";

/// The maximum number of Pods per page of a list. After each page, the feed drops the Pods without the annotation, so
/// that the feed's memory is bounded in a large cluster. If a known Pod is absent from a list, the Pod's members drain:
/// see [`crate::core::state::State`].
const PODS_PER_PAGE: u32 = 500;
const SERVICES_PER_PAGE: u32 = 500;

macro_rules! wrapper {
    ($(#[$doc:meta])* $name:ident, $object:ty, $scope:ty) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Deserialize)]
        #[serde(transparent)]
        pub(super) struct $name($object);

        impl Resource for $name {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                <$object as Resource>::kind(&())
            }

            fn group((): &()) -> Cow<'_, str> {
                <$object as Resource>::group(&())
            }

            fn version((): &()) -> Cow<'_, str> {
                <$object as Resource>::version(&())
            }

            fn plural((): &()) -> Cow<'_, str> {
                <$object as Resource>::plural(&())
            }

            fn meta(&self) -> &ObjectMeta {
                self.0.meta()
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                self.0.meta_mut()
            }
        }
    };
}

wrapper!(
    /// A Pod as the API server sends it.
    FeedPod, PodObject, NamespaceResourceScope
);
wrapper!(
    /// A Service as the API server sends it.
    FeedService, ServiceObject, NamespaceResourceScope
);
wrapper!(
    /// A Node as the API server sends it.
    FeedNode, NodeObject, ClusterResourceScope
);

impl Watched for FeedPod {
    const SUBJECT: WatchedResource = WatchedResource::Pods;
    const PAGE_SIZE: Option<u32> = Some(PODS_PER_PAGE);
    type Model = Pod;
    type Change = Change;

    fn convert(self, keys: &AnnotationKeys) -> Option<Converted<Pod>> {
        let Self(object) = self;
        let node = object.spec.node_name.as_deref().filter(|name| !name.is_empty()).map(Arc::from);
        let is_ready = convert::has_condition(&object.status, "Ready", "True");
        let created = object.metadata.object.creation_timestamp.as_ref().map(|time| time.0.as_second());
        let Converted { mut object, skipped } = convert::pod(object, keys)?;
        // The feed does not need the Pods' own addresses. The addresses are dropped to save memory: a large cluster has
        // many thousand Pods.
        object.ips = Vec::new();
        object.ports.shrink_to_fit();
        entries::bound(&mut object);
        let pod = Pod { object, node, is_ready, created: created.unwrap_or_default() };
        Some(Converted { object: pod, skipped })
    }

    fn is_relevant(pod: &Pod) -> bool {
        pod.object.annotation.is_some()
    }

    fn listed(_: Option<&str>, all: Vec<Pod>) -> Change {
        Change::Pods(all)
    }

    fn applied(pod: Pod) -> Change {
        Change::Pod(Box::new(pod))
    }

    fn gone(pod: Pod) -> Change {
        Change::PodGone(pod.object.key, pod.object.uid)
    }
}

impl Watched for FeedService {
    const SUBJECT: WatchedResource = WatchedResource::Services;
    const PAGE_SIZE: Option<u32> = Some(SERVICES_PER_PAGE);
    type Model = Service;
    type Change = Change;

    fn convert(self, keys: &AnnotationKeys) -> Option<Converted<Service>> {
        let Self(object) = self;
        let ports = object.spec.ports.iter().flatten().filter_map(|port| {
            Some(NamedPort {
                name: port.name.as_deref().filter(|name| !name.is_empty()).map(Arc::from),
                number: u16::try_from(port.port).ok().filter(|number| *number != 0)?,
                target: convert::service_port(port.clone()).ok()?,
            })
        });
        let ports = ports.collect();
        let Converted { object, skipped } = convert::service(object, keys)?;
        Some(Converted { object: Service { object, ports }, skipped })
    }

    fn is_relevant(service: &Service) -> bool {
        service.object.is_active()
    }

    fn listed(_: Option<&str>, all: Vec<Service>) -> Change {
        Change::Services(all)
    }

    fn applied(service: Service) -> Change {
        Change::Service(Box::new(service))
    }

    fn gone(service: Service) -> Change {
        let key: ServiceKey = service.object.key;
        Change::ServiceGone(key)
    }
}

impl Watched for FeedNode {
    const SUBJECT: WatchedResource = WatchedResource::Node;
    const PAGE_SIZE: Option<u32> = None;
    type Model = Node;
    type Change = Change;

    fn convert(self, _: &AnnotationKeys) -> Option<Converted<Node>> {
        let Self(object) = self;
        let labels = object.metadata.object.labels.as_ref();
        let zone = labels.and_then(|labels| labels.get(ZONE)).map_or_else(Arc::default, |zone| zone.as_str().into());
        let Converted { object, skipped } = convert::node(object)?;
        Some(Converted { object: Node { object, zone }, skipped })
    }

    fn listed(_: Option<&str>, all: Vec<Node>) -> Change {
        Change::Nodes(all)
    }

    fn applied(node: Node) -> Change {
        Change::Node(node)
    }

    fn gone(node: Node) -> Change {
        Change::NodeGone(node.object.name.as_str().into())
    }
}

#[cfg(test)]
#[path = "objects_tests.rs"]
mod tests;
