// SPDX-License-Identifier: Apache-2.0
//! Tests that NPL translates ICMP errors exactly as the kernel's NAT by nftables does.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use npl_agent::core::model::{Family, Protocol};
use npl_testkit::packet::{Ip, Packet, Transport};
use npl_testkit::topology::Options;
use npl_testkit::{poll, traffic};

use crate::lab::mapping;
use crate::oracle::{self, Translation};
use crate::wire::{self, Wire};
use crate::world::{NODE_PORT, POD_PORT, World, set_addresses};

const CLIENT_PORT: u16 = 40_000;
/// A node port whose Pod port is closed.
const CLOSED: u16 = NODE_PORT + 50;
/// The time limit for an error to arrive. A wait takes this long only if the error is lost.
const LIMIT: Duration = Duration::from_secs(30);

/// The addresses of one family.
struct Scene {
    family: Family,
    client: IpAddr,
    /// The Node's addresses. The Node does not select the second one as the source of its own packets.
    nodes: [IpAddr; 2],
    pod: IpAddr,
    /// A router between the Node and the client.
    router: IpAddr,
}

fn scenes(world: &World) -> [Scene; 2] {
    let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
    let [[client_v4, client_v6], [node_v4, node_v6]] = [world.client_ips(), world.node_ips()];
    let pod = world.pod().addresses;
    [
        Scene {
            family: Family::V4,
            client: client_v4,
            nodes: [node_v4, ip("192.0.2.11")],
            pod: pod.v4.into(),
            router: ip("203.0.113.1"),
        },
        Scene {
            family: Family::V6,
            client: client_v6,
            nodes: [node_v6, ip("2001:db8:0:1::11")],
            pod: pod.v6.into(),
            router: ip("2001:db8:0:9::1"),
        },
    ]
}

/// Installs nftables rules with the same mappings as those of [`install_npl`].
fn install_rules(world: &World) {
    let mut translations = Vec::new();
    for Scene { nodes, pod, .. } in scenes(world) {
        for (address, (node_port, pod_port)) in
            nodes.into_iter().flat_map(|address| [(address, (NODE_PORT, POD_PORT)), (address, (CLOSED, POD_PORT + 1))])
        {
            let (node, pod) = ((address, node_port).into(), (pod, pod_port).into());
            translations.push(Translation { protocol: Protocol::Udp, node, pod });
        }
    }
    oracle::install(world.node(), &translations);
}

fn install_npl(world: &mut World) {
    world.install();
    let mut addresses = Vec::new();
    for Scene { nodes, pod, .. } in scenes(world) {
        addresses.extend(nodes);
        let (frontend, backend) = mapping(Protocol::Udp, CLOSED, (pod, POD_PORT + 1).into(), 1);
        world.datapath().upsert_mapping(frontend, backend).unwrap();
    }
    set_addresses(world.datapath(), &addresses);
}

/// Sends a packet at one device, and returns the first packet at another device that `is_wanted` accepts.
fn observe(from: &Wire, packet: &Packet, at: &Wire, is_wanted: impl Fn(&Packet) -> bool) -> Packet {
    let mut sent = packet.clone();
    sent.ethernet = Some(from.ethernet());
    from.send(&sent.build()).unwrap();
    let (start, limit) = (Instant::now(), poll::extended(LIMIT));
    while start.elapsed() < limit {
        let Some(frame) = at.receive(limit).unwrap() else { break };
        let Ok(mut seen) = Packet::parse(&frame) else { continue };
        if is_wanted(&seen) {
            // Clear fields that differ in each run: link-layer addresses, and random values of the sender.
            seen.ethernet = None;
            match &mut seen.ip {
                Ip::V4(header) => header.identification = 0,
                Ip::V6(header) => header.flow_label = 0,
            }
            return seen;
        }
    }
    panic!("no expected packet followed {packet:?}");
}

/// Returns types and codes of a router's ICMP errors.
fn kinds(family: Family) -> [(u8, u8); 4] {
    if family == Family::V4 { [(3, 1), (3, 4), (11, 0), (12, 0)] } else { [(1, 0), (2, 0), (3, 0), (4, 0)] }
}

fn is_error(packet: &Packet) -> bool {
    matches!(&packet.transport, Transport::Icmp(icmp) if matches!(icmp.kind, 1..=4 | 11 | 12))
}

/// Causes ICMP errors about a closed port and an expired TTL, which arrive at the client, and sends ICMP errors of a
/// router, which arrive at the Pod. Returns all these errors as they arrive.
fn errors(world: &World, scene: &Scene) -> Vec<Packet> {
    let (device, uplink) = (&world.topology.client().device, &world.topology.client().uplink);
    let client = wire::open_for(scene.family, device, uplink);
    let pod = wire::open_for(scene.family, &world.pod().device, &world.pod().host_device);
    let mut seen = Vec::new();
    // Each NAT address has its own client port: the kernel would assign another port to the second of two connections
    // with the same flow tuple.
    for (address, client_port) in scene.nodes.into_iter().zip(CLIENT_PORT..) {
        let from = SocketAddr::from((scene.client, client_port));
        // The client has a socket on this port, because its kernel would otherwise answer datagrams with ICMP errors.
        let _receiver = world.client().run(|| UdpSocket::bind(from)).unwrap().unwrap();
        let closed = Packet::udp(from, (address, CLOSED).into(), b"hello");
        seen.push(observe(&client, &closed, &client, is_error));

        let node = SocketAddr::from((address, NODE_PORT));
        let request = Packet::udp(from, node, b"who are you?");
        let answer = observe(&client, &request, &client, |packet| {
            packet.source_ip() == address && matches!(&packet.transport, Transport::Udp(_))
        });
        assert_eq!(answer.destination_ip(), from.ip());
        let mut last_hop = request.clone();
        match &mut last_hop.ip {
            Ip::V4(header) => header.ttl = 1,
            Ip::V6(header) => header.hop_limit = 1,
        }
        seen.push(observe(&client, &last_hop, &client, is_error));

        let reply = Packet::udp(node, from, b"a reply of the Pod");
        for (kind, code) in kinds(scene.family) {
            for bytes in [8, 33] {
                let error = Packet::icmp_error(scene.router, kind, code, &reply, bytes);
                seen.push(observe(&client, &error, &pod, is_error));
            }
        }
    }
    seen
}

#[test]
fn icmp_errors_arrive_as_by_kernel_nat() {
    let observed = [false, true].map(|with_npl| {
        let mut world = World::bare(1, Options::default());
        for Scene { family, nodes: [_, second], pod, .. } in scenes(&world) {
            let (length, flags) = if family == Family::V4 { (24, "") } else { (64, "nodad") };
            world.node().ip(&format!("addr add {second}/{length} dev eth0 {flags}")).unwrap();
            // This request creates neighbor entries. Without an entry, a frame would wait for neighbor resolution, and
            // arrive after later frames.
            traffic::tcp_request(world.client(), (pod, POD_PORT).into(), "warm up").unwrap();
        }
        // The rate limits for ICMP errors are off, so that no error is suppressed.
        for netns in [world.node(), &world.pod().netns] {
            netns.sysctl("net/ipv4/icmp_ratelimit", "0").unwrap();
            netns.sysctl("net/ipv6/icmp/ratelimit", "0").unwrap();
        }
        if with_npl {
            install_npl(&mut world);
        } else {
            install_rules(&world);
        }
        scenes(&world).map(|scene| errors(&world, &scene))
    });
    let [kernel, npl] = observed;
    assert_eq!(npl, kernel);
}
