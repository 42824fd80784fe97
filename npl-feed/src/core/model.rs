// SPDX-License-Identifier: Apache-2.0
//! The objects of the cluster, with the fields that the feed reads beyond those of the agent.

use std::sync::Arc;

use npl_agent::core::model::{self, PodKey, PodUid, ServiceKey, ServicePort};

/// A Pod of any Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// The fields that the agent reads, among them the annotation.
    pub object: model::Pod,
    /// `spec.nodeName`; `None` before the Pod is scheduled.
    pub node: Option<Arc<str>>,
    /// Whether the condition `Ready` is true.
    pub is_ready: bool,
    /// `metadata.creationTimestamp` in seconds since 1970.
    pub created: i64,
}

/// A Service with the names and numbers of its ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// The fields that the agent reads.
    pub object: model::Service,
    /// The valid ports, in the order of the object.
    pub ports: Vec<NamedPort>,
}

/// A port of a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedPort {
    /// `name`; `None` if the Service's only port has none.
    pub name: Option<Arc<str>>,
    /// `port`, never 0.
    pub number: u16,
    /// Protocol and target port.
    pub target: ServicePort,
}

/// A Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Name and addresses.
    pub object: model::Node,
    /// Label `topology.kubernetes.io/zone`; empty if absent.
    pub zone: Arc<str>,
}

/// A change of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// All Pods that have the annotation; other known Pods are gone.
    Pods(Vec<Pod>),
    /// A new or changed Pod.
    Pod(Box<Pod>),
    /// A Pod was removed.
    PodGone(PodKey, PodUid),
    /// All active Services; others are gone.
    Services(Vec<Service>),
    /// A new or changed Service.
    Service(Box<Service>),
    /// A Service was removed.
    ServiceGone(ServiceKey),
    /// All Nodes.
    Nodes(Vec<Node>),
    /// A new or changed Node.
    Node(Node),
    /// A Node was removed.
    NodeGone(Arc<str>),
}
