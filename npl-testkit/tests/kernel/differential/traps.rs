// SPDX-License-Identifier: Apache-2.0
//! Packets that provoke the traps of docs/traps.md, listed by the numbers of the traps.

use std::net::{IpAddr, SocketAddr};

use npl_agent::core::model::{Family, Protocol};
use npl_testkit::packet::tcp_flags::{ACK, FIN, PSH, RST, SYN};
use npl_testkit::packet::{Checksum, Icmp, Packet, Transport};

use super::connection::{self, Action, Connection, Ending, Opening, Sender, Step};
use super::exception::Exception;
use super::node_pair::{Endpoint, NARROW, SERVICES, WIDE, backend, node_addresses};
use super::packet_fields::{EXTENSIONS, Fragmentation, OPTIONS, Order, PacketFields};
use super::single_packet::tag;
use crate::oracle::PROTOCOLS;
use crate::prog_run::extensions::{DESTINATION_OPTIONS, FRAGMENT, SIX, extended};
use crate::prog_run::fragments::pieces;

const URG: u8 = 0x20;
const AUTHENTICATION: u8 = 51;
const ROUTING: u8 = 43;
/// Offset of the transport header in a plain IPv4 frame.
const V4_TRANSPORT: usize = 34;

/// A trap's number and title, and the steps that provoke it.
pub(super) type Trap = (&'static str, fn(&Scene) -> Vec<Step>);

/// Every trap that packets alone can provoke. Other tests cover the traps of offloads, of devices and of the agent.
pub(super) const TRAPS: [Trap; 19] = [
    ("P-02, P-03: checksums of all transports in both directions", every_kind_of_packet),
    ("P-05: a UDP checksum of zero, absent or computed", zero_checksums),
    ("P-06: both representations of zero", forms_of_zero),
    ("P-10: a wrong checksum stays wrong", wrong_checksums),
    ("P-11, P-30: an ICMP error with a wrong checksum", wrong_icmp_checksum),
    ("P-19: VLAN tags and priority tags", tags),
    ("P-20: options and extension headers", options),
    ("P-20: extension headers that cannot be translated", untranslatable),
    ("P-28: frames for other hosts and from invalid sources", other_hosts),
    ("P-30: ICMP errors from clients, Pods and routers", errors),
    ("P-30: ICMP errors with short or unrelated quotes", unusual_quotes),
    ("P-31: ICMP errors from the Node", node_errors),
    ("P-32: fragments", fragments),
    ("P-32: reused identifications, with the last fragment first", reused_identifications),
    ("P-32: incomplete and overlapping datagrams", incomplete),
    ("P-44, P-48: unmapped ports, all addresses of the Node", ports_and_addresses),
    ("P-46: one client port and two NAT addresses", tuple_conflict),
    ("P-47, P-55: closed, reset, reopened and half-closed connections", ends_of_connections),
    ("invalid lengths and TCP flags", invalid),
];

/// The setting of a case: the IP family and the client's address.
pub(super) struct Scene {
    pub(super) family: Family,
    pub(super) client: IpAddr,
}

impl Scene {
    fn is_v4(&self) -> bool {
        self.family == Family::V4
    }

    /// Returns an address and port of the client, by number.
    fn client_at(&self, number: u16) -> SocketAddr {
        (self.client, 20_000 + number).into()
    }

    fn node(&self) -> SocketAddr {
        (node_addresses(self.family)[0], SERVICES[0].node_port).into()
    }

    fn pod(&self) -> SocketAddr {
        backend(self.family, &SERVICES[0])
    }

    fn request(&self, number: u16, data: &[u8]) -> Packet {
        Packet::udp(self.client_at(number), self.node(), data)
    }

    fn reply(&self, number: u16, data: &[u8]) -> Packet {
        Packet::udp(self.pod(), self.client_at(number), data)
    }

    fn connection(&self, number: u16, protocol: Protocol, actions: Vec<Action>, ending: Ending) -> Vec<Step> {
        let opening = Opening::Handshake;
        let connection = Connection { family: self.family, protocol, service: 0, address: 0, opening, actions, ending };
        connection::steps(&connection, self.client_at(number))
    }
}

fn client(packet: &Packet) -> Step {
    step(packet, Endpoint::Client, &PacketFields::PLAIN)
}

fn pod(packet: &Packet) -> Step {
    step(packet, Endpoint::Pod(0), &PacketFields::PLAIN)
}

fn step(packet: &Packet, from: Endpoint, fields: &PacketFields) -> Step {
    Step::new(from, fields.frames(packet, from))
}

/// Returns a step with frames that [`Packet`] cannot represent.
fn frames(frames: Vec<Vec<u8>>) -> Step {
    Step::new(Endpoint::Client, frames)
}

fn with_exception(exception: Exception, step: Step) -> Step {
    Step { exception: Some(exception), ..step }
}

fn send(sender: Sender, bytes: u16, fields: PacketFields) -> Action {
    Action::Send { sender, bytes, flags: 0, fields }
}

const BOTH: [Sender; 2] = [Sender::Client, Sender::Pod];
fn every_kind_of_packet(scene: &Scene) -> Vec<Step> {
    let mut actions = Vec::new();
    for bytes in [0, 1, 2, 3, 17, 576, 1400] {
        actions.extend(
            BOTH.map(|sender| send(sender, bytes, PacketFields { class: 0xb9, hops: 17, ..PacketFields::PLAIN })),
        );
    }
    let connections = PROTOCOLS.into_iter().zip(0..);
    connections
        .flat_map(|(protocol, number)| scene.connection(number, protocol, actions.clone(), Ending::Closed(Sender::Pod)))
        .collect()
}

fn zero_checksums(scene: &Scene) -> Vec<Step> {
    let none = PacketFields { checksum: Checksum::Zero, ..PacketFields::PLAIN };
    let mut steps =
        scene.connection(0, Protocol::Udp, BOTH.map(|sender| send(sender, 9, none.clone())).to_vec(), Ending::None);
    // The last two payload bytes are chosen so that the checksum is zero.
    for (mut packet, translated, from) in [
        (scene.request(1, &[0; 4]), Packet::udp(scene.client_at(1), scene.pod(), &[0; 4]), Endpoint::Client),
        (scene.reply(1, &[0; 4]), Packet::udp(scene.node(), scene.client_at(1), &[0; 4]), Endpoint::Pod(0)),
    ] {
        let frame = translated.build();
        let at = frame.len() - 4 - 2;
        let Transport::Udp(udp) = &mut packet.transport else { unreachable!("the packet is UDP") };
        udp.payload[2..].copy_from_slice(&frame[at..at + 2]);
        steps.push(step(&packet, from, &PacketFields::PLAIN));
    }
    steps
}

fn forms_of_zero(scene: &Scene) -> Vec<Step> {
    let values = [0, 1, 0x7fff, 0x8000, 0xfffe, 0xffff];
    let actions = |sender| {
        values.map(|value| send(sender, 5, PacketFields { checksum: Checksum::Wrong(value), ..PacketFields::PLAIN }))
    };
    let actions = BOTH.map(actions).concat();
    let connections = PROTOCOLS.into_iter().zip(0..);
    connections
        .flat_map(|(protocol, number)| scene.connection(number, protocol, actions.clone(), Ending::None))
        .collect()
}

fn wrong_checksums(scene: &Scene) -> Vec<Step> {
    let wrong = PacketFields { checksum: Checksum::Wrong(0x1234), ..PacketFields::PLAIN };
    let actions = BOTH.map(|sender| send(sender, 33, wrong.clone())).to_vec();
    let connections = PROTOCOLS.into_iter().zip(0..);
    let mut steps: Vec<_> = connections
        .flat_map(|(protocol, number)| scene.connection(number, protocol, actions.clone(), Ending::None))
        .collect();
    if scene.is_v4() {
        let mut header = scene.request(9, b"a wrong header");
        header.ipv4_mut().unwrap().checksum = Checksum::Wrong(0x1234);
        steps.push(client(&header));
    }
    steps
}

fn error(scene: &Scene, kind: (u8, u8), from: IpAddr, to: IpAddr, about: &Packet, bytes: usize) -> Packet {
    let mut quote = Packet { ethernet: None, ..about.clone() }.build();
    quote.truncate(if scene.is_v4() { 20 } else { 40 } + bytes);
    let (kind, code) = kind;
    let icmp = Icmp { kind, code, rest: [0, 0, 5, 0], checksum: Checksum::Right, payload: quote };
    Packet::new(from, to, Transport::Icmp(icmp))
}

/// Returns a reply as the client receives it.
fn translated_reply(scene: &Scene, number: u16) -> Packet {
    Packet::udp(scene.node(), scene.client_at(number), b"the reply of the Pod")
}

fn wrong_icmp_checksum(scene: &Scene) -> Vec<Step> {
    let kind = if scene.is_v4() { (3, 4) } else { (2, 0) };
    let about = translated_reply(scene, 0);
    let mut wrong = error(scene, kind, scene.client, scene.node().ip(), &about, 16);
    *wrong.transport.checksum_mut().unwrap() = Checksum::Wrong(0x1234);
    let wrong = with_exception(Exception::WrongIcmpChecksum, frames(vec![framed(&wrong)]));
    let right = error(scene, kind, scene.client, scene.node().ip(), &about, 16);
    vec![client(&scene.request(0, b"hello")), pod(&scene.reply(0, b"hello")), client(&right), wrong]
}

/// Returns the packet's frame, as the client sends it.
fn framed(packet: &Packet) -> Vec<u8> {
    Packet { ethernet: Some(Endpoint::Client.ethernet()), ..packet.clone() }.build()
}

fn tags(scene: &Scene) -> Vec<Step> {
    let sets: [&[u16]; 6] = [&[100], &[100, 200], &[0], &[0x6000], &[0xe000], &[0, 100]];
    let tagged = sets.into_iter().zip(0..).map(|(tags, number)| {
        let mut frame = framed(&scene.request(number, b"in a VLAN"));
        tag(&mut frame, tags);
        frames(vec![frame])
    });
    tagged.collect()
}

fn options(scene: &Scene) -> Vec<Step> {
    let count = if scene.is_v4() { OPTIONS.len() } else { EXTENSIONS.len() };
    let actions =
        |sender| (0..count).map(move |options| send(sender, 40, PacketFields { options, ..PacketFields::PLAIN }));
    let actions: Vec<_> = BOTH.into_iter().flat_map(actions).collect();
    let connections = PROTOCOLS.into_iter().zip(0..);
    connections
        .flat_map(|(protocol, number)| scene.connection(number, protocol, actions.clone(), Ending::None))
        .collect()
}

fn untranslatable(scene: &Scene) -> Vec<Step> {
    if scene.is_v4() {
        return Vec::new();
    }
    let segments_left = [&[2, 1, 0, 0, 0, 0][..], &[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]].concat();
    let chains: [&[(u8, &[u8])]; 3] =
        [&[(AUTHENTICATION, &[0; 14])], &[(ROUTING, &segments_left)], &[(DESTINATION_OPTIONS, SIX); 7]];
    let steps = chains.into_iter().zip(0..).map(|(chain, number)| {
        let mut packet = scene.request(number, b"behind it");
        packet.ethernet = Some(Endpoint::Client.ethernet());
        with_exception(Exception::Untranslatable, frames(vec![extended(&packet, chain)]))
    });
    steps.collect()
}

fn other_hosts(scene: &Scene) -> Vec<Step> {
    let to = |number, address: [u8; 6]| {
        let mut frame = framed(&scene.request(number, b"other host"));
        frame[..6].copy_from_slice(&address);
        frames(vec![frame])
    };
    let invalid_sources = if scene.is_v4() {
        ["0.0.0.0", "127.0.0.1", "224.0.0.1", "192.0.2.10"]
    } else {
        ["::", "::1", "ff02::1", "::"]
    };
    let from =
        |ip: &str| client(&Packet::udp((ip.parse::<IpAddr>().unwrap(), 5000).into(), scene.node(), b"bad source"));
    let trailer = PacketFields { trailer: 22, ..PacketFields::PLAIN };
    let mut steps = invalid_sources.map(from).to_vec();
    steps.extend([
        to(0, [2, 0, 0, 0, 0, 9]),
        to(1, [0xff; 6]),
        to(2, [1, 0, 0x5e, 0, 0, 1]),
        step(&scene.request(3, b""), Endpoint::Client, &trailer),
        step(&scene.reply(3, b""), Endpoint::Pod(0), &trailer),
    ]);
    steps
}

fn errors(scene: &Scene) -> Vec<Step> {
    let mut actions = Vec::new();
    for (kind, is_router) in (0..connection::ERRORS).flat_map(|kind| [(kind, false), (kind, true)]) {
        for quoted in [8, 12, 20, 28, 1000] {
            for sender in BOTH {
                actions.push(send(sender, 600, PacketFields { identification: quoted, ..PacketFields::PLAIN }));
                actions.push(Action::SendError { sender, kind, quoted, is_router, fields: PacketFields::PLAIN });
            }
        }
    }
    let connections = PROTOCOLS.into_iter().zip(0..);
    connections
        .flat_map(|(protocol, number)| scene.connection(number, protocol, actions.clone(), Ending::None))
        .collect()
}

fn unusual_quotes(scene: &Scene) -> Vec<Step> {
    let kind = if scene.is_v4() { (3, 1) } else { (1, 0) };
    let to_node = |about: &Packet, bytes| error(scene, kind, scene.client, scene.node().ip(), about, bytes);
    let mut steps = vec![client(&scene.request(0, b"hello")), pod(&scene.reply(0, b"hello"))];
    let about = translated_reply(scene, 0);
    steps.extend([0, 3].map(|bytes| client(&to_node(&about, bytes))));
    steps.extend([4, 7].map(|bytes| with_exception(Exception::ShortQuote, client(&to_node(&about, bytes)))));
    let elsewhere =
        Packet::udp((node_addresses(scene.family)[1], 61_000).into(), scene.client_at(0), b"of another address");
    let echo = Icmp { kind: 0, code: 0, rest: [0; 4], checksum: Checksum::Right, payload: vec![1; 8] };
    let echo = Packet::new(scene.node().ip(), scene.client, Transport::Icmp(echo));
    let unmapped = Packet::udp((scene.node().ip(), 61_003).into(), scene.client_at(0), b"of another port");
    steps.extend([elsewhere, echo, unmapped].map(|about| client(&to_node(&about, 16))));
    if scene.is_v4() {
        steps.push(client(&error(scene, (5, 1), scene.client, scene.node().ip(), &about, 8)));
    }
    let actions: Vec<_> = BOTH
        .into_iter()
        .flat_map(|sender| {
            let short_quotes = [17, 18, 19].map(|quoted| Action::SendError {
                sender,
                kind: 0,
                quoted,
                is_router: false,
                fields: PacketFields::PLAIN,
            });
            [
                vec![send(Sender::Pod, 9, PacketFields::PLAIN), send(Sender::Client, 9, PacketFields::PLAIN)],
                short_quotes.to_vec(),
            ]
            .concat()
        })
        .collect();
    steps.extend(scene.connection(1, Protocol::Tcp, actions, Ending::None));
    // The quoted reply belongs to no flow, because no client has sent from the reply's destination port.
    steps.push(client(&to_node(&translated_reply(scene, 2), 16)));
    steps
}

fn node_errors(scene: &Scene) -> Vec<Step> {
    let last = PacketFields { hops: 1, ..PacketFields::PLAIN };
    let mut steps = vec![step(&scene.request(0, b"the last hop"), Endpoint::Client, &last)];
    // SCTP is left out, because its quoted CRCs differ: see `Exception::QuotedCrc`.
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let number = 1 + u16::from(protocol == Protocol::Udp);
        steps.extend(scene.connection(
            number,
            protocol,
            BOTH.map(|sender| send(sender, 50, last.clone())).to_vec(),
            Ending::None,
        ));
        for (service, sender, bytes) in [(NARROW, Sender::Client, 1360), (WIDE, Sender::Pod, 1500)] {
            let large = [true, false]
                .map(|dont_fragment| send(sender, bytes, PacketFields { dont_fragment, ..PacketFields::PLAIN }));
            let opening = Opening::Handshake;
            let (family, actions) = (scene.family, large.to_vec());
            let connection =
                Connection { family, protocol, service, address: 1, opening, actions, ending: Ending::None };
            steps.extend(connection::steps(&connection, scene.client_at(number + 10)));
        }
    }
    steps
}

fn fragments(scene: &Scene) -> Vec<Step> {
    let size = 1232;
    let mut actions = Vec::new();
    for (order, number) in
        [Order::Ascending, Order::Descending, Order::FirstLast, Order::LastFirst].into_iter().zip(1..)
    {
        let fragmentation = PacketFields {
            fragmentation: Some(Fragmentation { size, order }),
            identification: number,
            ..PacketFields::PLAIN
        };
        actions.push(send(Sender::Client, 4000, fragmentation.clone()));
        actions.push(send(Sender::Pod, 4000, fragmentation));
    }
    let mut steps: Vec<_> = PROTOCOLS
        .into_iter()
        .zip(0..)
        .flat_map(|(protocol, number)| scene.connection(number, protocol, actions.clone(), Ending::None))
        .collect();
    // The fragments of two datagrams are interleaved.
    let both = [5_u16, 6].map(|number| {
        let mut packet = scene.request(number, &[7; 4000]);
        packet.ethernet = Some(Endpoint::Client.ethernet());
        pieces(&packet, number.into(), size.into())
    });
    steps.extend(both[0].iter().zip(&both[1]).flat_map(|(a, b)| [a, b]).map(|frame| frames(vec![frame.clone()])));
    as_one_step(&mut steps)
}

/// Pairs of datagrams with the same identification. The last fragment of the second datagram, which is sent first,
/// matches the fragment tracking record of the first datagram, so NPL translates this fragment immediately and saves no
/// copy. Because of the number of datagrams, some records share a slot: the records of two datagrams, or the records
/// that two hooks write for one datagram.
fn reused_identifications(scene: &Scene) -> Vec<Step> {
    let actions = (1..=200).flat_map(|number| {
        [Order::Ascending, Order::Descending].map(|order| {
            let fields = PacketFields {
                fragmentation: Some(Fragmentation { size: 88, order }),
                identification: number,
                ..PacketFields::PLAIN
            };
            send(Sender::Pod, 160, fields)
        })
    });
    scene.connection(0, Protocol::Sctp, actions.collect(), Ending::None)
}

/// Merges trailing steps of one fragment each into one step, because the kernel forwards a datagram when its last
/// fragment arrives.
fn as_one_step(steps: &mut Vec<Step>) -> Vec<Step> {
    let start = steps.iter().rposition(|step| step.frames.len() > 1).map_or(0, |at| at + 1);
    let singles = steps.split_off(start);
    steps.push(frames(singles.into_iter().flat_map(|step| step.frames).collect()));
    std::mem::take(steps)
}

fn incomplete(scene: &Scene) -> Vec<Step> {
    let fragmentation = |number: u16, size: usize| {
        let mut packet = scene.request(number, &[9; 4000]);
        packet.ethernet = Some(Endpoint::Client.ethernet());
        pieces(&packet, u32::from(number), size)
    };
    let mut incomplete = fragmentation(0, 1232);
    incomplete.pop();
    let mut steps = vec![with_exception(Exception::NotWhole, frames(incomplete))];
    if !scene.is_v4() {
        let mut packet = scene.request(2, b"whole");
        packet.ethernet = Some(Endpoint::Client.ethernet());
        let lone = extended(&packet, &[(FRAGMENT, &[0, 0, 0, 0, 0, 9])]);
        steps.push(with_exception(Exception::LoneFragment, frames(vec![lone])));
        let mut packet = scene.request(1, &[9; 1232]);
        packet.ethernet = Some(Endpoint::Client.ethernet());
        steps.push(with_exception(Exception::LoneFragment, frames(pieces(&packet, 1, 1232))));
    }
    // The inserted fragment is the second fragment of `other`, a different fragmentation of the same datagram, and
    // overlaps two fragments of the first fragmentation.
    let (mut overlapping, other) = (fragmentation(3, 1232), fragmentation(3, 1400));
    overlapping.insert(1, other[1].clone());
    steps.push(with_exception(Exception::NotWhole, frames(overlapping)));
    steps
}

fn ports_and_addresses(scene: &Scene) -> Vec<Step> {
    let mut steps = Vec::new();
    let [first, second] = node_addresses(scene.family);
    for (number, port) in (0..).zip([60_999, 61_000, 61_003, 61_050, 61_100, 61_101, 8080, 0, 65_535]) {
        for (address, number) in [(first, number), (second, number + 100)] {
            let to = (address, port).into();
            steps.push(client(&Packet::udp(scene.client_at(number), to, b"hello?")));
            steps.push(client(&Packet::tcp(scene.client_at(number), to, SYN, b"")));
        }
    }
    steps.push(client(&Packet::udp(scene.client_at(300), scene.pod(), b"direct")));
    steps.push(pod(&Packet::udp(scene.pod(), scene.client_at(300), b"reply")));
    steps.push(pod(&Packet::udp(scene.pod(), scene.client_at(301), b"unsolicited")));
    let other: SocketAddr = (scene.pod().ip(), 4444).into();
    steps.push(pod(&Packet::tcp(other, scene.client_at(302), SYN, b"")));
    steps
}

fn tuple_conflict(scene: &Scene) -> Vec<Step> {
    let mut steps = scene.connection(
        0,
        Protocol::Udp,
        BOTH.map(|sender| send(sender, 8, PacketFields::PLAIN)).to_vec(),
        Ending::None,
    );
    let second = (node_addresses(scene.family)[1], scene.node().port()).into();
    steps.push(with_exception(
        Exception::TupleConflict,
        client(&Packet::udp(scene.client_at(0), second, b"second address")),
    ));
    let actions = BOTH.map(|sender| send(sender, 8, PacketFields::PLAIN)).to_vec();
    let mut connection = scene.connection(1, Protocol::Tcp, actions, Ending::Closed(Sender::Client));
    // This SYN through the other NAT address is sent after the handshake, so that only its own result differs between
    // the Nodes.
    let syn = client(&Packet::tcp(scene.client_at(1), second, SYN, b""));
    connection.insert(3, with_exception(Exception::TupleConflict, syn));
    steps.extend(connection);
    steps
}

fn ends_of_connections(scene: &Scene) -> Vec<Step> {
    let mut steps = Vec::new();
    let endings = BOTH.map(|sender| [Ending::Closed(sender), Ending::Reset(sender), Ending::Reopened(sender)]).concat();
    for (ending, number) in endings.into_iter().zip(0..) {
        let actions = BOTH.map(|sender| send(sender, 12, PacketFields::PLAIN)).to_vec();
        steps.extend(scene.connection(number, Protocol::Tcp, actions, ending));
    }
    // A half-closed connection: the client has closed its direction, and the Pod continues to send.
    let half = Action::Send { sender: Sender::Client, bytes: 0, flags: FIN, fields: PacketFields::PLAIN };
    let actions = [half, send(Sender::Pod, 100, PacketFields::PLAIN), send(Sender::Pod, 100, PacketFields::PLAIN)];
    steps.extend(scene.connection(20, Protocol::Tcp, actions.to_vec(), Ending::None));
    // A UDP flow in which the Pod replies several times to one request.
    steps.push(client(&scene.request(21, b"one question")));
    steps.extend((0..20_u8).map(|number| pod(&scene.reply(21, &[number; 3]))));
    steps
}

fn invalid(scene: &Scene) -> Vec<Step> {
    let mut steps = Vec::new();
    // Packets without flags, with invalid combinations, with all flags, and with FIN or RST of a connection that never
    // started.
    let flags = [0, SYN | FIN, SYN | RST, FIN | PSH | URG, 0x3f, FIN, RST, RST | ACK, FIN | ACK, SYN | ACK];
    for (flags, number) in flags.into_iter().zip(0..) {
        steps.push(with_exception(
            Exception::NotTracked,
            client(&Packet::tcp(scene.client_at(number), scene.node(), flags, b"")),
        ));
    }
    let transport = V4_TRANSPORT + if scene.is_v4() { 0 } else { 20 };
    let mut corrupted = |packet: Packet, at: usize, byte: u8| {
        let mut frame = framed(&packet);
        frame[transport + at] = byte;
        steps.push(with_exception(Exception::NotTracked, frames(vec![frame])));
    };
    for (doff, number) in [(0x00, 20), (0x40, 21), (0xf0, 22)] {
        corrupted(Packet::tcp(scene.client_at(number), scene.node(), SYN, b"some data"), 12, doff);
    }
    for (length, number) in [(0, 30), (7, 31), (200, 32)] {
        corrupted(scene.request(number, b"a datagram"), 5, length);
    }
    steps
}
