// SPDX-License-Identifier: Apache-2.0
//! Why a port that somebody asked for is not published.

use std::{fmt, net::IpAddr};

use super::event_reason::EventReason;
use crate::core::model::{
    Family, NodePort, PodKey, PodPort, PodUid, Protocol, ServiceKey, ServiceUid,
    sources::{MAX_RANGES, Unreadable},
};

/// A reason why something is not served, and whose it is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The object that a user would look at.
    pub subject: AffectedObject,
    /// What is wrong.
    pub cause: Cause,
}

/// The object that a problem is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum AffectedObject {
    /// A Pod of this Node.
    Pod(PodKey, PodUid),
    /// A Service.
    Service(ServiceKey, ServiceUid),
}

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// No node port is free.
    RangeExhausted {
        /// The Pod's port that goes without.
        pod_port: PodPort,
        /// Its protocol.
        protocol: Protocol,
        /// Its family.
        family: Family,
    },
    /// The Pod has no port of the name that the Service's target port gives.
    UnresolvedTargetPort {
        /// The Service.
        service: ServiceKey,
        /// The name.
        name: String,
        /// The protocol that the port must have.
        protocol: Protocol,
    },
    /// The agent was not told to serve the protocol of a Service's port.
    UnsupportedProtocol {
        /// The protocol.
        protocol: Protocol,
    },
    /// The datapath serves none of the Service's families.
    UnsupportedFamily {
        /// The first of them.
        family: Family,
    },
    /// The Node has no address of the family to publish.
    NoNodeAddress {
        /// The family.
        family: Family,
    },
    /// Another Pod has the same address.
    AddressConflict {
        /// The address.
        ip: IpAddr,
        /// The Pod that is served under it.
        holder: PodKey,
    },
    /// The Pod's `hostPort` is the node port of another Pod's mapping.
    HostPortConflict {
        /// The port.
        node_port: NodePort,
        /// Its protocol.
        protocol: Protocol,
    },
    /// Entries of a Service's list of allowed sources cannot be read, and let nobody in.
    UnreadableSource(Unreadable),
    /// A Service's list of allowed sources is too long.
    TooManySources {
        /// How many entries let nobody in.
        beyond: usize,
    },
    /// A port of the host leads to the Pod's port past us, whatever a Service's list says.
    UnenforcedSources {
        /// The port.
        node_port: NodePort,
        /// Its protocol.
        protocol: Protocol,
    },
    /// The kernel has no room for more ranges, so that some let nobody in.
    SourceTableFull {
        /// The node port that they are for.
        node_port: NodePort,
        /// Its protocol.
        protocol: Protocol,
        /// Its family.
        family: Family,
    },
}

impl Problem {
    /// The reason of a Kubernetes Event and the label of a metric.
    pub const fn reason(&self) -> &'static str {
        match self.cause {
            Cause::RangeExhausted { .. } => EventReason::PortRangeExhausted.name(),
            Cause::UnresolvedTargetPort { .. } => EventReason::UnresolvedTargetPort.name(),
            Cause::UnsupportedProtocol { .. } => EventReason::UnsupportedProtocol.name(),
            Cause::UnsupportedFamily { .. } => EventReason::UnsupportedFamily.name(),
            Cause::NoNodeAddress { .. } => EventReason::NoNodeAddress.name(),
            Cause::AddressConflict { .. } => EventReason::AddressConflict.name(),
            Cause::HostPortConflict { .. } => EventReason::HostPortConflict.name(),
            Cause::UnreadableSource(_) => EventReason::UnreadableSourceRange.name(),
            Cause::TooManySources { .. } => EventReason::TooManySourceRanges.name(),
            Cause::UnenforcedSources { .. } => EventReason::SourceRangesNotEnforced.name(),
            Cause::SourceTableFull { .. } => EventReason::SourceRangesExhausted.name(),
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

/// What is wrong with an entry, and what to do.
const UNREADABLE: &str = "is no address or range and lets nobody in; write it like 192.0.2.0/24 or 2001:db8::/32";

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RangeExhausted { pod_port, protocol, family } => write!(
                f,
                "no {family} node port is free for pod port {pod_port}/{protocol}; widen the port range of the agent"
            ),
            Self::UnresolvedTargetPort { service, name, protocol } => write!(
                f,
                "no container port is named {name:?} with protocol {protocol}, as service {service} asks; name one so"
            ),
            Self::UnsupportedProtocol { protocol } => {
                write!(
                    f,
                    "protocol {protocol} is not among the agent's --protocols; the service's other ports are served"
                )
            }
            Self::UnsupportedFamily { family } => {
                write!(f, "family {family} is not served by this agent; add another to spec.ipFamilies")
            }
            Self::NoNodeAddress { family } => {
                write!(f, "the node has no {family} address to publish; give it one or name it with --node-ip")
            }
            Self::AddressConflict { ip, holder } => {
                write!(f, "address {ip} is also that of pod {holder}, which is served; delete one of the two pods")
            }
            Self::HostPortConflict { node_port, protocol } => write!(
                f,
                "host port {node_port}/{protocol} is in use for another pod; choose one outside the agent's port range"
            ),
            Self::UnreadableSource(Unreadable { position, entry, others: 0 }) => {
                write!(f, "entry {position} of allowed-source-ranges, {entry:?}, {UNREADABLE}")
            }
            Self::UnreadableSource(Unreadable { position, entry, others }) => {
                write!(f, "entry {position} of allowed-source-ranges, {entry:?}, and {others} more: each {UNREADABLE}")
            }
            Self::TooManySources { beyond } => write!(
                f,
                "{beyond} entries of allowed-source-ranges let nobody in, for only the first {MAX_RANGES} ranges count; \
                 join ranges or use several services"
            ),
            Self::UnenforcedSources { node_port, protocol } => write!(
                f,
                "host port {node_port}/{protocol} leads to the pod for everybody, whatever allowed-source-ranges says; \
                 take the host port away or guard it with the node's firewall"
            ),
            Self::SourceTableFull { node_port, protocol, family } => write!(
                f,
                "the node's {family} table of allowed sources is full and clients of node port {node_port}/{protocol} \
                 are refused; shorten allowed-source-ranges of services with pods on this node"
            ),
        }
    }
}
