// SPDX-License-Identifier: Apache-2.0
//! The network of a cluster: Nodes on one LAN, a router, and a client on the router's other network.
//!
//! ```text
//!   client ── eth0 ═══ client0 ── lan ── br0 ═══ eth0 ── node-1, node-2 …
//!   198.51.100.2        198.51.100.1  192.0.2.1           192.0.2.11, .12 …
//! ```
//!
//! The control plane runs in the router's namespace, which also has the address of the API server's Service: Pods reach
//! the API server without kube-proxy. All machines are network namespaces, so several clusters can use the same
//! addresses without interference.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result};

use crate::control_plane::SERVICE_ADDRESS;
use crate::netns::Netns;
use crate::run::Run;

/// The router's address on the LAN, on which the API server listens.
pub(super) const ROUTER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// The client's addresses.
pub const CLIENT: (Ipv4Addr, Ipv6Addr) =
    (Ipv4Addr::new(198, 51, 100, 2), Ipv6Addr::new(0x2001, 0xdb8, 0, 2, 0, 0, 0, 2));

/// The ranges of all Pod addresses.
pub(super) const POD_RANGES: [&str; 2] = ["10.244.0.0/16", "fd00:10:244::/48"];

/// The ranges of all Pod addresses, in the format of command-line flags.
pub(super) fn pod_range() -> String {
    POD_RANGES.join(",")
}

/// The number of a Node, from which its name and addresses are derived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeNumber(u8);

impl NodeNumber {
    /// Returns the numbers of the first `count` Nodes.
    pub fn first(count: u8) -> impl Iterator<Item = Self> {
        (1..=count).map(Self)
    }

    /// The Node's name, such as `node-1`.
    pub fn name(self) -> String {
        format!("node-{}", self.0)
    }

    /// The Node's IPv4 address, such as `192.0.2.11`.
    pub fn v4(self) -> Ipv4Addr {
        Ipv4Addr::new(192, 0, 2, 10 + self.0)
    }

    /// The Node's IPv6 address, such as `2001:db8:0:1::11`. The last group has the same digits as the last number of
    /// the IPv4 address.
    pub fn v6(self) -> Ipv6Addr {
        Ipv6Addr::new(0x2001, 0xdb8, 0, 1, 0, 0, 0, 0x10 + u16::from(self.0))
    }

    /// Returns both addresses, in the order of `--node-ip`.
    pub fn addresses(self) -> [IpAddr; 2] {
        [self.v4().into(), self.v6().into()]
    }

    /// The addresses of the Node's bridge, such as `10.244.1.1` and `fd00:10:244:1::1`: the first addresses that the
    /// CNI plug-in assigns.
    pub fn bridge_addresses(self) -> [IpAddr; 2] {
        let v6 = Ipv6Addr::new(0xfd00, 0x10, 0x244, u16::from(self.0), 0, 0, 0, 1);
        [Ipv4Addr::new(10, 244, self.0, 1).into(), v6.into()]
    }

    /// The range of the Node's IPv4 Pod addresses, such as `10.244.1.0/24`.
    pub fn pods_v4(self) -> String {
        format!("10.244.{}.0/24", self.0)
    }

    /// The range of the Node's IPv6 Pod addresses, such as `fd00:10:244:1::/64`.
    pub fn pods_v6(self) -> String {
        format!("fd00:10:244:{}::/64", self.0)
    }
}

/// The maximum number of Nodes.
pub const MAX_NODES: u8 = 9;

/// The network namespaces of a cluster's machines: the router (`lan`), the client and the Nodes.
#[derive(Debug)]
pub(super) struct Network {
    pub(super) lan: Netns,
    pub(super) client: Netns,
    pub(super) nodes: Vec<(NodeNumber, Netns)>,
}

impl Network {
    /// Builds the network without Pods.
    pub(super) fn build(run: &Run, nodes: u8) -> Result<Self> {
        let lan = build_lan(run).context("build the LAN")?;
        let client = run.netns("client")?;
        connect_client(&lan, &client).context("connect the client")?;
        let mut network = Self { lan, client, nodes: Vec::new() };
        for number in NodeNumber::first(nodes) {
            let netns = run.netns(&number.name())?;
            connect_node(&network.lan, &netns, number).with_context(|| format!("connect {}", number.name()))?;
            network.nodes.push((number, netns));
        }
        Ok(network)
    }

    /// Adds routes to every Node's Pods on all other Nodes and on the router, like the route table of a cloud.
    pub(super) fn route_pods(&self) -> Result<()> {
        for (number, own) in &self.nodes {
            let others = self.nodes.iter().map(|(_, netns)| netns).filter(|netns| netns.name() != own.name());
            for netns in others.chain([&self.lan]) {
                netns.ip(&format!(
                    "route add {} via {}\nroute add {} via {}",
                    number.pods_v4(),
                    number.v4(),
                    number.pods_v6(),
                    number.v6()
                ))?;
            }
        }
        Ok(())
    }
}

fn build_lan(run: &Run) -> Result<Netns> {
    let lan = run.netns("lan")?;
    prepare(&lan)?;
    forward(&lan)?;
    lan.ip(&format!(
        "link add br0 type bridge forward_delay 0
addr add {ROUTER}/24 dev br0
addr add 2001:db8:0:1::1/64 dev br0 nodad
link set br0 up
addr add {SERVICE_ADDRESS}/32 dev lo"
    ))?;
    Ok(lan)
}

fn connect_client(lan: &Netns, client: &Netns) -> Result<()> {
    prepare(client)?;
    let (v4, v6) = CLIENT;
    lan.ip(&format!(
        "link add client0 type veth peer name eth0 netns {}
addr add 198.51.100.1/24 dev client0
addr add 2001:db8:0:2::1/64 dev client0 nodad
link set client0 up",
        client.name()
    ))?;
    client.ip(&format!(
        "addr add {v4}/24 dev eth0
addr add {v6}/64 dev eth0 nodad
link set eth0 up
route add default via 198.51.100.1
route add default via 2001:db8:0:2::1"
    ))?;
    Ok(())
}

fn connect_node(lan: &Netns, node: &Netns, number: NodeNumber) -> Result<()> {
    prepare(node)?;
    forward(node)?;
    let port = number.name();
    lan.ip(&format!(
        "link add {port} type veth peer name eth0 netns {}
link set {port} master br0
link set {port} up",
        node.name()
    ))?;
    node.ip(&format!(
        "addr add {}/24 dev eth0
addr add {}/64 dev eth0 nodad
link set eth0 up
route add default via {ROUTER}
route add default via 2001:db8:0:1::1",
        number.v4(),
        number.v6()
    ))?;
    Ok(())
}

/// Disables duplicate address detection, which would take seconds; the addresses are unique.
fn prepare(netns: &Netns) -> Result<()> {
    netns.sysctl("net/ipv6/conf/default/accept_dad", "0")
}

fn forward(netns: &Netns) -> Result<()> {
    netns.sysctl("net/ipv4/ip_forward", "1")?;
    netns.sysctl("net/ipv6/conf/all/forwarding", "1")
}

#[cfg(test)]
mod tests {
    use super::NodeNumber;

    #[test]
    fn a_nodes_name_and_addresses_are_derived_from_its_number() {
        let node = NodeNumber::first(2).nth(1).unwrap();
        assert_eq!((node.name().as_str(), node.v4().to_string().as_str()), ("node-2", "192.0.2.12"));
        assert_eq!(
            (node.v6().to_string().as_str(), node.pods_v6().as_str()),
            ("2001:db8:0:1::12", "fd00:10:244:2::/64")
        );
    }
}
