// SPDX-License-Identifier: Apache-2.0
//! Two worlds that differ in nothing but what translates: ours in the one, the kernel's own in the other. Same addresses,
//! same link-layer addresses, neighbours that are known, ends that never answer by themselves.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use npl_agent::core::devices::redirect::Forwarding;
use npl_agent::core::devices::xdp::Attach;
use npl_agent::core::model::{Family, Protocol};
use npl_testkit::packet::{Ethernet, Packet};
use npl_testkit::topology::{Offload, Options};

use super::tap::{Frame, Tap};
use crate::lab::mapping;
use crate::oracle::{self, PROTOCOLS, Translation};
use crate::world::{NODE_PORT, POD_PORT, World, set_addresses};

/// A node port of each protocol and both families, and where it leads to.
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

/// The Pod whose link takes less than the uplink does, and the one whose link takes more.
pub(super) const NARROW: usize = 1;
pub(super) const WIDE: usize = 2;
const PODS: usize = 3;
const NARROW_MTU: u32 = 1400;
pub(super) const WIDE_MTU: u32 = 1600;

/// Far longer than a frame needs; nobody waits for it unless one is lost.
const LIMIT: Duration = Duration::from_secs(10);

/// Of nobody; a packet between them says that all before it have arrived.
const MARK_PORT: u16 = 7;

/// What keeps an end from answering.
const SILENCE: &str = "
table inet npl_silence {
  chain prerouting {
    type filter hook prerouting priority -300;
    drop
  }
}";

/// Who sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Client,
    Pod(usize),
}

impl End {
    pub(super) const ALL: [Self; 1 + PODS] = [Self::Client, Self::Pod(0), Self::Pod(1), Self::Pod(2)];

    /// The header of what it sends to the Node.
    pub(super) fn ethernet(self) -> Ethernet {
        let (own, node) = match self {
            Self::Client => (address(1), address(2)),
            Self::Pod(pod) => (pod_address(pod), pod_address(pod + 0x10)),
        };
        Ethernet { destination: node, source: own, vlans: Vec::new() }
    }
}

/// Of somebody's device: locally administered.
fn address(last: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0x4e, last]
}

fn pod_address(pod: usize) -> [u8; 6] {
    address(0x10 + u8::try_from(pod).unwrap())
}

/// All frames that arrived during a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) client: Vec<Frame>,
    pub(super) pods: [Vec<Frame>; PODS],
}

impl Seen {
    pub(super) fn at(&mut self, end: End) -> &mut Vec<Frame> {
        match end {
            End::Client => &mut self.client,
            End::Pod(pod) => &mut self.pods[pod],
        }
    }
}

/// One of the two.
pub(super) struct Side {
    client: Tap,
    pods: [Tap; PODS],
    marks: u64,
    /// Ends with the ends of its cables.
    _world: World,
}

/// Where ours translates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Stack,
    /// As [`Self::Stack`], but requests in the uplink's driver.
    Driver,
    Redirect,
    Offload,
}

impl Way {
    const fn forwarding(self) -> Forwarding {
        match self {
            Self::Stack | Self::Driver => Forwarding::Stack,
            Self::Redirect => Forwarding::Redirect,
            Self::Offload => Forwarding::Offload,
        }
    }

    /// Whether packets pass the host's stack by.
    pub(super) fn is_short(self) -> bool {
        self.forwarding() != Forwarding::Stack
    }
}

/// Both.
pub(super) struct Twin {
    /// Of ours.
    pub(super) way: Way,
    pub(super) ours: Side,
    pub(super) theirs: Side,
}

impl Twin {
    pub(super) fn new(way: Way) -> Self {
        let mut ours = world();
        ours.install();
        let extra = SERVICES[PODS..].iter().flat_map(|it| [(it, Protocol::Tcp), (it, Protocol::Udp)]);
        let of_sctp = SERVICES.iter().map(|it| (it, Protocol::Sctp));
        for (service, protocol) in extra.chain(of_sctp) {
            for family in Family::ALL {
                let (frontend, backend) = mapping(protocol, service.node_port, pod_end(family, service), 1);
                ours.datapath().upsert_mapping(frontend, backend).unwrap();
            }
        }
        set_addresses(ours.datapath(), &Family::ALL.map(node_addresses).concat());

        // Connection tracking is a module, whose settings are there once somebody has asked for it.
        let theirs = world();
        oracle::install(theirs.node(), &translations());
        for node in [ours.node(), theirs.node()] {
            oracle::be_liberal(node);
        }
        let attach = if way == Way::Driver { Attach::Xdp } else { Attach::Tc };
        ours.follow_by(way.forwarding(), attach);
        assert_eq!(ours.xdp_program("eth0").is_some(), way == Way::Driver);
        Self { way, ours: Side::new(ours), theirs: Side::new(theirs) }
    }
}

fn translations() -> Vec<Translation> {
    let mut all = Vec::new();
    for (service, family) in SERVICES.iter().flat_map(|it| Family::ALL.map(|family| (it, family))) {
        for (address, protocol) in
            node_addresses(family).into_iter().flat_map(|it| PROTOCOLS.map(|protocol| (it, protocol)))
        {
            let node = (address, service.node_port).into();
            all.push(Translation { protocol, node, pod: pod_end(family, service) });
        }
    }
    all
}

/// The Node's addresses; the second is one that it does not answer from by itself.
pub(super) fn node_addresses(family: Family) -> [IpAddr; 2] {
    let [first, second] =
        if family == Family::V4 { ["192.0.2.10", "192.0.2.11"] } else { ["2001:db8:0:1::10", "2001:db8:0:1::11"] };
    [first.parse().unwrap(), second.parse().unwrap()]
}

/// A Pod's address.
pub(super) fn pod_ip(family: Family, pod: usize) -> IpAddr {
    let number = pod + 1;
    let text = if family == Family::V4 { format!("10.244.0.{number}") } else { format!("fd00:10:244::{number}") };
    text.parse().unwrap()
}

/// Where a service leads to.
pub(super) fn pod_end(family: Family, service: &Service) -> SocketAddr {
    (pod_ip(family, service.pod), service.pod_port).into()
}

/// A world without anything that translates.
fn world() -> World {
    let world = World::bare(u8::try_from(PODS).unwrap(), Options::default());
    let (node, client) = (world.node(), world.topology.client());
    // Errors are not to be saved at.
    node.sysctl("net/ipv4/icmp_ratelimit", "0").unwrap();
    node.sysctl("net/ipv4/icmp_ratemask", "0").unwrap();
    node.sysctl("net/ipv6/icmp/ratelimit", "0").unwrap();
    node.sysctl("net/ipv6/icmp/ratemask", "").unwrap();
    let mut links = vec![(client.device.clone(), address(1), 1500), (client.uplink.clone(), address(2), 1500)];
    for (pod, (it, _)) in world.pods.iter().enumerate() {
        let mtu = [1500, NARROW_MTU, WIDE_MTU][pod];
        links.extend([
            (it.device.clone(), pod_address(pod), mtu),
            (it.host_device.clone(), pod_address(pod + 0x10), mtu),
        ]);
    }
    for (device, address, mtu) in links {
        device.set_offloads(&Offload::ALL, false).unwrap();
        device.set_mtu(mtu).unwrap();
        device.netns().ip(&format!("link set {} address {}", device.name(), shown(address))).unwrap();
    }
    node.ip("addr add 192.0.2.11/24 dev eth0\naddr add 2001:db8:0:1::11/64 dev eth0 nodad").unwrap();
    introduce_neighbours(&world);
    for netns in world.pods.iter().map(|(it, _)| &it.netns).chain([&client.netns]) {
        netns.nft(SILENCE).unwrap();
    }
    world
}

/// Nobody has to ask who is where: a frame that waits for the answer would come later than those after it.
fn introduce_neighbours(world: &World) {
    let know = |ip: IpAddr, device: &str, address| {
        let line = format!("neigh replace {ip} lladdr {} dev {device} nud permanent", shown(address));
        world.node().ip(&line).unwrap();
    };
    for gateway in ["192.0.2.1", "2001:db8:0:1::1"] {
        know(gateway.parse().unwrap(), "eth0", address(1));
    }
    for (pod, (it, _)) in world.pods.iter().enumerate() {
        for ip in it.ips() {
            know(ip, it.host_device.name(), pod_address(pod));
        }
    }
}

fn shown(address: [u8; 6]) -> String {
    address.map(|octet| format!("{octet:02x}")).join(":")
}

impl Side {
    fn new(world: World) -> Self {
        let client = Tap::open(&world.topology.client().device);
        let pods = std::array::from_fn(|pod| Tap::open(&world.pods[pod].0.device));
        let mut side = Self { client, pods, marks: 0, _world: world };
        // What arrived before nobody has asked for.
        side.settle();
        side
    }

    /// Sends frames one after the other; all that has arrived anywhere when they are through.
    pub(super) fn deliver(&mut self, from: End, frames: &[Vec<u8>]) -> Seen {
        let tap = match from {
            End::Client => &self.client,
            End::Pod(pod) => &self.pods[pod],
        };
        for frame in frames {
            tap.send(frame);
        }
        self.settle()
    }

    /// Sends a mark to the first Pod and another one back. One processor takes all packets in their order, so each has
    /// arrived, also one that was received twice on its way.
    fn settle(&mut self) -> Seen {
        self.marks += 1;
        let mut seen = Seen::default();
        self.client.send(&mark(self.marks, End::Client));
        until_mark(&self.pods[0], self.marks, &mut seen.pods[0]);
        self.pods[0].send(&mark(self.marks, End::Pod(0)));
        until_mark(&self.client, self.marks, &mut seen.client);
        for (tap, frames) in self.pods.iter().zip(&mut seen.pods) {
            while let Some(frame) = tap.receive() {
                keep(frame, frames);
            }
        }
        seen
    }
}

fn mark(number: u64, from: End) -> Vec<u8> {
    let (client, pod) = ("198.51.100.2".parse().unwrap(), pod_ip(Family::V4, 0));
    let (source, destination): (IpAddr, IpAddr) = if from == End::Client { (client, pod) } else { (pod, client) };
    let mut packet = Packet::udp((source, MARK_PORT).into(), (destination, MARK_PORT).into(), &number.to_be_bytes());
    packet.ethernet = Some(from.ethernet());
    packet.build()
}

/// Takes all frames up to the mark.
fn until_mark(tap: &Tap, number: u64, frames: &mut Vec<Frame>) {
    let port = MARK_PORT.to_be_bytes();
    loop {
        let Some(frame) = tap.receive() else {
            assert!(tap.wait(LIMIT), "mark {number} was lost");
            continue;
        };
        let is_mark = frame.bytes.get(34..38) == Some(&[port, port].concat());
        if is_mark && frame.bytes.ends_with(&number.to_be_bytes()) {
            return;
        }
        keep(frame, frames);
    }
}

/// Leaves out what kernels tell all of their neighbours.
fn keep(frame: Frame, frames: &mut Vec<Frame>) {
    let is_for_all = frame.bytes[0] & 1 != 0;
    if !is_for_all {
        frames.push(frame);
    }
}
