// SPDX-License-Identifier: Apache-2.0
//! A Node with Pods and external clients, each in its own network namespace.
//!
//! ```text
//!   client ── eth0 ═══ eth0 ── node ── npl<n> ═══ eth0 ── Pod n
//!   198.51.100.2        192.0.2.10                         10.244.0.<n>/32, routed, as Calico does it
//! ```
//!
//! The first client's end of the uplink is the Node's gateway. A second client has its own uplink.

mod address;
mod device;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

pub use self::address::{ClientAddresses, NodeAddresses, PodAddresses, host_prefix};
use self::address::{FIRST_UPLINK, GATEWAY, SECOND_UPLINK};
pub use self::device::{Device, Offload, mac_text};
use crate::netns::Netns;
use crate::poll;
use crate::run::Run;

/// The first interface index of the Node's uplinks, above the indexes that the kernel assigns in a new namespace.
const FIRST_UPLINK_INDEX: u32 = 100;
const FIRST_POD_INDEX: u32 = 200;

/// The masquerading rules of a typical CNI plug-in, for `nft`.
pub const MASQUERADE: &str = "
table inet npl_test {
  chain postrouting {
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr 10.244.0.0/16 ip daddr != 10.244.0.0/16 masquerade
    ip6 saddr fd00:10:244::/64 ip6 daddr != fd00:10:244::/64 masquerade
  }
}";

/// The time limit for a carrier change, which the kernel reports within a second.
const CARRIER_LIMIT: Duration = Duration::from_secs(30);

/// The options of a topology. The default is one client and an MTU of 1500.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The number of clients, 1 or 2. The second client has its own uplink.
    pub clients: u8,
    /// The MTU of the uplinks and of the Pods' devices.
    pub mtu: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { clients: 1, mtu: 1500 }
    }
}

/// Clients, a Node and Pods. Dropping this value deletes their namespaces.
#[derive(Debug)]
pub struct Topology {
    node: Netns,
    clients: Vec<Client>,
    pods: Vec<Pod>,
    mtu: u32,
    prefix: String,
    made: u16,
}

/// A client outside the cluster.
#[derive(Debug)]
pub struct Client {
    /// The client's namespace.
    pub netns: Netns,
    /// The client's addresses.
    pub addresses: ClientAddresses,
    /// The client's end of its uplink.
    pub device: Device,
    /// The Node's end of the client's uplink.
    pub uplink: Device,
}

/// A Pod on the Node.
#[derive(Clone, Debug)]
pub struct Pod {
    /// The Pod's name.
    pub name: String,
    /// The Pod's namespace.
    pub netns: Netns,
    /// The Pod's addresses.
    pub addresses: PodAddresses,
    /// The Pod's end of its veth pair.
    pub device: Device,
    /// The Node's end of the Pod's veth pair.
    pub host_device: Device,
}

impl Topology {
    /// Creates the Node and its clients. `name` distinguishes several topologies of one run.
    pub fn new(run: &Run, name: &str, options: Options) -> Result<Self> {
        ensure!((1..=2).contains(&options.clients), "a topology has one or two clients, not {}", options.clients);
        let prefix = if name.is_empty() { String::new() } else { format!("{name}-") };
        let node = run.netns(&format!("{prefix}node"))?;
        prepare_node(&node)?;
        let mut topology = Self { node, clients: Vec::new(), pods: Vec::new(), mtu: options.mtu, prefix, made: 0 };
        for index in 0..options.clients {
            let client = topology.connect_client(run, index).with_context(|| format!("connect client {index}"))?;
            topology.clients.push(client);
        }
        Ok(topology)
    }

    /// The Node's namespace.
    pub fn node(&self) -> &Netns {
        &self.node
    }

    /// Returns a handle of a device that the caller has created on the Node.
    pub fn node_device(&self, name: &str) -> Device {
        Device::new(&self.node, name)
    }

    /// The Node's addresses.
    pub fn node_addresses(&self) -> NodeAddresses {
        NodeAddresses::default()
    }

    /// The first client.
    pub fn client(&self) -> &Client {
        &self.clients[0]
    }

    pub fn clients(&self) -> &[Client] {
        &self.clients
    }

    /// The current Pods.
    pub fn pods(&self) -> &[Pod] {
        &self.pods
    }

    /// Adds a Pod with an address that no earlier Pod of this topology had.
    pub fn add_pod(&mut self, run: &Run, name: &str) -> Result<Pod> {
        self.made = self.made.checked_add(1).context("a topology has addresses for 65 535 Pods")?;
        let pod = self.connect_pod(run, name).with_context(|| format!("connect Pod {name}"))?;
        self.pods.push(pod.clone());
        Ok(pod)
    }

    /// Removes a Pod as a container runtime does: first the device, then the namespace.
    pub fn remove_pod(&mut self, name: &str) -> Result<()> {
        let at = self
            .pods
            .iter()
            .position(|pod| pod.name == name)
            .with_context(|| format!("the topology has no Pod {name}"))?;
        let pod = self.pods.remove(at);
        self.node.ip(&format!("link del {}", pod.host_device.name()))?;
        pod.netns.delete()
    }

    /// Moves the addresses and routes of the Node's first uplink to another device, such as a bridge above the uplink.
    pub fn move_node_to(&self, device: &str) -> Result<()> {
        move_addresses(&self.node, &FIRST_UPLINK.node_lines(device))
    }

    /// Moves the addresses and routes of the first client's end of the uplink, as [`Self::move_node_to`] does on the
    /// Node.
    pub fn move_client_to(&self, device: &str) -> Result<()> {
        move_addresses(&self.client().netns, &FIRST_UPLINK.client_lines(device))
    }

    fn connect_client(&self, run: &Run, index: u8) -> Result<Client> {
        let (suffix, addresses) = if index == 0 {
            (String::new(), ClientAddresses::first())
        } else {
            ((index + 1).to_string(), ClientAddresses::second())
        };
        let netns = run.netns(&format!("{}client{suffix}", self.prefix))?;
        let uplink = format!("eth{index}");
        self.join(&uplink, FIRST_UPLINK_INDEX + u32::from(index), &netns)?;
        let lines = if index == 0 { FIRST_UPLINK } else { SECOND_UPLINK };
        self.node.ip(&lines.node_lines(&uplink))?;
        netns.ip(&lines.client_lines("eth0"))?;
        let device = Device::new(&netns, "eth0");
        Ok(Client { netns, addresses, device, uplink: Device::new(&self.node, &uplink) })
    }

    fn connect_pod(&self, run: &Run, name: &str) -> Result<Pod> {
        let addresses = PodAddresses::nth(self.made);
        let netns = run.netns(&format!("{}pod-{name}", self.prefix))?;
        let host_device = format!("npl{}", self.made);
        self.join(&host_device, FIRST_POD_INDEX + u32::from(self.made), &netns)?;
        self.route_pod(&netns, &host_device, addresses)?;
        let device = Device::new(&netns, "eth0");
        let host_device = Device::new(&self.node, &host_device);
        Ok(Pod { name: name.to_owned(), netns, addresses, device, host_device })
    }

    /// Replaces a Pod's veth pair with a netkit pair of the same names. `ip` cannot set the name of the new peer, which
    /// the kernel calls `nk0`, so the peer is renamed when it is moved to the Pod.
    pub fn put_behind_netkit(&self, pod: &Pod) -> Result<()> {
        let host_device = pod.host_device.name();
        let peer = pod.netns.name();
        self.node.ip(&format!("link del {host_device}\nlink add {host_device} type netkit"))?;
        self.node.ip(&format!("link set nk0 netns {peer} name eth0\nlink set {host_device} up"))?;
        pod.netns.ip("link set eth0 up")?;
        wait_for_carrier(&self.node, host_device)?;
        wait_for_carrier(&pod.netns, "eth0")?;
        self.route_pod(&pod.netns, host_device, pod.addresses)
    }

    /// Adds a Pod's addresses, and routes at both ends of the Pod's veth or netkit pair.
    fn route_pod(&self, netns: &Netns, host_device: &str, addresses: PodAddresses) -> Result<()> {
        let PodAddresses { v4, v6 } = addresses;
        self.node.ip(&format!(
            "addr add fe80::1/64 dev {host_device} nodad\n\
             route add {v4}/32 dev {host_device} scope link\n\
             route add {v6}/128 dev {host_device}"
        ))?;
        // No device has the address of the Pod's gateway, so the Node answers ARP requests for every address on this
        // device.
        self.node.sysctl(&format!("net/ipv4/conf/{host_device}/proxy_arp"), "1")?;
        self.node.sysctl(&format!("net/ipv4/neigh/{host_device}/proxy_delay"), "0")?;
        netns.ip(&format!(
            "addr add {v4}/32 dev eth0\n\
             addr add {v6}/128 dev eth0 nodad\n\
             route add 169.254.1.1 dev eth0 scope link\n\
             route add default via 169.254.1.1 dev eth0\n\
             route add default via fe80::1 dev eth0"
        ))?;
        Ok(())
    }

    /// Connects the Node's device `name` with `eth0` of `peer`.
    ///
    /// The Node's end gets an explicit interface index, because the kernel delays the carrier event by up to one second
    /// if both ends of a pair have the same index.
    fn join(&self, name: &str, index: u32, peer: &Netns) -> Result<()> {
        let mtu = self.mtu;
        prepare_addresses(peer)?;
        self.node.ip(&format!(
            "link add {name} index {index} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {}",
            peer.name()
        ))?;
        peer.ip("link set eth0 up")?;
        self.node.ip(&format!("link set {name} up"))?;
        wait_for_carrier(&self.node, name)?;
        wait_for_carrier(peer, "eth0")
    }
}

impl Client {
    /// Adds a permanent neighbor entry on the Node for the Node's gateway, which is the first client, so that the Node
    /// sends no ARP requests.
    pub fn fix_neighbour(&self) -> Result<()> {
        self.uplink.fix_neighbour(GATEWAY, &self.device)
    }
}

impl Pod {
    /// The Pod's IPv4 address.
    pub fn ip(&self) -> Ipv4Addr {
        self.addresses.v4
    }

    /// The Pod's addresses in the order of `status.podIPs`.
    pub fn ips(&self) -> Vec<IpAddr> {
        vec![self.addresses.v4.into(), self.addresses.v6.into()]
    }

    /// Adds a permanent neighbor entry for the Pod's IPv4 address, so that the Node sends no ARP requests.
    pub fn fix_neighbour(&self) -> Result<()> {
        self.host_device.fix_neighbour(self.ip(), &self.device)
    }
}

fn prepare_node(node: &Netns) -> Result<()> {
    prepare_addresses(node)?;
    node.sysctl("net/ipv4/ip_forward", "1")?;
    node.sysctl("net/ipv6/conf/all/forwarding", "1")
}

/// Disables duplicate address detection, which would take seconds; the addresses are unique.
fn prepare_addresses(netns: &Netns) -> Result<()> {
    netns.sysctl("net/ipv6/conf/default/accept_dad", "0")
}

fn move_addresses(netns: &Netns, lines: &str) -> Result<()> {
    netns.ip(&format!("addr flush dev eth0 scope global\n{lines}")).map(drop)
}

fn wait_for_carrier(netns: &Netns, device: &str) -> Result<()> {
    let is_up = || netns.ip(&format!("link show dev {device}")).is_ok_and(|shown| shown.contains("state UP"));
    poll::until(&format!("the carrier of {device}"), CARRIER_LIMIT, || is_up().then_some(())).map(drop)
}

/// An address that no topology uses, for packets that must not reach any receiver.
pub const NOBODY_V4: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 254);

/// The IPv6 counterpart of [`NOBODY_V4`].
pub const NOBODY_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xffff, 0, 0, 0, 0, 0xfe);
