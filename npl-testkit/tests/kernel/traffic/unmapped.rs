// SPDX-License-Identifier: Apache-2.0
//! Tests that packets without a mapping arrive with the same bytes as on a Node without NPL.

use std::time::{Duration, Instant};

use npl_testkit::echo::EchoServer;
use npl_testkit::packet::tcp_flags::{ACK, PSH, RST, SYN};
use npl_testkit::packet::{Packet, Transport};
use npl_testkit::poll;
use npl_testkit::topology::Options;
use npl_testkit::traffic::tcp_request;

use crate::wire::{self, Wire};
use crate::world::{POD_PORT, World};

/// The time limit for a frame to arrive. A wait takes this long only if the frame is lost.
const LIMIT: Duration = Duration::from_secs(30);

/// Returns packets of every kind from one address to another, none of which belongs to a mapped flow.
fn packets(source: (std::net::Ipv4Addr, u16), destination: (std::net::Ipv4Addr, u16)) -> Vec<Packet> {
    let (source, destination) = (source.into(), destination.into());
    let mut with_options = Packet::udp(source, destination, b"options and fields");
    let ip = with_options.ipv4_mut().unwrap();
    (ip.tos, ip.ttl, ip.dont_fragment, ip.options) = (0xb8, 17, false, vec![1; 8]);
    let mut fragment = Packet::udp(source, destination, &[9; 64]);
    let ip = fragment.ipv4_mut().unwrap();
    (ip.more_fragments, ip.dont_fragment) = (true, false);
    let raw = |protocol| Packet::new(source.ip(), destination.ip(), Transport::Raw { protocol, bytes: vec![5; 48] });
    let mut packets = vec![with_options, fragment, raw(132), raw(47)];
    for flags in [SYN, SYN | ACK, PSH | ACK, RST] {
        packets.push(Packet::tcp(source, destination, flags, b"unmapped"));
    }
    packets.push(Packet::udp(source, destination, b"unmapped"));
    packets
}

/// Sends each packet through the Node and asserts what arrives: other link-layer addresses, a decremented TTL, and no
/// other change.
fn assert_passed_unchanged(from: &Wire, to: &Wire, packets: &[Packet]) {
    for packet in packets {
        let mut sent = packet.clone();
        sent.ethernet = Some(from.ethernet());
        let mut expected = packet.clone();
        expected.ethernet = Some(to.ethernet_from_gateway());
        expected.ipv4_mut().unwrap().ttl -= 1;
        let expected = expected.build();
        from.send(&sent.build()).unwrap();
        let (start, limit) = (Instant::now(), poll::extended(LIMIT));
        let mut seen = Vec::new();
        while !seen.contains(&expected) {
            assert!(start.elapsed() < limit, "{packet:?} did not arrive unchanged; received: {seen:02x?}");
            seen.extend(to.receive(limit).unwrap());
        }
    }
}

#[test]
fn direct_packets_between_client_and_pod_are_unchanged_by_npl() {
    let mut world = World::bare(1, Options::default());
    let client = wire::open(&world.topology.client().device, &world.topology.client().uplink);
    let pod = wire::open(&world.pod().device, &world.pod().host_device);
    let (client_ip, pod_ip) = (world.topology.client().addresses.v4, world.pod().ip());
    let requests = packets((client_ip, 40_000), (pod_ip, POD_PORT));
    let answers = packets((pod_ip, POD_PORT), (client_ip, 40_000));
    // This request creates neighbor entries. Without an entry, a frame would wait for neighbor resolution, and arrive
    // after later frames.
    tcp_request(world.client(), (pod_ip, POD_PORT).into(), "warm up").unwrap();
    for is_attached in [false, true] {
        if is_attached {
            world.install();
        }
        assert_passed_unchanged(&client, &pod, &requests);
        assert_passed_unchanged(&pod, &client, &answers);
    }
}

#[test]
fn direct_connections_of_clients_pods_and_the_node_work() {
    let world = World::new(2);
    let direct = (world.pod().ip(), POD_PORT).into();
    let by_client = tcp_request(world.client(), direct, "directly").unwrap();
    assert_eq!(by_client.client.ip(), world.client_ip());
    let by_node = tcp_request(world.node(), direct, "a probe").unwrap();
    assert_eq!(by_node.pod, "web-0");
    let other = &world.pods[1].0;
    let by_pod = tcp_request(&other.netns, direct, "from Pod to Pod").unwrap();
    assert_eq!(by_pod.client.ip(), other.ip());
    let outside = EchoServer::start_in(world.client(), "outside", &[9090]).unwrap();
    let server = (world.topology.client().addresses.v4, 9090).into();
    let to_outside = tcp_request(&other.netns, server, "from a Pod to the world").unwrap();
    assert_eq!((to_outside.pod.as_str(), to_outside.client.ip()), ("outside", other.ip().into()));
    drop(outside);
}
