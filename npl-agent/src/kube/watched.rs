// SPDX-License-Identifier: Apache-2.0
//! The watched kinds of objects.

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

/// A watched kind of object, and its conversion to changes.
pub trait Watched: Resource<DynamicType = ()> + Clone + fmt::Debug + DeserializeOwned + Send + 'static {
    /// The kind of object.
    const SUBJECT: WatchedResource;
    /// Page size of lists; `None` requests the whole list in one answer. Lists always request the newest objects,
    /// because an older list could lack a Pod that already has mappings. The API server can answer an unpaged list from
    /// its watch cache, but reads each page from etcd. Therefore, only lists that may be too large for memory are
    /// paged.
    const PAGE_SIZE: Option<u32>;
    /// Whether the request for the newest version uses the field selector of the watch. Only a selector by name is
    /// used, with which the API server reads one object; with any other selector, it would read objects until one
    /// matches.
    const IS_SELECTED_BY_NAME: bool = false;
    /// The receiver's type for the object.
    type Model: Send;
    /// The change that the receiver gets.
    type Change: fmt::Debug + Send + 'static;

    /// Converts an object; `None` without a name, namespace or uid.
    fn convert(self, keys: &AnnotationKeys) -> Option<Converted<Self::Model>>;
    /// Returns whether to keep an object of a list. Irrelevant objects, such as most of ten thousand Services, are
    /// dropped early, because all kept objects are in memory until the list is complete.
    fn is_relevant(_object: &Self::Model) -> bool {
        true
    }
    /// Creates the change for a complete list. Known objects that are not in the list were deleted.
    fn listed(all: Vec<Self::Model>) -> Self::Change;
    /// Creates the change for a new or changed object.
    fn applied(object: Self::Model) -> Self::Change;
    /// Creates the change for a deleted object.
    fn gone(object: Self::Model) -> Self::Change;
    /// Returns the change to send after a restore of the API server's store, before the new list.
    fn restored() -> Option<Self::Change> {
        None
    }
}

impl Watched for PodObject {
    const SUBJECT: WatchedResource = WatchedResource::Pods;
    const PAGE_SIZE: Option<u32> = None;
    type Model = Pod;
    type Change = Change;

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
    const IS_SELECTED_BY_NAME: bool = true;
    type Model = Node;
    type Change = Change;

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
