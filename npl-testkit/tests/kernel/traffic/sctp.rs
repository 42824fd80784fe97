// SPDX-License-Identifier: Apache-2.0
//! SCTP through a mapping: by the kernel's own sockets where it has them, and by packets made by hand everywhere, whose
//! checksums an implementation checks that shares nothing with the programs'.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use npl_agent::core::model::{Family, Frontend, NodePort, Protocol};
use npl_agent::sockets::{Reservations, ReserveError};
use npl_testkit::echo::{self, EchoServer};
use npl_testkit::packet::sctp_chunks::{COOKIE_ACK, COOKIE_ECHO, DATA, INIT, INIT_ACK};
use npl_testkit::packet::{Crc, Packet, SCTP_TAG, Transport};
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
/// Far longer than a packet needs; nobody waits for it unless one is lost.
const LIMIT: Duration = Duration::from_secs(5);

/// The first Pod's port is mapped for SCTP as well.
fn world() -> World {
    mapped(World::new(1))
}

fn mapped(mut world: World) -> World {
    for pod_ip in world.pod().ips() {
        let (frontend, backend) = mapping(Protocol::Sctp, NODE_PORT, (pod_ip, POD_PORT).into(), 1);
        world.datapath().upsert_mapping(frontend, backend).unwrap();
    }
    world
}

/// Whole associations, some of whose messages take several packets.
#[track_caller]
fn associate(world: &World) {
    for (frontend, client_ip) in world.frontends().into_iter().zip(world.client_ips()) {
        for question in ["who are you?".to_owned(), "?".repeat(20_000)] {
            let answer = traffic::request(world.client(), echo::Protocol::Sctp, frontend, &question).unwrap();
            assert_eq!((answer.pod.as_str(), answer.client.ip()), ("web-0", client_ip));
            assert_eq!((answer.protocol, answer.received), (echo::Protocol::Sctp, question.len() as u64 + 1));
        }
    }
}

/// By devices that sum packets up for the kernel, by the kernel itself, and past connection tracking, which checks.
#[test]
fn associations_lead_to_the_pod_and_show_it_the_clients_address() {
    let world = world();
    if !has_sctp() {
        // The other test asserts the same of every packet of an association.
        return converse(&world);
    }
    let _server = EchoServer::start_sctp_in(&world.pod().netns, "web-0", POD_PORT).unwrap();
    associate(&world);
    for device in [&world.topology.client().device, &world.pod().device] {
        device.set_offloads(&Offload::ALL, false).unwrap();
    }
    associate(&world);
    load_rules(&world);
    associate(&world);
}

/// A sender that has made chunks for a wider path has them cut, since their numbers are given out.
#[test]
fn associations_go_on_where_a_link_is_narrower_than_the_senders_think() {
    let world = world();
    if !has_sctp() {
        return pass_in_pieces(&world);
    }
    let _server = EchoServer::start_sctp_in(&world.pod().netns, "web-0", POD_PORT).unwrap();
    for device in [&world.pod().device, &world.pod().host_device] {
        device.set_mtu(1300).unwrap();
    }
    // Milliseconds. A sender that is told of the link while it sends waits for its timer all the same.
    for end in [world.client(), &world.pod().netns] {
        for setting in ["rto_initial", "rto_min"] {
            end.sysctl(&format!("net/sctp/{setting}"), "100").unwrap();
        }
    }
    associate(&world);
    load_rules(&world);
    associate(&world);
}

/// One side of a conversation by hand.
struct Side<'w> {
    wire: &'w Wire,
    name: &'static str,
}

impl Side<'_> {
    fn send(&self, packet: &Packet) {
        let mut packet = packet.clone();
        packet.ethernet = Some(self.wire.ethernet());
        self.wire.send(&packet.build()).unwrap();
    }

    /// Waits for an SCTP packet between these two.
    #[track_caller]
    fn expect(&self, from: SocketAddr, to: SocketAddr, kind: u8) -> Packet {
        let start = Instant::now();
        while start.elapsed() < LIMIT {
            let Some(frame) = self.wire.receive(LIMIT).unwrap() else { break };
            let Ok(packet) = Packet::parse(&frame) else { continue };
            let Transport::Sctp(sctp) = &packet.transport else { continue };
            let ends: [SocketAddr; 2] =
                [(packet.source_ip(), sctp.source).into(), (packet.destination_ip(), sctp.destination).into()];
            if ends == [from, to] && sctp.chunks.first() == Some(&kind) {
                return packet;
            }
        }
        panic!("no packet from {from} to {to} with chunk {kind} came to the {}", self.name);
    }

    /// Waits for an ICMP error about an SCTP packet, and gives both.
    fn expect_error(&self) -> (IpAddr, Packet) {
        let start = Instant::now();
        while start.elapsed() < LIMIT {
            let Some(frame) = self.wire.receive(LIMIT).unwrap() else { break };
            let Ok(packet) = Packet::parse(&frame) else { continue };
            let Transport::Icmp(icmp) = &packet.transport else { continue };
            let Ok(quoted) = Packet::parse_ip(&icmp.payload) else { continue };
            if matches!(quoted.transport, Transport::Sctp(_)) {
                return (packet.source_ip(), quoted);
            }
        }
        panic!("no error came to the {}", self.name);
    }
}

/// Sends by one side, and has the other get the same with another end and the right checksum.
#[track_caller]
fn passes(by: &Side<'_>, packet: &Packet, at: &Side<'_>, from: SocketAddr, to: SocketAddr) {
    by.send(packet);
    let (Transport::Sctp(sent), kind) = (&packet.transport, chunk_kind(packet)) else { unreachable!("SCTP was sent") };
    let seen = at.expect(from, to, kind);
    let Transport::Sctp(seen) = &seen.transport else { unreachable!("SCTP was waited for") };
    assert_eq!((seen.checksum, seen.tag, &seen.chunks), (Crc::Right, sent.tag, &sent.chunks), "{packet:?}");
}

fn chunk_kind(packet: &Packet) -> u8 {
    let Transport::Sctp(sctp) = &packet.transport else { unreachable!("SCTP was sent") };
    sctp.chunks[0]
}

/// A question of four fragments in every order, and its answer: of one chunk, which its sender cuts, and of many, which a router
/// cuts anywhere.
#[track_caller]
fn pass_in_pieces(world: &World) {
    // What came early waits where it came.
    stay_on_this_processor();
    in_each_family(world, |family, Association { client_side, pod_side, client, node, pod }| {
        let mut ids = 0x4e60..;
        for chunks in [1, 43] {
            for order in ORDERS {
                let question = bundle(*client, *node, b'?', chunks);
                let id = ids.next().unwrap();
                let send = |wire: &Wire, frames: &[Vec<u8>]| {
                    for place in order {
                        wire.send(&frames[place]).unwrap();
                    }
                };
                passes_in_pieces(family, (client_side, &question, id, send), (pod_side, [*client, *pod]));
                let answer = bundle(*pod, *client, b'!', chunks);
                passes_in_pieces(family, (pod_side, &answer, id, send), (client_side, [*node, *client]));
            }
        }
    });
}

/// A packet of 5000 bytes and some, in so many chunks.
fn bundle(source: SocketAddr, destination: SocketAddr, content: u8, chunks: usize) -> Packet {
    let mut packet = Packet::sctp(source, destination, DATA, &vec![content; 5000 / chunks]);
    let Transport::Sctp(sctp) = &mut packet.transport else { unreachable!("SCTP was asked for") };
    sctp.chunks = sctp.chunks.repeat(chunks);
    packet
}

/// Sends a packet by one side in pieces, and has the other get the same between these ends.
#[track_caller]
fn passes_in_pieces(
    family: Family,
    (by, packet, id, send): (&Side<'_>, &Packet, u32, impl Fn(&Wire, &[Vec<u8>])),
    (at, ends): (&Side<'_>, [SocketAddr; 2]),
) {
    let packet = Packet { ethernet: Some(by.wire.ethernet()), ..packet.clone() };
    send(by.wire, &pieces(&packet, id, 1400));
    let seen = receive_pieces(at.wire, family)
        .unwrap_or_else(|parts| panic!("of {id:#x} in {family:?}, the {} got no more than {parts:?}", at.name));
    let (Transport::Sctp(sent), Transport::Sctp(got)) = (&packet.transport, &seen.transport) else {
        panic!("{seen:?}")
    };
    let got_ends: [SocketAddr; 2] =
        [(seen.source_ip(), got.source).into(), (seen.destination_ip(), got.destination).into()];
    assert_eq!((got_ends, got.checksum, got.chunks == sent.chunks), (ends, Crc::Right, true), "{id:#x}");
}

/// Waits for a packet in pieces, and puts it together; or where those pieces begin that came.
fn receive_pieces(wire: &Wire, family: Family) -> Result<Packet, Vec<usize>> {
    let (mut beginning, mut parts, mut end) = (Vec::new(), BTreeMap::new(), None);
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        let Some(frame) = wire.receive(LIMIT).unwrap() else { break };
        let Some(Piece { offset, is_last, content }) = piece(&frame, family) else { continue };
        if offset == 0 {
            beginning = frame[..L3 + header_length(family)].to_vec();
        }
        if is_last {
            end = Some(offset + content.len());
        }
        parts.insert(offset, content);
        let bytes: Vec<u8> = parts.values().flatten().copied().collect();
        if !beginning.is_empty() && end == Some(bytes.len()) {
            return Ok(whole(beginning, &bytes, family));
        }
    }
    Err(parts.into_keys().collect())
}

/// A piece of a packet.
struct Piece {
    /// Bytes ahead of it.
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

/// Reads a piece without options, or in IPv6 with a fragment header alone. Nothing of a whole packet.
fn piece(frame: &[u8], family: Family) -> Option<Piece> {
    let word = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    let behind = L3 + header_length(family);
    let (content, offset, has_more) = match family {
        Family::V4 => (behind, usize::from(word(L3 + 6) & 0x1fff) * 8, word(L3 + 6) & 0x2000 != 0),
        Family::V6 if frame[L3 + 6] != FRAGMENT => return None,
        Family::V6 => (behind + 8, usize::from(word(behind + 2) & 0xfff8), word(behind + 2) & 1 != 0),
    };
    let is_whole = offset == 0 && !has_more;
    (!is_whole).then(|| Piece { offset, is_last: !has_more, content: frame[content..].to_vec() })
}

/// A packet of SCTP, by the headers of its first piece.
fn whole(mut headers: Vec<u8>, content: &[u8], family: Family) -> Packet {
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

/// The two ends of an association of one family, by hand.
struct Association<'w> {
    client_side: Side<'w>,
    pod_side: Side<'w>,
    client: SocketAddr,
    node: SocketAddr,
    pod: SocketAddr,
}

impl Association<'_> {
    #[track_caller]
    fn asks(&self, kind: u8, content: &[u8]) {
        let packet = Packet::sctp(self.client, self.node, kind, content);
        passes(&self.client_side, &packet, &self.pod_side, self.client, self.pod);
    }

    #[track_caller]
    fn answers(&self, kind: u8, content: &[u8]) {
        let packet = Packet::sctp(self.pod, self.client, kind, content);
        passes(&self.pod_side, &packet, &self.client_side, self.node, self.client);
    }

    #[track_caller]
    fn open(&self) {
        self.asks(INIT, &[SCTP_TAG.to_be_bytes().as_slice(), &[1; 12]].concat());
        self.answers(INIT_ACK, &[SCTP_TAG.to_be_bytes().as_slice(), &[2; 36]].concat());
        self.asks(COOKIE_ECHO, &[3; 20]);
        self.answers(COOKIE_ACK, &[]);
    }
}

/// Kernels that know SCTP break off what none of their sockets knows, and nobody opens that any more.
const NO_SOCKETS_ARE_ASKED: &str = "
table inet npl_quiet {
  chain input {
    type filter hook input priority filter;
    meta l4proto sctp drop
  }
}";

/// An association in each family, once it is open.
#[track_caller]
fn in_each_family(world: &World, test: impl Fn(Family, &Association<'_>)) {
    if has_sctp() {
        for netns in [world.client(), &world.pod().netns] {
            netns.nft(NO_SOCKETS_ARE_ASKED).unwrap();
        }
    }
    // Neighbours must be known: a frame that waits for one would come later than those after it.
    world.assert_answers();
    for (index, family) in Family::ALL.into_iter().enumerate() {
        let client_wire = wire::open_for(family, &world.topology.client().device, &world.topology.client().uplink);
        let pod_wire = wire::open_for(family, &world.pod().device, &world.pod().host_device);
        let association = Association {
            client_side: Side { wire: &client_wire, name: "client" },
            pod_side: Side { wire: &pod_wire, name: "Pod" },
            client: (world.client_ips()[index], CLIENT_PORT).into(),
            node: world.frontends()[index],
            pod: (world.pod().ips()[index], POD_PORT).into(),
        };
        association.open();
        test(family, &association);
    }
}

/// A whole conversation in each family, in which the Pod says its name.
#[track_caller]
fn converse(world: &World) {
    in_each_family(world, |_, association| {
        for length in [0, 1, 700, 1300] {
            association.asks(DATA, &[&[0; 12], b"who are you? ".as_slice(), &vec![b'?'; length]].concat());
            association.answers(DATA, &[&[0; 12], world.pod().name.as_bytes(), &vec![b'!'; length]].concat());
        }
    });
}

#[test]
fn every_packet_of_an_association_has_the_right_checksum_on_both_sides() {
    let world = world();
    converse(&world);
    load_rules(&world);
    converse(&world);
}

/// Connection tracking puts them together, and finds the checksum right that ours have made, or else drops it.
#[test]
fn packet_in_pieces_has_the_right_checksum_on_both_sides() {
    let world = world();
    pass_in_pieces(&world);
    load_rules(&world);
    pass_in_pieces(&world);
}

/// Also past the host's stack.
#[test]
fn packet_in_pieces_has_the_right_checksum_where_it_is_redirected() {
    pass_in_pieces(&mapped(redirected()));
}

/// As a network card has it that hashes ports where there are any.
#[test]
fn first_piece_may_come_by_another_processor() {
    let world = world();
    in_each_family(&world, |family, Association { client_side, pod_side, client, node, pod }| {
        let send = |wire: &Wire, frames: &[Vec<u8>]| {
            let (first, rest) = frames.split_at(1);
            for (processor, frames) in [first, rest].into_iter().enumerate() {
                stay_on(processor);
                for frame in frames {
                    wire.send(frame).unwrap();
                }
            }
        };
        for id in 0x4e60..0x4e70 {
            let question = bundle(*client, *node, b'?', 43);
            passes_in_pieces(family, (client_side, &question, id, send), (pod_side, [*client, *pod]));
            let answer = bundle(*pod, *client, b'!', 43);
            passes_in_pieces(family, (pod_side, &answer, id, send), (client_side, [*node, *client]));
        }
    });
}

/// What a Pod without SCTP sends is an error that quotes all of a short packet.
#[test]
fn error_of_a_pod_names_what_the_client_asked_with_the_right_checksum() {
    if has_sctp() {
        // Such a kernel answers by SCTP.
        return;
    }
    let world = world();
    world.assert_answers();
    let wire = wire::open(&world.topology.client().device, &world.topology.client().uplink);
    let side = Side { wire: &wire, name: "client" };
    let init = Packet::sctp((world.client_ip(), CLIENT_PORT).into(), world.frontend(), INIT, &[1; 16]);
    side.send(&init);
    let (from, mut quoted) = side.expect_error();
    assert_eq!(from, world.frontend().ip());
    quoted.ipv4_mut().unwrap().ttl = init.clone().ipv4_mut().unwrap().ttl;
    assert_eq!(quoted, Packet { ethernet: None, ..init });
}

#[test]
fn reserved_sctp_port_is_nobody_elses() {
    let world = World::bare(0, npl_testkit::topology::Options::default());
    let frontend = Frontend { family: Family::V4, node_port: NodePort(NODE_PORT), protocol: Protocol::Sctp };
    let reserved = world.node().run(|| {
        // From here on the kernel knows SCTP, if it ever will.
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
