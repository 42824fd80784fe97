// SPDX-License-Identifier: Apache-2.0
//! Problems: the reasons why a requested node port is not published, or is not served as requested.

use std::{fmt, net::IpAddr};

use super::{event_reason::EventReason, request_problem::RequestProblem};
use crate::core::model::{
    Family, NodePort, PodKey, PodPort, PodUid, Protocol, ServiceKey, ServiceUid,
    sources::{MAX_RANGES, Unreadable},
};

/// The reason why a requested Pod port is not served as requested, and the object to which its Event belongs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The object that the Event is about.
    pub subject: AffectedObject,
    /// The cause of the problem.
    pub cause: Cause,
}

/// The Kubernetes object that a problem is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum AffectedObject {
    /// A Pod of this Node.
    Pod(PodKey, PodUid),
    /// A Service, in any namespace.
    Service(ServiceKey, ServiceUid),
}

/// The cause of a problem. The `Display` text also names the remedy.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// No node port of the family and protocol is free.
    RangeExhausted {
        /// The Pod port that has no node port.
        pod_port: PodPort,
        /// The protocol of the Pod's port.
        protocol: Protocol,
        /// The IP family for which the node port is requested.
        family: Family,
    },
    /// The Pod has no container port with the name of the Service's target port.
    UnresolvedTargetPort {
        /// The Service with the target port.
        service: ServiceKey,
        /// The name in the Service's `targetPort`.
        name: String,
        /// The protocol that the container port must have.
        protocol: Protocol,
    },
    /// `--protocols` does not include the protocol of a Service's port.
    UnsupportedProtocol {
        /// The protocol of the Service's port.
        protocol: Protocol,
    },
    /// Several protocols of a Pod port have different node ports. A load balancer that ignores the protocol sends each
    /// protocol to all of these node ports.
    ProtocolsNotMerged {
        /// The Pod port with several protocols.
        pod_port: PodPort,
    },
    /// The datapath serves none of the Service's IP families.
    UnsupportedFamily {
        /// The first family of the Service.
        family: Family,
    },
    /// The Node has no address of the IP family that could be published.
    NoNodeAddress {
        /// The IP family without an address of the Node.
        family: Family,
    },
    /// Another Pod has the same IP address, and gets the traffic to this address.
    AddressConflict {
        /// The address that both Pods have.
        ip: IpAddr,
        /// The Pod that gets the traffic to the address.
        holder: PodKey,
    },
    /// The Pod is on the network of an uplink, so the Pod's replies to clients bypass the Node.
    OnNodeNetwork {
        /// The Pod's IP address on the network of the uplink.
        ip: IpAddr,
        /// The name of the uplink on whose network the Pod is.
        device: String,
    },
    /// The Pod's `hostPort` is the node port of another Pod's mapping.
    HostPortConflict {
        /// The number of the Pod's `hostPort`.
        node_port: NodePort,
        /// The protocol of the `hostPort`.
        protocol: Protocol,
    },
    /// The Pod's node port is also a `nodePort` or `healthCheckNodePort` of a Service.
    NodePortConflict {
        /// The node port that is allocated to the Pod.
        node_port: NodePort,
        /// The Service with this `nodePort` or `healthCheckNodePort`.
        service: ServiceKey,
    },
    /// A mapping receives the traffic of the Service's `nodePort` or `healthCheckNodePort` on this Node.
    NodePortShadowed {
        /// The Service's `nodePort` or `healthCheckNodePort`.
        node_port: NodePort,
        /// The Pod that receives the traffic of the mapping.
        pod: PodKey,
    },
    /// Entries of a Service's list of allowed sources cannot be parsed, so these entries allow no client.
    UnreadableSource(Unreadable),
    /// A Service's list of allowed sources is too long.
    TooManySources {
        /// The number of list entries that are ignored.
        beyond: usize,
    },
    /// A host port leads to the Pod without NPL, so NPL does not enforce the Service's list of allowed sources.
    UnenforcedSources {
        /// The host port that leads to the Pod.
        node_port: NodePort,
        /// The protocol of the host port.
        protocol: Protocol,
    },
    /// The Pod does not get the node ports that it requests.
    NodePortRequest(RequestProblem),
    /// A writer other than this agent repeatedly replaces the Pod's annotation.
    AnnotationContested {
        /// The field manager of that writer, if the API server names one.
        manager: Option<String>,
    },
    /// The kernel's map of allowed sources is full, so packets of some allowed clients are dropped.
    SourceTableFull {
        /// The node port whose allowed sources do not fit.
        node_port: NodePort,
        /// The protocol of the mapping.
        protocol: Protocol,
        /// The family of the mapping.
        family: Family,
    },
}

impl Problem {
    /// The text of the Event's field `reason`, and of the metric's label.
    pub const fn reason(&self) -> &'static str {
        self.event_reason().name()
    }

    /// The reason of the Event about the problem.
    pub const fn event_reason(&self) -> EventReason {
        match self.cause {
            Cause::RangeExhausted { .. } => EventReason::PortRangeExhausted,
            Cause::UnresolvedTargetPort { .. } => EventReason::UnresolvedTargetPort,
            Cause::UnsupportedProtocol { .. } => EventReason::UnsupportedProtocol,
            Cause::ProtocolsNotMerged { .. } => EventReason::ProtocolsNotMerged,
            Cause::UnsupportedFamily { .. } => EventReason::UnsupportedFamily,
            Cause::NoNodeAddress { .. } => EventReason::NoNodeAddress,
            Cause::AddressConflict { .. } => EventReason::AddressConflict,
            Cause::OnNodeNetwork { .. } => EventReason::PodOnNodeNetwork,
            Cause::HostPortConflict { .. } => EventReason::HostPortConflict,
            Cause::NodePortConflict { .. } => EventReason::NodePortConflict,
            Cause::NodePortShadowed { .. } => EventReason::NodePortShadowed,
            Cause::UnreadableSource(_) => EventReason::UnreadableSourceRange,
            Cause::TooManySources { .. } => EventReason::TooManySourceRanges,
            Cause::UnenforcedSources { .. } => EventReason::SourceRangesNotEnforced,
            Cause::SourceTableFull { .. } => EventReason::SourceRangesExhausted,
            Cause::NodePortRequest(_) => EventReason::NodePortRequestRefused,
            Cause::AnnotationContested { .. } => EventReason::AnnotationContested,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.subject {
            AffectedObject::Pod(pod, _) => write!(f, "pod {pod}: {}", self.cause),
            AffectedObject::Service(service, _) => write!(f, "service {service}: {}", self.cause),
        }
    }
}

/// The text about the effect of a list entry that cannot be parsed, and about the correct form of an entry.
const UNREADABLE: &str = "is not an address or a CIDR range and allows no client; write it as 192.0.2.0/24 or \
                          2001:db8::/32";

fn write_unreadable(f: &mut fmt::Formatter<'_>, unreadable: &Unreadable) -> fmt::Result {
    let Unreadable { position, entry, others } = unreadable;
    write!(f, "entry {position} of allowed-source-ranges, {entry:?}, ")?;
    match others {
        0 => f.write_str(UNREADABLE),
        _ => write!(f, "and {others} more: each {UNREADABLE}"),
    }
}

fn write_contested(f: &mut fmt::Formatter<'_>, manager: Option<&str>) -> fmt::Result {
    match manager {
        Some(manager) => write!(f, "field manager {manager:?}")?,
        None => f.write_str("another writer")?,
    }
    f.write_str(
        " keeps changing the annotation that NPL writes, so the agent waits for up to a minute before it writes the \
         annotation again: let only one controller publish node ports, for example disable NodePortLocal in Antrea",
    )
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RangeExhausted { pod_port, protocol, family } => write!(
                f,
                "no {family} node port is free for pod port {pod_port}/{protocol}: widen the agent's --port-range"
            ),
            Self::UnresolvedTargetPort { service, name, protocol } => write!(
                f,
                "no container port is named {name:?} with protocol {protocol}, as the targetPort of service \
                 {service} requires: add the name to a container port, or change the targetPort"
            ),
            Self::UnsupportedProtocol { protocol } => {
                write!(
                    f,
                    "protocol {protocol} is not among the agent's --protocols, so ports of this protocol get no \
                     node port; the service's other ports are served: add {protocol} to --protocols"
                )
            }
            Self::ProtocolsNotMerged { pod_port } => write!(
                f,
                "pod port {pod_port} has several protocols and a node port for each; load balancers that ignore the \
                 protocol of an entry, such as AKO and F5 CIS, send every protocol to each of these node ports: set \
                 the agent's --protocol-pairing=merged"
            ),
            Self::UnsupportedFamily { family } => {
                write!(f, "the agent does not serve family {family}: add another family to spec.ipFamilies")
            }
            Self::NoNodeAddress { family } => write!(
                f,
                "the node has no {family} address to publish: add an {family} address to the node, or name an \
                 address of the node with --node-ip"
            ),
            Self::AddressConflict { ip, holder } => {
                write!(f, "pod {holder} has the same address {ip} and gets the traffic: delete one of the two pods")
            }
            Self::OnNodeNetwork { ip, device } => write!(
                f,
                "the pod's address {ip} is on the network of the node's device {device}, so the pod would answer clients \
                 of a node port directly and with its own address: let the load balancer use the pod's address, or \
                 attach the pod to a network behind the node"
            ),
            Self::HostPortConflict { node_port, protocol } => write!(
                f,
                "host port {node_port}/{protocol} is in use as the node port of another pod: choose a host port \
                 outside the agent's --port-range"
            ),
            Self::NodePortConflict { node_port, service } => write!(
                f,
                "node port {node_port} is also a nodePort or healthCheckNodePort of service {service}, whose clients \
                 reach this pod, since no other node port is free: widen the agent's --port-range, or give the \
                 service a nodePort outside of it"
            ),
            Self::NodePortShadowed { node_port, pod } => write!(
                f,
                "nodePort or healthCheckNodePort {node_port} leads to pod {pod} on the pod's node, since no other \
                 node port is free: choose a port outside the agent's --port-range"
            ),
            Self::UnreadableSource(unreadable) => write_unreadable(f, unreadable),
            Self::TooManySources { beyond } => write!(
                f,
                "only the first {MAX_RANGES} ranges of allowed-source-ranges are enforced; packets of clients in the other \
                 {beyond} entries are dropped: merge ranges or use several services"
            ),
            Self::UnenforcedSources { node_port, protocol } => write!(
                f,
                "host port {node_port}/{protocol} bypasses NPL, so allowed-source-ranges is not enforced: remove \
                 the host port, or restrict it in the node's firewall"
            ),
            Self::NodePortRequest(problem) => problem.fmt(f),
            Self::AnnotationContested { manager } => write_contested(f, manager.as_deref()),
            Self::SourceTableFull { node_port, protocol, family } => write!(
                f,
                "the node's {family} map of allowed sources is full, so some allowed clients of node port \
                 {node_port}/{protocol} are dropped: shorten allowed-source-ranges of services with pods on this \
                 node"
            ),
        }
    }
}
