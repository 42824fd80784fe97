// SPDX-License-Identifier: Apache-2.0
//! Two Nodes that differ only in the translator: NPL in one, the kernel's NAT in the other. IP and link-layer addresses
//! are equal, neighbor entries are permanent, and the endpoints' stacks never reply.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::core::devices::xdp::Attach;
use npl_agent::core::model::{Family, Protocol};
use npl_testkit::packet::{Ethernet, Packet};
use npl_testkit::poll;
use npl_testkit::topology::{Offload, Options, mac_text};

use super::tap::{Frame, Tap};
use crate::lab::mapping;
use crate::oracle::{self, PROTOCOLS, Translation};
use crate::world::{NODE_PORT, POD_PORT, World, set_addresses};

/// A node port that is mapped for each protocol and family to one port of a Pod. `pod` is the number of the Pod.
pub(super) struct Service {
    pub(super) node_port: u16,
    pub(super) pod: usize,
    pub(super) pod_port: u16,
}

pub(super) const SERVICES: [Service; 4] = [
    Service { node_port: NODE_PORT, pod: 0, pod_port: POD_PORT },
    Service { node_port: NODE_PORT + 1, pod: NARROW, pod_port: POD_PORT },
    Service { node_port: NODE_PORT + 2, pod: WIDE, pod_port: POD_PORT },
    Service { node_port: NODE_PORT + 50, pod: 0, pod_port: 9090 },
];

/// The Pod whose link has a smaller MTU than the uplink, and the Pod whose link has a larger MTU.
pub(super) const NARROW: usize = 1;
pub(super) const WIDE: usize = 2;
const PODS: usize = 3;
const NARROW_MTU: u32 = 1400;
pub(super) const WIDE_MTU: u32 = 1600;

/// The time limit for a frame to arrive. A wait takes this long only if the frame is lost.
const LIMIT: Duration = Duration::from_secs(10);

/// The UDP port of markers. A marker is the last packet of a step: when the marker arrives, all packets before it have
/// arrived too.
const MARKER_PORT: u16 = 7;

/// nftables rules that keep an endpoint's stack from replying.
const SILENCE: &str = "
table inet npl_silence {
  chain prerouting {
    type filter hook prerouting priority -300;
    drop
  }
}";

/// An endpoint that sends and receives frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Client,
    Pod(usize),
}

impl Endpoint {
    pub(super) const ALL: [Self; 1 + PODS] = [Self::Client, Self::Pod(0), Self::Pod(1), Self::Pod(2)];

    /// The Ethernet header of the frames that the endpoint sends to the Node.
    pub(super) fn ethernet(self) -> Ethernet {
        let (own, node) = match self {
            Self::Client => (link_address(1), link_address(2)),
            Self::Pod(pod) => (pod_link_address(pod), pod_link_address(pod + 0x10)),
        };
        Ethernet { destination: node, source: own, vlans: Vec::new() }
    }
}

/// Returns a locally administered link-layer address.
fn link_address(last: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0x4e, last]
}

fn pod_link_address(pod: usize) -> [u8; 6] {
    link_address(0x10 + u8::try_from(pod).unwrap())
}

/// All frames that the endpoints have received during a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Received {
    pub(super) client: Vec<Frame>,
    pub(super) pods: [Vec<Frame>; PODS],
}

impl Received {
    pub(super) fn at(&mut self, endpoint: Endpoint) -> &mut Vec<Frame> {
        match endpoint {
            Endpoint::Client => &mut self.client,
            Endpoint::Pod(pod) => &mut self.pods[pod],
        }
    }
}

/// One of the two Nodes, with its endpoints.
pub(super) struct TestNode {
    client: Tap,
    pods: [Tap; PODS],
    markers: u64,
    /// The Node's namespaces. This field is last, so that the sockets at the Node's devices are closed first.
    _world: World,
}

/// NPL's translation hook and forwarding mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Stack,
    /// As [`Self::Stack`], but XDP translates the requests.
    Xdp,
    Redirect,
    Offload,
}

impl Mode {
    const fn forwarding(self) -> Forwarding {
        match self {
            Self::Stack | Self::Xdp => Forwarding::Stack,
            Self::Redirect => Forwarding::Redirect,
            Self::Offload => Forwarding::Offload,
        }
    }

    /// Whether packets may bypass the kernel stack.
    pub(super) fn is_redirected(self) -> bool {
        self.forwarding() != Forwarding::Stack
    }
}

/// The Node with NPL, and the Node with the kernel's NAT.
pub(super) struct NodePair {
    /// NPL's mode.
    pub(super) mode: Mode,
    pub(super) npl: TestNode,
    pub(super) kernel: TestNode,
}

impl NodePair {
    pub(super) fn new(mode: Mode) -> Self {
        let mut npl = world();
        npl.install();
        let tcp_and_udp_services = SERVICES[PODS..].iter().flat_map(|it| [(it, Protocol::Tcp), (it, Protocol::Udp)]);
        let sctp_services = SERVICES.iter().map(|it| (it, Protocol::Sctp));
        for (service, protocol) in tcp_and_udp_services.chain(sctp_services) {
            for family in Family::ALL {
                let (frontend, backend) = mapping(protocol, service.node_port, backend(family, service), 1);
                npl.datapath().upsert_mapping(frontend, backend).unwrap();
            }
        }
        set_addresses(npl.datapath(), &Family::ALL.map(node_addresses).concat());

        // Install the rules first: they load kernel conntrack's module, without which its sysctls do not exist.
        let kernel = world();
        oracle::install(kernel.node(), &translations());
        for node in [npl.node(), kernel.node()] {
            oracle::be_liberal(node);
        }
        let attach = if mode == Mode::Xdp { Attach::Xdp } else { Attach::Tc };
        npl.follow_by(mode.forwarding(), attach);
        assert_eq!(npl.xdp_program("eth0").is_some(), mode == Mode::Xdp);
        Self { mode, npl: TestNode::new(npl), kernel: TestNode::new(kernel) }
    }
}

fn translations() -> Vec<Translation> {
    let mut all = Vec::new();
    for (service, family) in SERVICES.iter().flat_map(|it| Family::ALL.map(|family| (it, family))) {
        for (address, protocol) in
            node_addresses(family).into_iter().flat_map(|it| PROTOCOLS.map(|protocol| (it, protocol)))
        {
            let node = (address, service.node_port).into();
            all.push(Translation { protocol, node, pod: backend(family, service) });
        }
    }
    all
}

/// Returns the Node's addresses. The Node itself never uses the second address as a source.
pub(super) fn node_addresses(family: Family) -> [IpAddr; 2] {
    let [first, second] =
        if family == Family::V4 { ["192.0.2.10", "192.0.2.11"] } else { ["2001:db8:0:1::10", "2001:db8:0:1::11"] };
    [first.parse().unwrap(), second.parse().unwrap()]
}

/// Returns a Pod's address.
pub(super) fn pod_ip(family: Family, pod: usize) -> IpAddr {
    let number = pod + 1;
    let text = if family == Family::V4 { format!("10.244.0.{number}") } else { format!("fd00:10:244::{number}") };
    text.parse().unwrap()
}

/// Returns the Pod address and port of a service.
pub(super) fn backend(family: Family, service: &Service) -> SocketAddr {
    (pod_ip(family, service.pod), service.pod_port).into()
}

/// Creates a Node without any translator.
fn world() -> World {
    let world = World::bare(u8::try_from(PODS).unwrap(), Options::default());
    let (node, client) = (world.node(), world.topology.client());
    // The rate limit for ICMP errors is off, so that the kernel suppresses none.
    node.sysctl("net/ipv4/icmp_ratelimit", "0").unwrap();
    node.sysctl("net/ipv4/icmp_ratemask", "0").unwrap();
    node.sysctl("net/ipv6/icmp/ratelimit", "0").unwrap();
    node.sysctl("net/ipv6/icmp/ratemask", "").unwrap();
    let mut links =
        vec![(client.device.clone(), link_address(1), 1500), (client.uplink.clone(), link_address(2), 1500)];
    for (pod, (it, _)) in world.pods.iter().enumerate() {
        let mtu = [1500, NARROW_MTU, WIDE_MTU][pod];
        links.extend([
            (it.device.clone(), pod_link_address(pod), mtu),
            (it.host_device.clone(), pod_link_address(pod + 0x10), mtu),
        ]);
    }
    for (device, address, mtu) in links {
        device.set_offloads(&Offload::ALL, false).unwrap();
        device.set_mtu(mtu).unwrap();
        device.netns().ip(&format!("link set {} address {}", device.name(), mac_text(address))).unwrap();
    }
    node.ip("addr add 192.0.2.11/24 dev eth0\naddr add 2001:db8:0:1::11/64 dev eth0 nodad").unwrap();
    add_neighbors(&world);
    for netns in world.pods.iter().map(|(it, _)| &it.netns).chain([&client.netns]) {
        netns.nft(SILENCE).unwrap();
    }
    world
}

/// Adds permanent neighbor entries. Otherwise, a frame would wait for neighbor resolution, and arrive after later
/// frames.
fn add_neighbors(world: &World) {
    let add = |ip: IpAddr, device: &str, address| {
        let line = format!("neigh replace {ip} lladdr {} dev {device} nud permanent", mac_text(address));
        world.node().ip(&line).unwrap();
    };
    for gateway in ["192.0.2.1", "2001:db8:0:1::1"] {
        add(gateway.parse().unwrap(), "eth0", link_address(1));
    }
    for (pod, (it, _)) in world.pods.iter().enumerate() {
        for ip in it.ips() {
            add(ip, it.host_device.name(), pod_link_address(pod));
        }
    }
}

impl TestNode {
    fn new(world: World) -> Self {
        let client = Tap::open(&world.topology.client().device);
        let pods = std::array::from_fn(|pod| Tap::open(&world.pods[pod].0.device));
        let mut node = Self { client, pods, markers: 0, _world: world };
        // Discard frames that arrived before the first step.
        node.settle();
        node
    }

    /// Sends frames in order and returns all frames that the endpoints receive.
    pub(super) fn deliver(&mut self, from: Endpoint, frames: &[Vec<u8>]) -> Received {
        let tap = match from {
            Endpoint::Client => &self.client,
            Endpoint::Pod(pod) => &self.pods[pod],
        };
        for frame in frames {
            tap.send(frame);
        }
        self.settle()
    }

    /// Sends a marker from the client to the first Pod, and a marker from this Pod to the client. One processor handles
    /// all packets in order, so every earlier packet, including re-injected ones, has arrived before the markers.
    fn settle(&mut self) -> Received {
        self.markers += 1;
        let mut received = Received::default();
        self.client.send(&marker(self.markers, Endpoint::Client));
        receive_until_marker(&self.pods[0], self.markers, &mut received.pods[0]);
        self.pods[0].send(&marker(self.markers, Endpoint::Pod(0)));
        receive_until_marker(&self.client, self.markers, &mut received.client);
        for (tap, frames) in self.pods.iter().zip(&mut received.pods) {
            while let Some(frame) = tap.receive() {
                push_unicast(frame, frames);
            }
        }
        received
    }
}

fn marker(number: u64, from: Endpoint) -> Vec<u8> {
    let (client, pod) = ("198.51.100.2".parse().unwrap(), pod_ip(Family::V4, 0));
    let (source, destination): (IpAddr, IpAddr) = if from == Endpoint::Client { (client, pod) } else { (pod, client) };
    let mut packet =
        Packet::udp((source, MARKER_PORT).into(), (destination, MARKER_PORT).into(), &number.to_be_bytes());
    packet.ethernet = Some(from.ethernet());
    packet.build()
}

/// Receives all frames up to the marker.
fn receive_until_marker(tap: &Tap, number: u64, frames: &mut Vec<Frame>) {
    let port = MARKER_PORT.to_be_bytes();
    loop {
        let Some(frame) = tap.receive() else {
            assert!(tap.wait(poll::extended(LIMIT)), "marker {number} was lost");
            continue;
        };
        let is_marker = frame.bytes.get(34..38) == Some(&[port, port].concat());
        if is_marker && frame.bytes.ends_with(&number.to_be_bytes()) {
            return;
        }
        push_unicast(frame, frames);
    }
}

/// Adds a frame to the list, except broadcast and multicast frames, which kernels send on their own.
fn push_unicast(frame: Frame, frames: &mut Vec<Frame>) {
    let is_multicast = frame.bytes[0] & 1 != 0;
    if !is_multicast {
        frames.push(frame);
    }
}
