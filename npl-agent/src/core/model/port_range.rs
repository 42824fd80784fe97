// SPDX-License-Identifier: Apache-2.0
//! Warnings about a valid port range that overlaps ports of other software, or that is too large for the limit of open
//! files.

use std::fmt;

use super::settings::{PortRange, Settings};

/// The default service node port range of Kubernetes.
const SERVICE_NODE_PORTS: (u16, u16) = (30000, 32767);

/// The warning that the port range overlaps ports that the kernel or Kubernetes allocates. The `Display` text is a log
/// message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RangeWarning {
    /// The port range overlaps the ports that the kernel uses as ephemeral ports of outgoing connections.
    #[error(
        "port range {range} overlaps the ephemeral ports {first}-{last} of outgoing connections: NPL cannot allocate a \
         port while a connection uses this port. Change --port-range or net.ipv4.ip_local_port_range, or add the range \
         to net.ipv4.ip_local_reserved_ports"
    )]
    Ephemeral {
        /// The port range of `--port-range`.
        range: PortRange,
        /// The first port of `net.ipv4.ip_local_port_range`.
        first: u16,
        /// The last port of `net.ipv4.ip_local_port_range`.
        last: u16,
    },
    /// The port range overlaps the default range from which Kubernetes allocates ports to Services of type `NodePort`.
    #[error(
        "port range {range} overlaps 30000-32767, the default range of Services of type NodePort: if NPL and a Service \
         use the same port, clients of the Service reach the Pod that NPL maps to the port. Change --port-range, unless \
         the cluster has another service node port range"
    )]
    ServiceNodePorts {
        /// The port range of `--port-range`.
        range: PortRange,
    },
}

/// The ports that the kernel uses as ephemeral ports of outgoing connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EphemeralPorts {
    first: u16,
    last: u16,
    /// The ranges of `net.ipv4.ip_local_reserved_ports`, whose ports the kernel does not use as ephemeral ports.
    reserved: Vec<(u16, u16)>,
}

impl EphemeralPorts {
    /// Parses `net.ipv4.ip_local_port_range` and `net.ipv4.ip_local_reserved_ports`; `None` if `range` does not consist
    /// of two ports.
    pub fn parse(range: &str, reserved: &str) -> Option<Self> {
        let mut numbers = range.split_ascii_whitespace().map(str::parse);
        let (first, last) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
        Some(Self { first, last, reserved: reserved.trim().split(',').filter_map(span).collect() })
    }

    /// Whether `range` contains an ephemeral port.
    fn are_of(&self, range: PortRange) -> bool {
        self.are_between(range.start().0, range.end().0)
    }

    /// Whether the kernel may use a port of the default range of Services of type `NodePort` as an ephemeral port.
    pub fn overlap_service_node_ports(&self) -> bool {
        let (first, last) = SERVICE_NODE_PORTS;
        self.are_between(first, last)
    }

    fn are_between(&self, first: u16, last: u16) -> bool {
        let is_reserved = |port| self.reserved.iter().any(|(first, last)| (*first..=*last).contains(&port));
        (self.first.max(first)..=self.last.min(last)).any(|port| !is_reserved(port))
    }
}

impl fmt::Display for EphemeralPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// Parses a range such as `61000-62000`, or one port such as `8080`.
fn span(text: &str) -> Option<(u16, u16)> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some((first.parse().ok()?, last.parse().ok()?))
}

/// Returns the warnings about a port range. `ephemeral` contains the kernel's ephemeral ports; `None` if the sysctls
/// cannot be read.
pub fn port_range_warnings(range: PortRange, ephemeral: Option<&EphemeralPorts>) -> Vec<RangeWarning> {
    let ephemeral = ephemeral.filter(|ephemeral| ephemeral.are_of(range));
    let ephemeral =
        ephemeral.map(|ephemeral| RangeWarning::Ephemeral { range, first: ephemeral.first, last: ephemeral.last });
    let (first, last) = SERVICE_NODE_PORTS;
    let overlaps = range.start().0 <= last && first <= range.end().0;
    let services = overlaps.then_some(RangeWarning::ServiceNodePorts { range });
    ephemeral.into_iter().chain(services).collect()
}

/// An upper bound on the number of files that the agent opens besides the sockets that reserve node ports.
const OTHER_FILES: u64 = 256;

/// Returns a warning if the limit of open files is too low to reserve every node port of the range for each family and
/// protocol.
pub fn open_files_warning(settings: &Settings, limit: u64) -> Option<String> {
    let each = settings.families.len() * settings.protocols.len();
    let needed = (settings.port_range.len() * each) as u64 + OTHER_FILES;
    (limit < needed).then(|| {
        let range = settings.port_range;
        format!(
            "this process may open {limit} files, but needs {needed} to reserve all node ports of {range}: Pods beyond \
             the limit get no node port. Raise the hard limit of the container runtime (LimitNOFILE), or give a \
             smaller --port-range"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::model::{
        Family, Protocol,
        namespaces::Namespaces,
        settings::{AnnotationFormat, NodeIpSource, ProtocolPairing},
    };

    #[test]
    fn a_limit_of_open_files_below_the_number_of_node_ports_gives_a_warning() {
        let settings = Settings {
            port_range: "61000-62000".parse().unwrap(),
            node_ip: NodeIpSource::Internal,
            annotation_format: AnnotationFormat::V1_7,
            protocol_pairing: ProtocolPairing::Separate,
            namespaces: Namespaces::default(),
            families: Family::ALL.to_vec(),
            protocols: vec![Protocol::Tcp, Protocol::Udp],
            drain_millis: 0,
            quarantine_millis: 0,
            requested_node_ports: false,
            is_retiring: false,
        };
        let needed = 1001 * 4 + OTHER_FILES;
        assert_eq!(open_files_warning(&settings, needed), None);
        let warning = open_files_warning(&settings, needed - 1).unwrap();
        for words in ["may open 4259 files", "needs 4260", "61000-62000", "LimitNOFILE", "--port-range"] {
            assert!(warning.contains(words), "{words} is not in {warning}");
        }
    }

    fn warnings(range: &str, ephemeral: &str, reserved: &str) -> Vec<RangeWarning> {
        port_range_warnings(range.parse().unwrap(), EphemeralPorts::parse(ephemeral, reserved).as_ref())
    }

    #[test]
    fn port_ranges_that_the_kernel_or_kubernetes_uses_give_a_warning() {
        let linux = "32768\t60999\n";
        assert_eq!(warnings("61000-62000", linux, "\n"), []);
        assert_eq!(warnings("61000-62000", "nonsense", ""), []);
        let range = "60999-61999".parse().unwrap();
        let ephemeral = RangeWarning::Ephemeral { range, first: 32768, last: 60999 };
        assert_eq!(warnings("60999-61999", linux, ""), [ephemeral]);
        let range = "32000-33000".parse().unwrap();
        let ephemeral = RangeWarning::Ephemeral { range, first: 32768, last: 60999 };
        assert_eq!(warnings("32000-33000", linux, ""), [ephemeral, RangeWarning::ServiceNodePorts { range }]);
    }

    #[test]
    fn reserved_ports_are_not_ephemeral_ports() {
        let wide = "1024 65535";
        for enough in ["61000-62000\n", "8080,61000-61499,61500-62000\n", "60000-65535"] {
            assert_eq!(warnings("61000-62000", wide, enough), [], "{enough}");
        }
        let range = "61000-62000".parse().unwrap();
        for too_few in ["61000-61999", "61001-62000", "61000,62000", "", "nonsense"] {
            let ephemeral = RangeWarning::Ephemeral { range, first: 1024, last: 65535 };
            assert_eq!(warnings("61000-62000", wide, too_few), [ephemeral], "{too_few}");
        }
    }
}
