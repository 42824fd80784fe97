// SPDX-License-Identifier: Apache-2.0
//! Problems with the node ports that a Pod requests.

use std::fmt;

use crate::core::model::{
    NodePort, PodKey, PodPort, Protocol, ServiceKey,
    node_port_requests::{MAX_REQUEST_BYTES, MAX_REQUESTS, RequestFault, RequestFaultKind},
    settings::PortRange,
};

/// The reason why a Pod does not get the node ports that its annotation requests.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestProblem {
    /// The agent runs without `--requested-node-ports`.
    Disabled,
    /// An entry of the annotation is faulty.
    Faulty(RequestFault),
    /// A Pod port has another node port than the requested one.
    Refused {
        /// The Pod port for which the node port is requested.
        pod_port: PodPort,
        /// The protocol of the Pod's port.
        protocol: Protocol,
        /// The requested node port.
        node_port: NodePort,
        /// The reason why the Pod port did not get the node port.
        obstacle: Obstacle,
    },
}

/// The reason why a Pod port does not get the node port that it requests.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// The node port is outside of the port range.
    OutOfRange(PortRange),
    /// The node port is a `nodePort` or `healthCheckNodePort` of a Service.
    Service(ServiceKey),
    /// The node port is a `hostPort` of a Pod on the Node.
    HostPort,
    /// Another process of the Node uses the node port.
    Process,
    /// The node port is allocated to another Pod.
    Pod(PodKey),
    /// The node port is allocated to another port of the same Pod.
    OtherPort,
    /// The node port was mapped until recently.
    Quarantined {
        /// The Pod that had the node port, if this agent knows the Pod.
        pod: Option<PodKey>,
        /// The number of seconds after which the node port can be requested if no packets arrive, rounded up.
        seconds: u64,
    },
    /// The node port received packets, or had a mapping, a short time ago, so a load balancer may still use it.
    RecentTraffic {
        /// The number of seconds until the node port counts as unused if no more packets arrive, rounded up.
        seconds: u64,
    },
    /// With `--protocol-pairing=merged`, another protocol of the Pod port requests this other node port.
    OtherProtocol(NodePort),
    /// The Pod port is exposed by a host port, and needs no node port.
    Exposed(NodePort),
    /// The Pod port already had another node port.
    Allocated,
}

impl fmt::Display for RequestProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disabled => f.write_str(
                "the pod requests node ports, which the agent does not permit, and gets ordinary node ports: set the \
                 agent's --requested-node-ports, or remove the annotation requested-node-ports from the pod",
            ),
            Self::Faulty(fault) => write_fault(f, fault),
            Self::Refused { pod_port, protocol, node_port, obstacle } => {
                write!(f, "pod port {pod_port}/{protocol} does not get the requested node port {node_port}, {obstacle}")
            }
        }
    }
}

fn write_fault(f: &mut fmt::Formatter<'_>, fault: &RequestFault) -> fmt::Result {
    let RequestFault { position, entry, kind, others } = fault;
    let remedy = match kind {
        RequestFaultKind::TooLong => {
            return write!(
                f,
                "requested-node-ports is longer than {MAX_REQUEST_BYTES} bytes and requests no node port: shorten the \
                 list"
            );
        }
        RequestFaultKind::TooMany => {
            return write!(
                f,
                "only the first {MAX_REQUESTS} entries of requested-node-ports are read, and {} are ignored: shorten \
                 the list",
                others + 1
            );
        }
        RequestFaultKind::Malformed => {
            "is not a pod port and a node port and requests no node port: write it as 8080=61005 or 53/udp=61006"
        }
        RequestFaultKind::SamePodPort => {
            "is ignored, because an earlier entry requests a node port for the same pod port: keep one of the entries"
        }
        RequestFaultKind::SameNodePort => {
            "is ignored, because an earlier entry requests the same node port for another pod port: request a node \
             port for each pod port"
        }
    };
    let more = if *others > 0 { format!(" (and {others} more faulty entries)") } else { String::new() };
    write!(f, "entry {position} of requested-node-ports, {entry:?}{more}, {remedy}")
}

impl fmt::Display for Obstacle {
    /// Writes the end of a sentence about the requested node port, with the remedy.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfRange(range) => {
                write!(f, "which is outside of the agent's --port-range {range}: request a node port of this range")
            }
            Self::Service(service) => write!(
                f,
                "which is a nodePort or healthCheckNodePort of service {service}: request another node port, or give \
                 the service another port"
            ),
            Self::HostPort => {
                f.write_str("which is a hostPort of a pod on the node: request a node port that no pod has as hostPort")
            }
            Self::Process => f.write_str(
                "which another process of the node uses: find the process with `ss -tulnp`, or request another node \
                 port",
            ),
            Self::Pod(pod) => {
                write!(f, "which belongs to pod {pod}: request another node port for one of the two pods")
            }
            Self::OtherPort => {
                f.write_str("which belongs to another port of the pod: request another node port for one of the ports")
            }
            Self::Quarantined { pod, seconds } => {
                let pod = pod.as_ref().map_or_else(|| "another pod".to_owned(), |pod| format!("pod {pod}"));
                write!(
                    f,
                    "which is in quarantine because {pod} had it: request another node port, or delete the pod after \
                     {seconds} s without packets to the node port, so that its successor requests the node port again"
                )
            }
            Self::RecentTraffic { seconds } => write!(
                f,
                "which received packets or had a mapping within the last two minutes: let load balancers stop using \
                 it, and delete the pod after {seconds} s, so that its successor requests the node port again"
            ),
            Self::OtherProtocol(other) => write!(
                f,
                "because --protocol-pairing=merged gives all protocols of the pod port one node port, and another \
                 protocol requests {other}: request one node port for all protocols"
            ),
            Self::Exposed(host_port) => write!(
                f,
                "because the pod port is published with its host port {host_port}: remove the request, or the pod's \
                 hostPort or hostNetwork"
            ),
            Self::Allocated => f.write_str(
                "because the pod port already has another node port, which a request does not change: delete \
                 the pod, so that its successor requests the node port again",
            ),
        }
    }
}
