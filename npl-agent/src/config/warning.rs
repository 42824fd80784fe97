// SPDX-License-Identifier: Apache-2.0
//! Port ranges that work and are still a bad idea.

use crate::core::settings::PortRange;

/// What Kubernetes gives to Services of type `NodePort` unless it is told otherwise.
const SERVICE_NODE_PORTS: (u16, u16) = (30000, 32767);

/// Somebody else takes ports of the range too. Its text is one sentence for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RangeWarning {
    /// The kernel lends out these ports for outgoing connections.
    #[error(
        "port range {range} overlaps the ports {first}-{last} that the kernel lends to outgoing connections: \
         connections that hold a port keep it from NPL; change --port-range or net.ipv4.ip_local_port_range, or add \
         the range to net.ipv4.ip_local_reserved_ports"
    )]
    Ephemeral {
        /// The range of `--port-range`.
        range: PortRange,
        /// The kernel's first port.
        first: u16,
        /// The kernel's last port.
        last: u16,
    },
    /// Kubernetes gives these to Services of type `NodePort`.
    #[error(
        "port range {range} overlaps 30000-32767, which Kubernetes gives to Services of type NodePort: \
         NPL answers first where both use a port; change --port-range unless the cluster's range is another"
    )]
    ServiceNodePorts {
        /// The range of `--port-range`.
        range: PortRange,
    },
}

/// What to say about a range; `ephemeral` is the text of `net.ipv4.ip_local_port_range`, where it can be read.
pub fn port_range_warnings(range: PortRange, ephemeral: Option<&str>) -> Vec<RangeWarning> {
    let overlaps = |first: u16, last: u16| range.start().0 <= last && first <= range.end().0;
    let ephemeral = ephemeral
        .and_then(two_ports)
        .filter(|(first, last)| overlaps(*first, *last))
        .map(|(first, last)| RangeWarning::Ephemeral { range, first, last });
    let (first, last) = SERVICE_NODE_PORTS;
    let services = overlaps(first, last).then_some(RangeWarning::ServiceNodePorts { range });
    ephemeral.into_iter().chain(services).collect()
}

fn two_ports(text: &str) -> Option<(u16, u16)> {
    let mut numbers = text.split_ascii_whitespace().map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}
