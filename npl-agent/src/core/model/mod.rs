// SPDX-License-Identifier: Apache-2.0
//! The types of the cluster objects and of the datapath state on which the core bases its decisions. [`crate::kube`]
//! converts Kubernetes objects to these types.
//!
//! The core does not depend on the types of the Kubernetes API.

pub mod last;
mod list_entry;
pub mod namespaces;
pub mod node_port_requests;
pub mod observed;
pub mod port_range;
pub mod settings;
pub mod snapshot;
pub mod sources;
pub mod throttles;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::model::{node_port_requests::NodePortRequests, sources::AllowList};

/// An IP family: IPv4 or IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Family {
    /// IPv4.
    #[serde(rename = "IPv4")]
    V4,
    /// IPv6.
    #[serde(rename = "IPv6")]
    V6,
}

impl Family {
    /// Both families, in the order in which lists and tables show them.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// Returns the family of an IP address.
    pub const fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// The name of the family in Kubernetes objects and in the annotation.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A transport protocol of a Service port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP, the Transmission Control Protocol.
    Tcp,
    /// UDP, the User Datagram Protocol.
    Udp,
    /// SCTP, the Stream Control Transmission Protocol.
    Sctp,
}

impl Protocol {
    /// All transport protocols, in the order in which logs and command output list them.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// The name of the protocol in lower case, as in the annotation, logs and tables.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }

    /// The IANA number of the protocol.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => npl_common::mapping::protocol::TCP,
            Self::Udp => npl_common::mapping::protocol::UDP,
            Self::Sctp => npl_common::mapping::protocol::SCTP,
        }
    }

    /// Returns the protocol with this IANA number; `None` for protocols that Kubernetes does not support.
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            npl_common::mapping::protocol::TCP => Some(Self::Tcp),
            npl_common::mapping::protocol::UDP => Some(Self::Udp),
            npl_common::mapping::protocol::SCTP => Some(Self::Sctp),
            _ => None,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The error for a text that is not a protocol that Kubernetes supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a protocol: expected tcp, udp or sctp")]
pub struct UnknownProtocol;

impl FromStr for Protocol {
    type Err = UnknownProtocol;

    /// Accepts upper and lower case: the API server writes `TCP`, and the annotation contains `tcp`.
    fn from_str(text: &str) -> Result<Self, UnknownProtocol> {
        match text.to_ascii_lowercase().as_str() {
            "tcp" => Ok(Self::Tcp),
            "udp" => Ok(Self::Udp),
            "sctp" => Ok(Self::Sctp),
            _ => Err(UnknownProtocol),
        }
    }
}

/// A port number of the Node in host byte order, never 0: a node port that NPL allocates, a `nodePort` of a Service, or
/// a `hostPort`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodePort(pub u16);

impl fmt::Display for NodePort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A port that a Pod listens on, in host byte order, never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PodPort(pub u16);

impl fmt::Display for PodPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The namespace and name of a Kubernetes object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    /// The namespace of the object.
    pub namespace: Arc<str>,
    /// The name of the object.
    pub name: Arc<str>,
}

impl ObjectKey {
    /// Creates the key of an object.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The key of a Pod.
pub type PodKey = ObjectKey;
/// The key of a Service.
pub type ServiceKey = ObjectKey;

/// A Pod's uid, which distinguishes the Pod from an earlier Pod of the same name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(pub Arc<str>);

impl PodUid {
    /// The Pod's generation in the datapath's maps: FNV-1a of the uid, never 0. A restarted agent finds the Pod of a
    /// mapping by the mapping's generation. The kernel programs ignore conntrack entries with another generation,
    /// because these entries belong to an earlier Pod with the same address.
    pub fn generation(&self) -> u32 {
        let hash =
            self.0.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        hash.max(1)
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A Service's uid, which distinguishes the Service from an earlier Service of the same name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceUid(pub Arc<str>);

impl fmt::Display for ServiceUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The state of NPL's readiness gate: whether the Pod's `readinessGates` contain the gate, and whether the Pod's
/// condition of that name is true.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// The Pod's spec does not name the gate.
    Absent,
    /// The Pod's spec names the gate, and the condition is not true yet.
    Closed {
        /// Whether the kubelet reports the condition `ContainersReady`.
        are_containers_ready: bool,
    },
    /// The Pod's spec names the gate, and the condition is true.
    Open,
}

/// A Pod of this Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// The namespace and name of the Pod.
    pub key: PodKey,
    /// `metadata.uid`, which distinguishes the Pod from an earlier Pod of the same name.
    pub uid: PodUid,
    /// `metadata.resourceVersion` as a number: a change with a lower number is outdated.
    pub resource_version: u64,
    /// `metadata.labels` of the Pod.
    pub labels: BTreeMap<String, String>,
    /// Whether `status.phase` is `Succeeded` or `Failed`: all containers of the Pod have ended.
    pub is_finished: bool,
    /// Whether `metadata.deletionTimestamp` is set: the Pod is being deleted.
    pub is_terminating: bool,
    /// `spec.hostNetwork`: whether the Pod uses the Node's network namespace.
    pub host_network: bool,
    /// `status.podIPs`, of either family, in the order of the status; empty before the Pod's sandbox exists.
    pub ips: Vec<IpAddr>,
    /// Ports of containers and of native sidecars (restartable init containers), in the order of the spec.
    pub ports: Vec<ContainerPort>,
    /// The value of the mapping annotation in the API server, which NPL or another writer may have written.
    pub annotation: Option<String>,
    /// The field manager of the annotation, if the API server records a field manager that is not the agent's.
    pub annotation_manager: Option<Arc<str>>,
    /// The state of NPL's readiness gate in the Pod.
    pub gate: Gate,
    /// The node ports that the Pod's annotation requests.
    pub requests: NodePortRequests,
}

impl Pod {
    /// Returns the Pod's first address of an IP family.
    pub fn ip_of(&self, family: Family) -> Option<IpAddr> {
        self.ips.iter().copied().find(|ip| Family::of(*ip) == family)
    }

    /// Returns the ports of the Node by which clients reach a Pod port without NPL: the same port if the Pod is on the
    /// host network, otherwise each `hostPort` of the Pod port. Omits each `hostPort` that is bound to another address
    /// (`hostIP`) than `node_ip`.
    pub fn host_ports(
        &self,
        pod_port: PodPort,
        protocol: Protocol,
        node_ip: Option<IpAddr>,
    ) -> impl Iterator<Item = NodePort> + '_ {
        let of_host_network = self.host_network.then_some(NodePort(pod_port.0));
        let is_it = move |candidate: &&ContainerPort| {
            candidate.port == pod_port
                && candidate.protocol == protocol
                && candidate.host_ip.is_none_or(|ip| Some(ip) == node_ip)
        };
        let declared = self.ports.iter().filter(|_| !self.host_network).filter(is_it);
        of_host_network.into_iter().chain(declared.filter_map(|candidate| candidate.host_port))
    }
}

/// A port of a container: an element of `containers[].ports`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerPort {
    /// The port's name, for named target ports.
    pub name: Option<String>,
    /// `containerPort`: the number of the port.
    pub port: PodPort,
    /// `protocol`: the transport protocol of the port.
    pub protocol: Protocol,
    /// `hostPort`, if set and not 0. Always `None` for a native sidecar, whose `hostPort` the kubelet does not map.
    pub host_port: Option<NodePort>,
    /// `hostIP`, if set and not the wildcard address.
    pub host_ip: Option<IpAddr>,
}

/// `spec.type` of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceType {
    /// `ClusterIP`, headless or not: NPL assigns node ports to the Pods of enabled Services of this type. An empty type
    /// means `ClusterIP`.
    ClusterIp,
    /// `LoadBalancer`: NPL assigns node ports to the Pods of enabled Services of this type.
    LoadBalancer,
    /// `NodePort`: NPL does not assign node ports for Services of this type.
    NodePort,
    /// `ExternalName`: NPL does not assign node ports for Services of this type.
    ExternalName,
}

/// A Service of any namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// The namespace and name of the Service.
    pub key: ServiceKey,
    /// `metadata.uid`, which distinguishes the Service from an earlier Service of the same name.
    pub uid: ServiceUid,
    /// Whether the annotation that enables NPL for the Service is exactly `true`.
    pub is_enabled: bool,
    /// `spec.type` of the Service.
    pub service_type: ServiceType,
    /// `spec.selector`; an empty selector selects no Pod.
    pub selector: BTreeMap<String, String>,
    /// `spec.ports` of the Service.
    pub ports: Vec<ServicePort>,
    /// `spec.ports[].nodePort` and `spec.healthCheckNodePort`: the ports that kube-proxy serves on every Node.
    pub node_ports: BTreeSet<NodePort>,
    /// `spec.ipFamilies` of the Service.
    pub families: Vec<Family>,
    /// The source addresses that may use the node ports of the Service's Pods.
    pub allow_list: AllowList,
}

impl Service {
    /// Whether the Pod has every label that the selector names. Namespaces are not compared.
    pub fn selects(&self, pod: &Pod) -> bool {
        let has = |(key, value): (&String, &String)| pod.labels.get(key) == Some(value);
        !self.selector.is_empty() && self.selector.iter().all(has)
    }

    /// Whether the Pod is in the Service's namespace and has every label that the selector names.
    pub fn has_labels_of(&self, pod: &Pod) -> bool {
        self.key.namespace == pod.key.namespace && self.selects(pod)
    }

    /// Whether NPL assigns node ports to the Service's Pods.
    pub fn is_active(&self) -> bool {
        let has_type = match self.service_type {
            ServiceType::ClusterIp | ServiceType::LoadBalancer => true,
            ServiceType::NodePort | ServiceType::ExternalName => false,
        };
        self.is_enabled && has_type && !self.selector.is_empty()
    }
}

/// A port of a Service: an element of `spec.ports`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePort {
    /// `protocol`: the transport protocol of the port.
    pub protocol: Protocol,
    /// `targetPort`: the Pod port that receives the traffic of the Service port.
    pub target: TargetPort,
}

/// `spec.ports[].targetPort`: the Pod port that receives the traffic of a Service port.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum TargetPort {
    /// The number of a Pod port.
    Number(PodPort),
    /// The name of a container port, which is resolved for each Pod.
    Name(String),
}

/// The Node on which this agent runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// `metadata.name` of the Node.
    pub name: String,
    /// `status.addresses` of type `InternalIP`, in the order of the status.
    pub internal_ips: Vec<IpAddr>,
    /// `status.addresses` of type `ExternalIP`, in the order of the status.
    pub external_ips: Vec<IpAddr>,
}

/// The key of a mapping: family, node port and protocol. Clients reach the mapping at every address of the Node in this
/// family on which NPL serves node ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Frontend {
    /// The IP family.
    pub family: Family,
    /// The node port.
    pub node_port: NodePort,
    /// The transport protocol.
    pub protocol: Protocol,
}

impl fmt::Display for Frontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} {}", self.node_port, self.protocol, self.family)
    }
}

/// A connection or UDP flow to a node port. Kernel conntrack translates the destination of the flow's packets, because
/// of a DNAT rule of other software such as Antrea's agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TranslatedConnection {
    /// The transport protocol.
    pub protocol: Protocol,
    /// The client's address and port.
    pub client: SocketAddr,
    /// The node address and node port to which the client sends.
    pub nat: SocketAddr,
    /// Seconds until kernel conntrack removes the entry, if no further packet arrives. `u32::MAX` if unknown.
    pub remaining_seconds: u32,
    /// Whether kernel conntrack may treat a UDP flow as a stream, which has a longer timeout.
    pub is_stream: bool,
}

/// The numbers of packets and bytes of a connection that kernel conntrack has counted. Bytes include IP headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionTraffic {
    /// Packets of the client.
    pub request_packets: u64,
    /// Bytes of the client.
    pub request_bytes: u64,
    /// Packets of the Pod.
    pub reply_packets: u64,
    /// Bytes of the Pod.
    pub reply_bytes: u64,
}

/// The value of a mapping: the Pod port that receives the traffic of the mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Backend {
    /// The Pod's address in the family of the mapping's frontend.
    pub pod_ip: IpAddr,
    /// The number of the Pod port.
    pub pod_port: PodPort,
    /// [`PodUid::generation`] of the Pod.
    pub generation: u32,
    /// Whether only the frontend's allowed sources may use the mapping.
    pub is_restricted: bool,
}

impl Backend {
    /// Whether both backends are the same port of the same Pod. The restrictions of the backends may differ.
    pub fn has_same_target(&self, other: &Self) -> bool {
        Self { is_restricted: other.is_restricted, ..*self } == *other
    }
}

/// A time of the monotonic clock in milliseconds. The core does not read a clock: the caller of the core passes the
/// time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(pub u64);

impl Moment {
    /// Returns the time `millis` milliseconds after this time.
    #[must_use]
    pub const fn plus(self, millis: u64) -> Self {
        Self(self.0.saturating_add(millis))
    }
}
