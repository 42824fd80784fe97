// SPDX-License-Identifier: Apache-2.0
//! The operator's settings and the capabilities of the datapath, which are constant while the agent runs.

use std::{collections::BTreeMap, fmt, net::IpAddr, str::FromStr};

use super::{Family, Node, NodePort, Protocol, namespaces::Namespaces, sources::SourceRange};

/// The operator's settings, on which the decisions about node ports depend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The range of ports from which NPL allocates node ports.
    pub port_range: PortRange,
    /// How the agent chooses the addresses of the Node that annotations publish.
    pub node_ip: NodeIpSource,
    /// The set of fields that an annotation entry has.
    pub annotation_format: AnnotationFormat,
    /// Whether all protocols of a Pod port have one common node port number and annotation entry.
    pub protocol_pairing: ProtocolPairing,
    /// The namespaces whose Services the agent reads. A Service of another namespace counts as absent.
    pub namespaces: Namespaces,
    /// The IP families that the datapath serves.
    pub families: Vec<Family>,
    /// The transport protocols that the datapath serves.
    pub protocols: Vec<Protocol>,
    /// The time in milliseconds for which a mapping continues to translate packets after the Pod's annotation no longer
    /// names the mapping.
    pub drain_millis: u64,
    /// The time in milliseconds for which a node port cannot be allocated after its mapping is removed.
    pub quarantine_millis: u64,
    /// Whether a Pod can request certain node ports by an annotation.
    pub requested_node_ports: bool,
    /// Whether this Node is being retired: the agent acts as if there were no Services.
    pub is_retiring: bool,
}

/// The shortest quarantine without a warning. A load balancer still sends to a withdrawn node port for some time: AKO
/// (the Avi Kubernetes Operator) keeps a removed pool member for up to 21 s while many Pods change.
const SHORTEST_QUARANTINE_MILLIS: u64 = 30_000;

impl Settings {
    /// Returns a warning if the quarantine is so short that a withdrawn node port may lead to another Pod while load
    /// balancers still send to the node port.
    pub fn quarantine_warning(&self) -> Option<String> {
        (self.quarantine_millis < SHORTEST_QUARANTINE_MILLIS).then(|| {
            format!(
                "--quarantine {}ms is shorter than the time for which load balancers keep a removed member, so their \
                 requests may reach another Pod: give at least {}s",
                self.quarantine_millis,
                SHORTEST_QUARANTINE_MILLIS / 1000
            )
        })
    }

    /// Returns the address to publish for each served family. The published address does not change while it is one of
    /// the candidates: the kubelet and the cloud controller may change the order of a Node's addresses every minute.
    pub fn node_ips(&self, node: Option<&Node>, current: &BTreeMap<Family, IpAddr>) -> BTreeMap<Family, IpAddr> {
        let candidates = self.node_ip.candidates(node);
        let kept = |family: &Family| current.get(family).copied().filter(|ip| candidates.contains(ip));
        let first = |family: &Family| candidates.iter().copied().find(|ip| Family::of(*ip) == *family);
        let of = |family: &Family| kept(family).or_else(|| first(family));
        self.families.iter().filter_map(|family| Some((*family, of(family)?))).collect()
    }
}

/// An interval of node ports, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PortRange {
    start: NodePort,
    end: NodePort,
}

/// The error for a text that is not a port range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PortRangeError {
    /// The text does not consist of two numbers with a dash in between.
    #[error("port range {0:?} is not START-END: give two port numbers, for example 61000-62000")]
    Malformed(String),
    /// The start or the end is not a port number.
    #[error("port range {0:?} has a bound outside 1-65535: give two port numbers, for example 61000-62000")]
    OutOfBounds(String),
    /// The end of the range is not greater than its start.
    #[error("port range {0:?} does not end above its start: give the lower port first, for example 61000-62000")]
    Empty(String),
}

impl PortRange {
    /// Returns the range with these bounds; `None` if the range would have fewer than two ports.
    pub fn new(start: NodePort, end: NodePort) -> Option<Self> {
        (start < end).then_some(Self { start, end })
    }

    /// The first port of the range.
    pub const fn start(self) -> NodePort {
        self.start
    }

    /// The last port of the range.
    pub const fn end(self) -> NodePort {
        self.end
    }

    /// Whether `port` is in the range.
    pub fn contains(self, port: NodePort) -> bool {
        (self.start..=self.end).contains(&port)
    }

    /// The number of ports in the range.
    pub fn len(self) -> usize {
        usize::from(self.end.0 - self.start.0) + 1
    }

    /// Returns false for every range, because a range has at least two ports.
    pub const fn is_empty(self) -> bool {
        false
    }

    /// Returns the port after `port`. Returns the first port of the range if `port` is the last port or outside the
    /// range.
    pub(in crate::core) fn after(self, port: NodePort) -> NodePort {
        if self.contains(port) && port < self.end { NodePort(port.0 + 1) } else { self.start }
    }
}

impl FromStr for PortRange {
    type Err = PortRangeError;

    /// Parses `START-END`. Rejects every text that Antrea rejects, for example a range of one port, and also bounds
    /// that are not port numbers.
    fn from_str(text: &str) -> Result<Self, PortRangeError> {
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        let (start, end) = text
            .split_once('-')
            .filter(|(start, end)| is_number(start) && is_number(end))
            .ok_or_else(|| PortRangeError::Malformed(text.to_owned()))?;
        let port = |part: &str| part.parse().ok().filter(|port| *port != 0).map(NodePort);
        match (port(start), port(end)) {
            (Some(start), Some(end)) if start < end => Ok(Self { start, end }),
            (Some(_), Some(_)) => Err(PortRangeError::Empty(text.to_owned())),
            (None, _) | (_, None) => Err(PortRangeError::OutOfBounds(text.to_owned())),
        }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.start, self.end)
    }
}

/// How the agent chooses the published address of the Node, for each IP family separately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeIpSource {
    /// The first `InternalIP` of the family is published. If the Node has no `InternalIP` of the family, the first
    /// `ExternalIP` of the family is published.
    Internal,
    /// The first `ExternalIP` of the family is published. If the Node has no `ExternalIP` of the family, the first
    /// `InternalIP` of the family is published.
    External,
    /// The agent searches the elements in the order of the list, and publishes the first address of the family.
    Listed(Vec<NodeIp>),
}

/// An element of the list of `--node-ip`: one address, or a range that contains an address of the Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeIp {
    /// This address is published, whether or not the Node object lists the address.
    Address(IpAddr),
    /// The first address of the Node object in this range is published. An `InternalIP` takes precedence over an
    /// `ExternalIP`.
    Range(SourceRange),
}

/// The error for a text that does not name Node addresses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "node IP {0:?} is neither internal nor external nor a list of addresses or ranges: give for example 192.0.2.10 or \
     10.0.0.0/8"
)]
pub struct NodeIpSourceError(String);

impl NodeIpSource {
    fn candidates(&self, node: Option<&Node>) -> Vec<IpAddr> {
        let internal = node.map_or(&[][..], |node| &node.internal_ips);
        let external = node.map_or(&[][..], |node| &node.external_ips);
        match self {
            Self::Internal => [internal, external].concat(),
            Self::External => [external, internal].concat(),
            Self::Listed(list) => {
                let needs_node = list.iter().any(|choice| matches!(choice, NodeIp::Range(_)));
                // While the Node object is unknown, no address of a list with ranges is published: a range that
                // precedes the address in the list may contain an address of the Node.
                if needs_node && node.is_none() {
                    return Vec::new();
                }
                let all = [internal, external].concat();
                list.iter().flat_map(|choice| choice.candidates(&all)).collect()
            }
        }
    }
}

impl NodeIp {
    fn read(text: &str) -> Option<Self> {
        if text.contains('/') { SourceRange::read(text).map(Self::Range) } else { text.parse().ok().map(Self::Address) }
    }

    fn candidates(self, of_node: &[IpAddr]) -> Vec<IpAddr> {
        match self {
            Self::Address(ip) => vec![ip],
            Self::Range(range) => of_node.iter().copied().filter(|ip| range.contains(*ip)).collect(),
        }
    }
}

impl FromStr for NodeIpSource {
    type Err = NodeIpSourceError;

    fn from_str(text: &str) -> Result<Self, NodeIpSourceError> {
        match text {
            "internal" => Ok(Self::Internal),
            "external" => Ok(Self::External),
            list => {
                let choices: Option<Vec<NodeIp>> = list.split(',').map(|text| NodeIp::read(text.trim())).collect();
                choices.map(Self::Listed).ok_or_else(|| NodeIpSourceError(text.to_owned()))
            }
        }
    }
}

/// The set of fields that an annotation entry has. Each format has the name of the Antrea version that writes this
/// format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnnotationFormat {
    /// The fields `podPort, nodeIP, nodePort, protocol, protocols`.
    V1_7,
    /// The fields of [`Self::V1_7`] without `protocols`.
    V2_0,
    /// The fields of [`Self::V2_0`], and `ipFamily`.
    V2_6,
}

/// How the annotation publishes several protocols of one Pod port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProtocolPairing {
    /// Each protocol of a Pod port has its own node port and annotation entry, as in Antrea.
    Separate,
    /// All protocols of a Pod port have the same node port number, and one annotation entry, whose field `protocols`
    /// lists the protocols.
    Merged,
}

/// The error for a text that is not a protocol pairing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("protocol pairing {0:?} is not known: give separate or merged")]
pub struct ProtocolPairingError(String);

impl FromStr for ProtocolPairing {
    type Err = ProtocolPairingError;

    fn from_str(text: &str) -> Result<Self, ProtocolPairingError> {
        match text {
            "separate" => Ok(Self::Separate),
            "merged" => Ok(Self::Merged),
            other => Err(ProtocolPairingError(other.to_owned())),
        }
    }
}

/// The error for a text that is not an annotation format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("annotation format {0:?} is not known: give v1.7, v2.0 or v2.6")]
pub struct AnnotationFormatError(String);

impl FromStr for AnnotationFormat {
    type Err = AnnotationFormatError;

    fn from_str(text: &str) -> Result<Self, AnnotationFormatError> {
        match text {
            "v1.7" => Ok(Self::V1_7),
            "v2.0" => Ok(Self::V2_0),
            "v2.6" => Ok(Self::V2_6),
            other => Err(AnnotationFormatError(other.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{AnnotationFormat, NodeIp, NodeIpSource, NodePort, PortRange, PortRangeError};

    #[test]
    fn a_range_of_two_ascending_ports_is_accepted() {
        for text in ["61000-62000", "1-65535", "40000-40001"] {
            assert_eq!(text.parse::<PortRange>().map(|range| range.to_string()), Ok(text.to_owned()));
        }
    }

    #[test]
    fn other_texts_are_rejected_as_port_ranges_with_a_reason() {
        let reason = |text: &str| text.parse::<PortRange>().unwrap_err();
        for text in ["", "-", "61000", "200 300", "6110-7000-8000", "wrong-6200", "6100-wrong", " 1-2", "+1-2", "-1-2"]
        {
            assert_eq!(reason(text), PortRangeError::Malformed(text.to_owned()));
        }
        for text in ["0-6100", "70000-71000", "1-65536", "1-99999999999999999999"] {
            assert_eq!(reason(text), PortRangeError::OutOfBounds(text.to_owned()));
        }
        for text in ["6000-5000", "6100-6100"] {
            assert_eq!(reason(text), PortRangeError::Empty(text.to_owned()));
        }
    }

    #[test]
    fn the_port_after_the_last_is_the_first() {
        let range: PortRange = "10-12".parse().unwrap();
        let walked = [9, 10, 11, 12, 13].map(|port| range.after(NodePort(port)).0);
        assert_eq!(walked, [10, 11, 12, 10, 10]);
        assert_eq!(range.len(), 3);
    }

    #[test]
    fn node_ip_and_format_are_read_from_their_flags() {
        assert_eq!("external".parse(), Ok(NodeIpSource::External));
        let fixed =
            NodeIpSource::Listed(["192.0.2.1", "2001:db8::1"].map(|ip| NodeIp::Address(ip.parse().unwrap())).to_vec());
        assert_eq!("192.0.2.1,2001:db8::1".parse(), Ok(fixed));
        assert!("both".parse::<NodeIpSource>().is_err());
        assert_eq!("v2.0".parse(), Ok(AnnotationFormat::V2_0));
        assert!("v3".parse::<AnnotationFormat>().is_err());
    }
}
