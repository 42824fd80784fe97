// SPDX-License-Identifier: Apache-2.0
//! Defines the Kubernetes objects that the feed reads: the agent's types, extended by the fields that only the feed
//! reads.

use std::sync::Arc;

use npl_agent::core::model::{self, PodKey, PodUid, ServiceKey, ServicePort};

/// A Pod of any Node of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// The Pod's fields that the agent also reads, such as the annotation.
    pub object: model::Pod,
    /// `spec.nodeName`; `None` before the Pod is scheduled.
    pub node: Option<Arc<str>>,
    /// Whether the Pod's condition `Ready` is true.
    pub is_ready: bool,
    /// `metadata.creationTimestamp` in seconds since 1970.
    pub created: i64,
}

/// A Service with the names and numbers of its ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// The Service's fields that the agent also reads.
    pub object: model::Service,
    /// The ports of the Service that are valid, in the order of `spec.ports`.
    pub ports: Vec<NamedPort>,
}

/// A port of a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedPort {
    /// The port's `name`; `None` if the Service has a single port without a name.
    pub name: Option<Arc<str>>,
    /// The field `port`: the port's number, which is never 0.
    pub number: u16,
    /// The protocol and the target port of the Service port.
    pub target: ServicePort,
}

/// A Node of the cluster, with its zone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The Node's fields that the agent also reads: the name and the addresses.
    pub object: model::Node,
    /// The value of the Node's label `topology.kubernetes.io/zone`; empty if the label is absent.
    pub zone: Arc<str>,
}

/// A change of a watched object, or a new list of all objects of a kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The complete list of Pods with the annotation. A known Pod that is not in the list was deleted or has lost the
    /// annotation.
    Pods(Vec<Pod>),
    /// A new or changed Pod.
    Pod(Box<Pod>),
    /// A Pod was deleted.
    PodGone(PodKey, PodUid),
    /// The complete list of active Services. A known Service that is not in the list was deleted or disabled.
    Services(Vec<Service>),
    /// A new or changed Service.
    Service(Box<Service>),
    /// A Service was deleted.
    ServiceGone(ServiceKey),
    /// The complete list of Nodes. A known Node that is not in the list was deleted.
    Nodes(Vec<Node>),
    /// A new or changed Node.
    Node(Node),
    /// A Node was deleted.
    NodeGone(Arc<str>),
}
