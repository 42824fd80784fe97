// SPDX-License-Identifier: Apache-2.0
//! Tests SCTP through a mapping: with the kernel's sockets if the kernel has SCTP, and in any case with packets that
//! the test builds. The CRCs are verified by an implementation that shares no code with the programs.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use npl_agent::core::model::{Family, Frontend, NodePort, Protocol};
use npl_agent::sockets::{Reservations, ReserveError};
use npl_testkit::echo::{self, EchoServer};
use npl_testkit::packet::sctp_chunks::{COOKIE_ACK, COOKIE_ECHO, DATA, INIT, INIT_ACK};
use npl_testkit::packet::{Crc, Packet, SCTP_TAG, Transport};
use npl_testkit::poll;
use npl_testkit::topology::Offload;
use npl_testkit::traffic::{self, has_sctp};

use super::firewall::load_rules;
use super::fragments::ORDERS;
use super::redirect::redirected;
use crate::lab::mapping;
use crate::prog_run::extensions::FRAGMENT;
use crate::prog_run::fragments::{L3, V4_HEADER, V6_HEADER, pieces};
use crate::sys::{stay_on, stay_on_this_processor};
use crate::wire::{self, Wire};
use crate::world::{NODE_PORT, POD_PORT, World};

const CLIENT_PORT: u16 = 40_001;
/// The time limit for a packet to arrive. A wait takes this long only if the packet is lost.
const LIMIT: Duration = Duration::from_secs(30);

/// Creates a Node whose first Pod's port is also mapped for SCTP.
fn world() -> World {
    mapped(World::new(1))
}

fn mapped(mut world: World) -> World {
    map(&mut world);
    world
}

fn map(world: &mut World) {
    for pod_ip in world.pod().ips() {
        let (frontend, backend) = mapping(Protocol::Sctp, NODE_PORT, (pod_ip, POD_PORT).into(), 1);
        world.datapath().upsert_mapping(frontend, backend).unwrap();
    }
}

/// Maps the first Pod's port for SCTP, and asserts that associations of both families reach the Pod.
#[track_caller]
pub(super) fn assert_associations(world: &mut World) {
    map(world);
    if !has_sctp() {
        return exchange_data(world);
    }
    let _server = EchoServer::start_sctp_in(&world.pod().netns, "web-0", POD_PORT).unwrap();
    exchange_messages(world);
}

/// Exchanges a short and a long message with the Pod in each family, each on an association of its own. The long
/// message takes several packets.
#[track_caller]
fn exchange_messages(world: &World) {
    for (frontend, client_ip) in world.frontends().into_iter().zip(world.client_ips()) {
        for question in ["who are you?".to_owned(), "?".repeat(20_000)] {
            let answer = traffic::request(world.client(), echo::Protocol::Sctp, frontend, &question).unwrap();
            assert_eq!((answer.pod.as_str(), answer.client.ip()), ("web-0", client_ip));
            assert_eq!((answer.protocol, answer.received), (echo::Protocol::Sctp, question.len() as u64 + 1));
        }
    }
}

/// Tests associations with CRC offload, with CRCs that the kernel computes, and with kernel conntrack, which verifies
/// CRCs.
#[test]
fn associations_reach_the_pod_with_the_clients_address() {
    let world = world();
    if !has_sctp() {
        // Without SCTP sockets, the test builds the packets of the association itself.
        return exchange_data(&world);
    }
    let _server = EchoServer::start_sctp_in(&world.pod().netns, "web-0", POD_PORT).unwrap();
    exchange_messages(&world);
    for device in [&world.topology.client().device, &world.pod().device] {
        device.set_offloads(&Offload::ALL, false).unwrap();
    }
    exchange_messages(&world);
    load_rules(&world);
    exchange_messages(&world);
}

/// A sender that has built its chunks for a larger MTU must send fragments, because it cannot split chunks that already
/// have sequence numbers.
#[test]
fn associations_survive_a_smaller_mtu_than_the_senders_expect() {
    let world = world();
    if !has_sctp() {
        return exchange_fragments(&world);
    }
    let _server = EchoServer::start_sctp_in(&world.pod().netns, "web-0", POD_PORT).unwrap();
    for device in [&world.pod().device, &world.pod().host_device] {
        device.set_mtu(1300).unwrap();
    }
    // The retransmission timeout (in milliseconds) is short, because a sender that learns the smaller MTU while it
    // sends retransmits only when the timer expires.
    for netns in [world.client(), &world.pod().netns] {
        for setting in ["rto_initial", "rto_min"] {
            netns.sysctl(&format!("net/sctp/{setting}"), "100").unwrap();
        }
    }
    exchange_messages(&world);
    load_rules(&world);
    exchange_messages(&world);
}

/// An endpoint of an association whose packets the test builds.
struct Endpoint<'w> {
    wire: &'w Wire,
    name: &'static str,
}

impl Endpoint<'_> {
    fn send(&self, packet: &Packet) {
        let mut packet = packet.clone();
        packet.ethernet = Some(self.wire.ethernet());
        self.wire.send(&packet.build()).unwrap();
    }

    /// Waits for an SCTP packet between two addresses, with a first chunk of this type.
    #[track_caller]
    fn expect(&self, from: SocketAddr, to: SocketAddr, kind: u8) -> Packet {
        let (start, limit) = (Instant::now(), poll::extended(LIMIT));
        while start.elapsed() < limit {
            let Some(frame) = self.wire.receive(limit).unwrap() else { break };
            let Ok(packet) = Packet::parse(&frame) else { continue };
            let Transport::Sctp(sctp) = &packet.transport else { continue };
            let addresses: [SocketAddr; 2] =
                [(packet.source_ip(), sctp.source).into(), (packet.destination_ip(), sctp.destination).into()];
            if addresses == [from, to] && sctp.chunks.first() == Some(&kind) {
                return packet;
            }
        }
        panic!("no packet from {from} to {to} with chunk {kind} arrived at the {}", self.name);
    }

    /// Waits for an ICMP error about an SCTP packet, and returns its source and the quoted packet.
    fn expect_error(&self) -> (IpAddr, Packet) {
        let (start, limit) = (Instant::now(), poll::extended(LIMIT));
        while start.elapsed() < limit {
            let Some(frame) = self.wire.receive(limit).unwrap() else { break };
            let Ok(packet) = Packet::parse(&frame) else { continue };
            let Transport::Icmp(icmp) = &packet.transport else { continue };
            let Ok(quoted) = Packet::parse_ip(&icmp.payload) else { continue };
            if matches!(quoted.transport, Transport::Sctp(_)) {
                return (packet.source_ip(), quoted);
            }
        }
        panic!("no ICMP error arrived at the {}", self.name);
    }
}

/// Sends a packet at one endpoint and asserts that it arrives at the other with the translated addresses and a
/// correct CRC.
#[track_caller]
fn assert_translated(
    sender: &Endpoint<'_>,
    packet: &Packet,
    receiver: &Endpoint<'_>,
    from: SocketAddr,
    to: SocketAddr,
) {
    sender.send(packet);
    let (Transport::Sctp(sent), kind) = (&packet.transport, chunk_kind(packet)) else {
        unreachable!("the packet is SCTP")
    };
    let seen = receiver.expect(from, to, kind);
    let Transport::Sctp(seen) = &seen.transport else { unreachable!("the packet is SCTP") };
    assert_eq!((seen.checksum, seen.tag, &seen.chunks), (Crc::Right, sent.tag, &sent.chunks), "{packet:?}");
}

fn chunk_kind(packet: &Packet) -> u8 {
    let Transport::Sctp(sctp) = &packet.transport else { unreachable!("the packet is SCTP") };
    sctp.chunks[0]
}

/// Sends fragmented requests and replies, with the fragments in each order of [`ORDERS`]. A packet has either one
/// chunk, which continues in the next fragment, or many chunks, so that a fragment may end between two of them.
#[track_caller]
fn exchange_fragments(world: &World) {
    // All fragments must arrive on one processor, because early fragments are saved per processor.
    stay_on_this_processor();
    in_each_family(world, |family, Association { client_endpoint, pod_endpoint, client, node, pod }| {
        let mut ids = 0x4e60..;
        for chunks in [1, 43] {
            for order in ORDERS {
                let question = bundle(*client, *node, b'?', chunks);
                let id = ids.next().unwrap();
                let send = |wire: &Wire, frames: &[Vec<u8>]| {
                    for index in order {
                        wire.send(&frames[index]).unwrap();
                    }
                };
                assert_fragments_translated(
                    family,
                    (client_endpoint, &question, id, send),
                    (pod_endpoint, [*client, *pod]),
                );
                let answer = bundle(*pod, *client, b'!', chunks);
                assert_fragments_translated(
                    family,
                    (pod_endpoint, &answer, id, send),
                    (client_endpoint, [*node, *client]),
                );
            }
        }
    });
}

/// Returns a packet of about 5000 bytes in this number of chunks.
fn bundle(source: SocketAddr, destination: SocketAddr, content: u8, chunks: usize) -> Packet {
    let mut packet = Packet::sctp(source, destination, DATA, &vec![content; 5000 / chunks]);
    let Transport::Sctp(sctp) = &mut packet.transport else { unreachable!("the packet is SCTP") };
    sctp.chunks = sctp.chunks.repeat(chunks);
    packet
}

/// Sends a packet in fragments at one endpoint and asserts that the other receives the packet between these
/// addresses.
#[track_caller]
fn assert_fragments_translated(
    family: Family,
    (sender, packet, id, send): (&Endpoint<'_>, &Packet, u32, impl Fn(&Wire, &[Vec<u8>])),
    (receiver, addresses): (&Endpoint<'_>, [SocketAddr; 2]),
) {
    let packet = Packet { ethernet: Some(sender.wire.ethernet()), ..packet.clone() };
    send(sender.wire, &pieces(&packet, id, 1400));
    let seen = receive_fragments(receiver.wire, family).unwrap_or_else(|parts| {
        panic!(
            "of packet {id:#x} in {family:?}, the {} received only the fragments at the offsets {parts:?}",
            receiver.name
        )
    });
    let (Transport::Sctp(sent), Transport::Sctp(received)) = (&packet.transport, &seen.transport) else {
        panic!("{seen:?}")
    };
    let received_addresses: [SocketAddr; 2] =
        [(seen.source_ip(), received.source).into(), (seen.destination_ip(), received.destination).into()];
    assert_eq!(
        (received_addresses, received.checksum, received.chunks == sent.chunks),
        (addresses, Crc::Right, true),
        "{id:#x}"
    );
}

/// Waits for all fragments of a packet and reassembles it; on failure, returns the offsets of the fragments that
/// arrived.
fn receive_fragments(wire: &Wire, family: Family) -> Result<Packet, Vec<usize>> {
    let (mut beginning, mut parts, mut end) = (Vec::new(), BTreeMap::new(), None);
    let (start, limit) = (Instant::now(), poll::extended(LIMIT));
    while start.elapsed() < limit {
        let Some(frame) = wire.receive(limit).unwrap() else { break };
        let Some(Fragment { offset, is_last, content }) = parse_fragment(&frame, family) else { continue };
        if offset == 0 {
            beginning = frame[..L3 + header_length(family)].to_vec();
        }
        if is_last {
            end = Some(offset + content.len());
        }
        parts.insert(offset, content);
        let bytes: Vec<u8> = parts.values().flatten().copied().collect();
        if !beginning.is_empty() && end == Some(bytes.len()) {
            return Ok(reassembled(beginning, &bytes, family));
        }
    }
    Err(parts.into_keys().collect())
}

/// A fragment of a packet.
struct Fragment {
    /// Offset in the packet's payload.
    offset: usize,
    is_last: bool,
    content: Vec<u8>,
}

const fn header_length(family: Family) -> usize {
    match family {
        Family::V4 => V4_HEADER,
        Family::V6 => V6_HEADER,
    }
}

/// Parses a fragment without IPv4 options and, in IPv6, with only a fragment header; `None` for an unfragmented packet.
fn parse_fragment(frame: &[u8], family: Family) -> Option<Fragment> {
    let field = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    let payload = L3 + header_length(family);
    let (content, offset, has_more) = match family {
        Family::V4 => (payload, usize::from(field(L3 + 6) & 0x1fff) * 8, field(L3 + 6) & 0x2000 != 0),
        Family::V6 if frame[L3 + 6] != FRAGMENT => return None,
        Family::V6 => (payload + 8, usize::from(field(payload + 2) & 0xfff8), field(payload + 2) & 1 != 0),
    };
    let is_whole = offset == 0 && !has_more;
    (!is_whole).then(|| Fragment { offset, is_last: !has_more, content: frame[content..].to_vec() })
}

/// Returns the reassembled SCTP packet, with the headers of its first fragment.
fn reassembled(mut headers: Vec<u8>, content: &[u8], family: Family) -> Packet {
    let length = u16::try_from(content.len()).unwrap();
    match family {
        Family::V4 => {
            let with_header = length + u16::try_from(V4_HEADER).unwrap();
            headers[L3 + 2..L3 + 4].copy_from_slice(&with_header.to_be_bytes());
            headers[L3 + 6..L3 + 8].fill(0);
        }
        Family::V6 => {
            headers[L3 + 4..L3 + 6].copy_from_slice(&length.to_be_bytes());
            headers[L3 + 6] = Protocol::Sctp.number();
        }
    }
    Packet::parse(&[headers, content.to_vec()].concat()).unwrap()
}

/// Both endpoints of an association of one family, whose packets the test builds.
struct Association<'w> {
    client_endpoint: Endpoint<'w>,
    pod_endpoint: Endpoint<'w>,
    client: SocketAddr,
    node: SocketAddr,
    pod: SocketAddr,
}

impl Association<'_> {
    #[track_caller]
    fn client_sends(&self, kind: u8, content: &[u8]) {
        let packet = Packet::sctp(self.client, self.node, kind, content);
        assert_translated(&self.client_endpoint, &packet, &self.pod_endpoint, self.client, self.pod);
    }

    #[track_caller]
    fn pod_sends(&self, kind: u8, content: &[u8]) {
        let packet = Packet::sctp(self.pod, self.client, kind, content);
        assert_translated(&self.pod_endpoint, &packet, &self.client_endpoint, self.node, self.client);
    }

    #[track_caller]
    fn open(&self) {
        self.client_sends(INIT, &[SCTP_TAG.to_be_bytes().as_slice(), &[1; 12]].concat());
        self.pod_sends(INIT_ACK, &[SCTP_TAG.to_be_bytes().as_slice(), &[2; 36]].concat());
        self.client_sends(COOKIE_ECHO, &[3; 20]);
        self.pod_sends(COOKIE_ACK, &[]);
    }
}

/// A rule that drops SCTP packets at the receiver. Without the rule, a kernel with SCTP would answer the test's packets
/// with an ABORT, because no socket has the association.
const DROP_SCTP_INPUT: &str = "
table inet npl_quiet {
  chain input {
    type filter hook input priority filter;
    meta l4proto sctp drop
  }
}";

/// Opens an association in each family and runs `test` with it.
#[track_caller]
fn in_each_family(world: &World, test: impl Fn(Family, &Association<'_>)) {
    if has_sctp() {
        for netns in [world.client(), &world.pod().netns] {
            netns.nft(DROP_SCTP_INPUT).unwrap();
        }
    }
    // The TCP and UDP requests of `assert_answers` create neighbor entries. Without an entry, a frame would wait for
    // neighbor resolution, and arrive after later frames.
    world.assert_answers();
    for (index, family) in Family::ALL.into_iter().enumerate() {
        let client_wire = wire::open_for(family, &world.topology.client().device, &world.topology.client().uplink);
        let pod_wire = wire::open_for(family, &world.pod().device, &world.pod().host_device);
        let association = Association {
            client_endpoint: Endpoint { wire: &client_wire, name: "client" },
            pod_endpoint: Endpoint { wire: &pod_wire, name: "Pod" },
            client: (world.client_ips()[index], CLIENT_PORT).into(),
            node: world.frontends()[index],
            pod: (world.pod().ips()[index], POD_PORT).into(),
        };
        association.open();
        test(family, &association);
    }
}

/// Exchanges messages of several lengths on an association in each family, and asserts that each is translated with a
/// correct CRC.
#[track_caller]
fn exchange_data(world: &World) {
    in_each_family(world, |_, association| {
        for length in [0, 1, 700, 1300] {
            association.client_sends(DATA, &[&[0; 12], b"who are you? ".as_slice(), &vec![b'?'; length]].concat());
            association.pod_sends(DATA, &[&[0; 12], world.pod().name.as_bytes(), &vec![b'!'; length]].concat());
        }
    });
}

#[test]
fn every_packet_of_an_association_has_a_correct_crc_on_both_sides() {
    let world = world();
    exchange_data(&world);
    load_rules(&world);
    exchange_data(&world);
}

/// In the second exchange, kernel conntrack reassembles the fragments on the Node, and would drop a packet with a wrong
/// CRC.
#[test]
fn fragmented_packet_has_a_correct_crc_on_both_sides() {
    let world = world();
    exchange_fragments(&world);
    load_rules(&world);
    exchange_fragments(&world);
}

/// Tests fragmented SCTP packets with `--forwarding redirect`, in both directions and with the fragments in each order
/// of [`ORDERS`].
#[test]
fn fragmented_packet_has_a_correct_crc_with_redirect() {
    exchange_fragments(&mapped(redirected()));
}

/// A network card that hashes ports to choose a queue may deliver the first fragment, which has ports, to another
/// processor than the other fragments. All fragments must be translated.
#[test]
fn first_fragment_may_arrive_on_another_processor() {
    let world = world();
    in_each_family(&world, |family, Association { client_endpoint, pod_endpoint, client, node, pod }| {
        let send = |wire: &Wire, frames: &[Vec<u8>]| {
            let (first, later) = frames.split_at(1);
            for (processor, frames) in [first, later].into_iter().enumerate() {
                stay_on(processor);
                for frame in frames {
                    wire.send(frame).unwrap();
                }
            }
        };
        for id in 0x4e60..0x4e70 {
            let question = bundle(*client, *node, b'?', 43);
            assert_fragments_translated(
                family,
                (client_endpoint, &question, id, send),
                (pod_endpoint, [*client, *pod]),
            );
            let answer = bundle(*pod, *client, b'!', 43);
            assert_fragments_translated(family, (pod_endpoint, &answer, id, send), (client_endpoint, [*node, *client]));
        }
    });
}

/// A Pod without SCTP answers with an ICMP error that quotes a short packet completely, so the CRC in the quote must be
/// correct.
#[test]
fn icmp_error_of_a_pod_quotes_the_nat_address_with_a_correct_crc() {
    if has_sctp() {
        // A kernel with SCTP answers with an ABORT instead of the ICMP error.
        return;
    }
    let world = world();
    world.assert_answers();
    let wire = wire::open(&world.topology.client().device, &world.topology.client().uplink);
    let endpoint = Endpoint { wire: &wire, name: "client" };
    let init = Packet::sctp((world.client_ip(), CLIENT_PORT).into(), world.frontend(), INIT, &[1; 16]);
    endpoint.send(&init);
    let (from, mut quoted) = endpoint.expect_error();
    assert_eq!(from, world.frontend().ip());
    quoted.ipv4_mut().unwrap().ttl = init.clone().ipv4_mut().unwrap().ttl;
    assert_eq!(quoted, Packet { ethernet: None, ..init });
}

#[test]
fn reserved_sctp_port_cannot_be_reserved_again() {
    let world = World::bare(0, npl_testkit::topology::Options::default());
    let frontend = Frontend { family: Family::V4, node_port: NodePort(NODE_PORT), protocol: Protocol::Sctp };
    let reserved = world.node().run(|| {
        // Ask first whether the kernel has SCTP, because the reservation loads the module.
        let has_sctp = has_sctp();
        let (mut first, mut second) = (Reservations::default(), Reservations::default());
        first.reserve(frontend).unwrap();
        assert!(first.observe().contains(&frontend));
        (has_sctp, second.reserve(frontend))
    });
    match reserved.unwrap() {
        (true, Err(ReserveError::Taken(taken))) => assert_eq!(taken, frontend),
        (false, Ok(())) => {}
        other => panic!("{other:?}"),
    }
}
