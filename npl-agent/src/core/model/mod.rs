// SPDX-License-Identifier: Apache-2.0
//! The cluster and the datapath in our own words: what [`crate::kube`] converts into and what decisions are made from.
//!
//! Past this point there is no Kubernetes type and no optional field without a meaning of ours.

pub mod last;
pub mod observed;
pub mod port_range;
pub mod settings;
pub mod snapshot;
pub mod sources;

use std::{collections::BTreeMap, fmt, net::IpAddr, str::FromStr, sync::Arc};

use super::model::sources::AllowList;

/// An IP family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both, in the order in which they are listed everywhere.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    pub const fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// As Kubernetes and the annotation write it.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// Transmission Control Protocol.
    Tcp,
    /// User Datagram Protocol.
    Udp,
    /// Stream Control Transmission Protocol.
    Sctp,
}

impl Protocol {
    /// Lower case, as in the annotation, logs and tables.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }

    /// The IANA protocol number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => npl_common::mapping::protocol::TCP,
            Self::Udp => npl_common::mapping::protocol::UDP,
            Self::Sctp => npl_common::mapping::protocol::SCTP,
        }
    }

    /// The protocol of an IANA number.
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

/// The text is no protocol that Kubernetes knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a protocol: expected tcp, udp or sctp")]
pub struct UnknownProtocol;

impl FromStr for Protocol {
    type Err = UnknownProtocol;

    /// Any case: the API writes `TCP`, the annotation `tcp`.
    fn from_str(text: &str) -> Result<Self, UnknownProtocol> {
        match text.to_ascii_lowercase().as_str() {
            "tcp" => Ok(Self::Tcp),
            "udp" => Ok(Self::Udp),
            "sctp" => Ok(Self::Sctp),
            _ => Err(UnknownProtocol),
        }
    }
}

/// A port of the Node that NPL allocates. Host order, never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodePort(pub u16);

impl fmt::Display for NodePort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A port that a Pod listens on. Host order, never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodPort(pub u16);

impl fmt::Display for PodPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    /// The namespace.
    pub namespace: Arc<str>,
    /// The name.
    pub name: Arc<str>,
}

impl ObjectKey {
    /// A key from its two parts.
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

/// A Pod's uid: tells a Pod from an earlier one of the same name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(pub Arc<str>);

impl PodUid {
    /// The mark that the datapath keeps of a Pod: FNV-1a of the uid, never 0, so that a restarted agent knows whose a
    /// mapping is and a flow of an earlier Pod with the same address is not taken for this one's.
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

/// A Service's uid: tells a Service from an earlier one of the same name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceUid(pub Arc<str>);

impl fmt::Display for ServiceUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether a Pod's readiness waits for us: its spec names our condition among its `readinessGates`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// It does not.
    Absent,
    /// It does, and the condition is not true yet.
    Closed,
    /// It did; the condition is true.
    Open,
}

/// A Pod of this Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Namespace and name.
    pub key: PodKey,
    /// Tells it from an earlier Pod of the same name.
    pub uid: PodUid,
    /// `metadata.resourceVersion` as a number: a lower one than already seen is an old echo.
    pub resource_version: u64,
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// Whether `status.phase` is `Succeeded` or `Failed`: it will never answer again.
    pub is_finished: bool,
    /// Whether `metadata.deletionTimestamp` is set.
    pub is_terminating: bool,
    /// `spec.hostNetwork`.
    pub host_network: bool,
    /// `status.podIPs`, of either family, in order; empty before the sandbox exists.
    pub ips: Vec<IpAddr>,
    /// Ports of containers and of native sidecars (restartable init containers), in the order of the spec.
    pub ports: Vec<ContainerPort>,
    /// The value of the mapping annotation as the API server has it, whoever wrote it.
    pub annotation: Option<String>,
    /// Our readiness gate.
    pub gate: Gate,
}

impl Pod {
    /// Its first address of a family.
    pub fn ip_of(&self, family: Family) -> Option<IpAddr> {
        self.ips.iter().copied().find(|ip| Family::of(*ip) == family)
    }
}

/// `containers[].ports[]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerPort {
    /// The port's name, for named target ports.
    pub name: Option<String>,
    /// `containerPort`.
    pub port: PodPort,
    /// `protocol`.
    pub protocol: Protocol,
    /// `hostPort`, when set and not 0.
    pub host_port: Option<NodePort>,
    /// `hostIP`, when set and not the wildcard address.
    pub host_ip: Option<IpAddr>,
}

/// `spec.type` of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceType {
    /// `ClusterIP`, headless or not; also what an empty type means.
    ClusterIp,
    /// `LoadBalancer`.
    LoadBalancer,
    /// `NodePort`: not for NPL.
    NodePort,
    /// `ExternalName`: not for NPL.
    ExternalName,
}

/// A Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Namespace and name.
    pub key: ServiceKey,
    /// Tells it from an earlier Service of the same name.
    pub uid: ServiceUid,
    /// Whether the enabling annotation is exactly `true`.
    pub is_enabled: bool,
    /// `spec.type`.
    pub service_type: ServiceType,
    /// `spec.selector`; empty selects nothing.
    pub selector: BTreeMap<String, String>,
    /// `spec.ports`.
    pub ports: Vec<ServicePort>,
    /// `spec.ipFamilies`.
    pub families: Vec<Family>,
    /// Who may use its node ports.
    pub allow_list: AllowList,
}

impl Service {
    /// Whether a Pod of the same namespace has every label that the selector names.
    pub(in crate::core) fn selects(&self, pod: &Pod) -> bool {
        let has = |(key, value): (&String, &String)| pod.labels.get(key) == Some(value);
        !self.selector.is_empty() && self.selector.iter().all(has)
    }

    /// Whether NPL acts on it at all.
    pub fn is_active(&self) -> bool {
        let has_type = match self.service_type {
            ServiceType::ClusterIp | ServiceType::LoadBalancer => true,
            ServiceType::NodePort | ServiceType::ExternalName => false,
        };
        self.is_enabled && has_type && !self.selector.is_empty()
    }
}

/// `spec.ports[]` of a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePort {
    /// `protocol`.
    pub protocol: Protocol,
    /// `targetPort`.
    pub target: TargetPort,
}

/// `spec.ports[].targetPort`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum TargetPort {
    /// A number.
    Number(PodPort),
    /// The name of a container port, which each Pod resolves for itself.
    Name(String),
}

/// This Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// `metadata.name`.
    pub name: String,
    /// `status.addresses` of type `InternalIP`, in order.
    pub internal_ips: Vec<IpAddr>,
    /// `status.addresses` of type `ExternalIP`, in order.
    pub external_ips: Vec<IpAddr>,
}

/// Where a client sends to, on every local address of the family: the key of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

/// Where a mapping leads: its value in the datapath.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Backend {
    /// The Pod's address, of the frontend's family.
    pub pod_ip: IpAddr,
    /// The Pod's port.
    pub pod_port: PodPort,
    /// [`PodUid::generation`] of the Pod.
    pub generation: u32,
    /// Whether only the frontend's allowed sources may use it.
    pub is_restricted: bool,
}

impl Backend {
    /// Whether both lead to the same port of the same Pod, whoever may use them.
    pub fn has_same_target(&self, other: &Self) -> bool {
        Self { is_restricted: other.is_restricted, ..*self } == *other
    }
}

/// A moment on the monotonic clock, in milliseconds; the core never reads a clock, it is told the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(pub u64);

impl Moment {
    /// The moment `millis` milliseconds later.
    #[must_use]
    pub const fn plus(self, millis: u64) -> Self {
        Self(self.0.saturating_add(millis))
    }
}
