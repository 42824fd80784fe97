// SPDX-License-Identifier: Apache-2.0
//! The kinds of Kubernetes objects that the agent watches.

use std::fmt;

use kube::Resource;
use serde::de::DeserializeOwned;

use super::{
    convert::{self, AnnotationKeys, Converted},
    objects::{NodeObject, PodObject, ServiceObject},
};
use crate::{
    core::model::{Node, Pod, Service, snapshot::Change},
    metrics::WatchedResource,
};

/// A kind of object that the agent watches, and the conversion of objects to changes.
pub trait Watched: Resource<DynamicType = ()> + Clone + fmt::Debug + DeserializeOwned + Send + 'static {
    /// The kind of object, for log lines and metrics.
    const SUBJECT: WatchedResource;
    /// The maximum number of objects in one page of a list; `None` requests the whole list in one answer. A list always
    /// requests the newest objects, because an outdated list could lack a Pod that already has mappings. Only a list
    /// that may be too large for memory is paged: the API server reads each page from etcd, but can answer an unpaged
    /// list from its watch cache.
    const PAGE_SIZE: Option<u32>;
    /// Whether the request for the newest resource version uses the field selector of the watch. The value is true only
    /// for a selector by name, for which the API server reads a single object. With any other selector, the API server
    /// would read objects until one matches.
    const IS_SELECTED_BY_NAME: bool = false;
    /// Whether the first objects are requested as a streaming list, that is, the watch itself first sends all objects.
    /// If the API server does not support streaming lists, the objects are listed. The value is false for a kind with
    /// many objects, because the API server compresses lists, but not streaming lists.
    const IS_STREAMED: bool = false;
    /// The type of `core::model` to which the Kubernetes object is converted.
    type Model: Send;
    /// The type of the changes that are sent to the receiver.
    type Change: fmt::Debug + Send + 'static;

    /// Converts a Kubernetes object. Returns `None` if the object has no name, namespace or uid.
    fn convert(self, keys: &AnnotationKeys) -> Option<Converted<Self::Model>>;
    /// Returns whether to keep an object of a list. Objects that the agent does not need, such as most of ten thousand
    /// Services, are dropped early, because kept objects occupy memory until the list is complete.
    fn is_relevant(_object: &Self::Model) -> bool {
        true
    }
    /// Creates the change for a complete list of one namespace, or of all namespaces if `namespace` is `None`. The
    /// receiver treats known objects of the listed namespaces that are not in the list as deleted.
    fn listed(namespace: Option<&str>, all: Vec<Self::Model>) -> Self::Change;
    /// Creates the change for a new or changed object.
    fn applied(object: Self::Model) -> Self::Change;
    /// Creates the change for a deleted object.
    fn gone(object: Self::Model) -> Self::Change;
    /// Returns the change to send before the list, if the API server's store was restored from a backup.
    fn restored() -> Option<Self::Change> {
        None
    }
}

impl Watched for PodObject {
    const SUBJECT: WatchedResource = WatchedResource::Pods;
    const PAGE_SIZE: Option<u32> = None;
    const IS_STREAMED: bool = true;
    type Model = Pod;
    type Change = Change;

    fn convert(self, keys: &AnnotationKeys) -> Option<Converted<Pod>> {
        convert::pod(self, keys)
    }

    fn listed(_: Option<&str>, all: Vec<Pod>) -> Change {
        Change::Pods(all)
    }

    fn applied(pod: Pod) -> Change {
        Change::Pod(pod)
    }

    fn gone(pod: Pod) -> Change {
        Change::PodGone(pod.key, pod.uid)
    }

    fn restored() -> Option<Change> {
        Some(Change::StoreRestored)
    }
}

impl Watched for ServiceObject {
    const SUBJECT: WatchedResource = WatchedResource::Services;
    const PAGE_SIZE: Option<u32> = Some(500);
    type Model = Service;
    type Change = Change;

    fn convert(self, keys: &AnnotationKeys) -> Option<Converted<Service>> {
        convert::service(self, keys)
    }

    fn is_relevant(service: &Service) -> bool {
        service.is_active() || !service.node_ports.is_empty()
    }

    fn listed(namespace: Option<&str>, all: Vec<Service>) -> Change {
        Change::Services(namespace.map(Into::into), all)
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
    const IS_SELECTED_BY_NAME: bool = true;
    type Model = Node;
    type Change = Change;

    fn convert(self, _: &AnnotationKeys) -> Option<Converted<Node>> {
        convert::node(self)
    }

    fn listed(_: Option<&str>, all: Vec<Node>) -> Change {
        all.into_iter().next().map_or(Change::NodeGone, Change::Node)
    }

    fn applied(node: Node) -> Change {
        Change::Node(node)
    }

    fn gone(_: Node) -> Change {
        Change::NodeGone
    }
}
