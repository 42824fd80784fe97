// SPDX-License-Identifier: Apache-2.0
//! What others have stumbled over, by the numbers of the list of traps in the datapath's design.

use std::net::{IpAddr, SocketAddr};

use npl_agent::core::model::{Family, Protocol};
use npl_testkit::packet::tcp_flags::{ACK, FIN, PSH, RST, SYN};
use npl_testkit::packet::{Checksum, Icmp, Packet, Transport};

use super::dress::{Cut, Dress, EXTENSIONS, OPTIONS, Order};
use super::exception::Exception;
use super::stray::tag;
use super::talk::{self, Ending, Line, Opening, Speaker, Step, Talk};
use super::twin::{End, NARROW, SERVICES, WIDE, node_addresses, pod_end};
use crate::oracle::PROTOCOLS;
use crate::prog_run::extensions::{DESTINATION_OPTIONS, FRAGMENT, SIX, extended};
use crate::prog_run::fragments::pieces;

const URG: u8 = 0x20;
const AUTHENTICATION: u8 = 51;
const ROUTING: u8 = 43;
/// Where the transport header is in a plain frame of IPv4.
const V4_TRANSPORT: usize = 34;

/// A trap by its number, and what is sent for it.
pub(super) type Trap = (&'static str, fn(&Scene) -> Vec<Step>);

/// Each that packets can be caught in. What it takes offloads, devices or the agent for has tests elsewhere.
pub(super) const TRAPS: [Trap; 19] = [
    ("P-02, P-03: checksums of both transports, both ends", every_kind_of_packet),
    ("P-05: a UDP checksum of none, or that comes out as none", zero_checksums),
    ("P-06: both forms of zero", forms_of_zero),
    ("P-10: what is wrong stays as wrong", wrong_checksums),
    ("P-11, P-30: an error whose own checksum is wrong", wrong_error),
    ("P-19: VLANs, and tags of none", tags),
    ("P-20: options and extension headers", options),
    ("P-20: what no translation can be right for", untranslatable),
    ("P-28: frames for others, and from nobody", for_others),
    ("P-30: errors of both sides", errors),
    ("P-30: quotes that are short, or of something else", odd_quotes),
    ("P-31: errors of the Node itself", errors_of_the_node),
    ("P-32: fragments", fragments),
    ("P-32: numbers that come again, the last fragment first", numbers_again),
    ("P-32: datagrams that are not whole", not_whole),
    ("P-44, P-48: ports of nobody, addresses of the Node", ports_and_addresses),
    ("P-46: one client port, two ways", collision),
    ("P-47, P-55: ends, second beginnings, and a Pod that talks on", ends_of_flows),
    ("lengths and flags that cannot be", broken),
];

/// A client of one family.
pub(super) struct Scene {
    pub(super) family: Family,
    pub(super) client: IpAddr,
}

impl Scene {
    fn is_v4(&self) -> bool {
        self.family == Family::V4
    }

    /// One of the client's ends.
    fn end(&self, number: u16) -> SocketAddr {
        (self.client, 20_000 + number).into()
    }

    fn node(&self) -> SocketAddr {
        (node_addresses(self.family)[0], SERVICES[0].node_port).into()
    }

    fn pod(&self) -> SocketAddr {
        pod_end(self.family, &SERVICES[0])
    }

    fn ask(&self, number: u16, data: &[u8]) -> Packet {
        Packet::udp(self.end(number), self.node(), data)
    }

    fn answer(&self, number: u16, data: &[u8]) -> Packet {
        Packet::udp(self.pod(), self.end(number), data)
    }

    fn talk(&self, number: u16, protocol: Protocol, lines: Vec<Line>, ending: Ending) -> Vec<Step> {
        let opening = Opening::Handshake;
        let talk = Talk { family: self.family, protocol, service: 0, address: 0, opening, lines, ending };
        talk::steps(&talk, self.end(number))
    }
}

fn client(packet: &Packet) -> Step {
    step(packet, End::Client, &Dress::PLAIN)
}

fn pod(packet: &Packet) -> Step {
    step(packet, End::Pod(0), &Dress::PLAIN)
}

fn step(packet: &Packet, from: End, dress: &Dress) -> Step {
    Step::new(from, dress.frames(packet, from))
}

/// A frame that no packet can be made into.
fn frames(frames: Vec<Vec<u8>>) -> Step {
    Step::new(End::Client, frames)
}

fn but(exception: Exception, step: Step) -> Step {
    Step { exception: Some(exception), ..step }
}

fn say(by: Speaker, bytes: u16, dress: Dress) -> Line {
    Line::Say { by, bytes, flags: 0, dress }
}

const BOTH: [Speaker; 2] = [Speaker::Client, Speaker::Pod];
fn every_kind_of_packet(scene: &Scene) -> Vec<Step> {
    let mut lines = Vec::new();
    for bytes in [0, 1, 2, 3, 17, 576, 1400] {
        lines.extend(BOTH.map(|by| say(by, bytes, Dress { class: 0xb9, hops: 17, ..Dress::PLAIN })));
    }
    let talks = PROTOCOLS.into_iter().zip(0..);
    talks
        .flat_map(|(protocol, number)| scene.talk(number, protocol, lines.clone(), Ending::Closed(Speaker::Pod)))
        .collect()
}

fn zero_checksums(scene: &Scene) -> Vec<Step> {
    let none = Dress { checksum: Checksum::Zero, ..Dress::PLAIN };
    let mut steps = scene.talk(0, Protocol::Udp, BOTH.map(|by| say(by, 9, none.clone())).to_vec(), Ending::None);
    // The last word makes up for the others' sum.
    for (mut packet, translated, from) in [
        (scene.ask(1, &[0; 4]), Packet::udp(scene.end(1), scene.pod(), &[0; 4]), End::Client),
        (scene.answer(1, &[0; 4]), Packet::udp(scene.node(), scene.end(1), &[0; 4]), End::Pod(0)),
    ] {
        let frame = translated.build();
        let at = frame.len() - 4 - 2;
        let Transport::Udp(udp) = &mut packet.transport else { unreachable!("it was made as one") };
        udp.payload[2..].copy_from_slice(&frame[at..at + 2]);
        steps.push(step(&packet, from, &Dress::PLAIN));
    }
    steps
}

fn forms_of_zero(scene: &Scene) -> Vec<Step> {
    let values = [0, 1, 0x7fff, 0x8000, 0xfffe, 0xffff];
    let lines = |by| values.map(|value| say(by, 5, Dress { checksum: Checksum::Wrong(value), ..Dress::PLAIN }));
    let lines = BOTH.map(lines).concat();
    let talks = PROTOCOLS.into_iter().zip(0..);
    talks.flat_map(|(protocol, number)| scene.talk(number, protocol, lines.clone(), Ending::None)).collect()
}

fn wrong_checksums(scene: &Scene) -> Vec<Step> {
    let wrong = Dress { checksum: Checksum::Wrong(0x1234), ..Dress::PLAIN };
    let lines = BOTH.map(|by| say(by, 33, wrong.clone())).to_vec();
    let talks = PROTOCOLS.into_iter().zip(0..);
    let mut steps: Vec<_> =
        talks.flat_map(|(protocol, number)| scene.talk(number, protocol, lines.clone(), Ending::None)).collect();
    if scene.is_v4() {
        let mut header = scene.ask(9, b"a wrong header");
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

/// A reply as the client knows it.
fn known_answer(scene: &Scene, number: u16) -> Packet {
    Packet::udp(scene.node(), scene.end(number), b"what the Pod has answered")
}

fn wrong_error(scene: &Scene) -> Vec<Step> {
    let kind = if scene.is_v4() { (3, 4) } else { (2, 0) };
    let about = known_answer(scene, 0);
    let mut wrong = error(scene, kind, scene.client, scene.node().ip(), &about, 16);
    *wrong.transport.checksum_mut().unwrap() = Checksum::Wrong(0x1234);
    let wrong = but(Exception::WrongIcmpChecksum, frames(vec![framed(&wrong)]));
    let right = error(scene, kind, scene.client, scene.node().ip(), &about, 16);
    vec![client(&scene.ask(0, b"hello")), pod(&scene.answer(0, b"hello")), client(&right), wrong]
}

/// As it is, from the client.
fn framed(packet: &Packet) -> Vec<u8> {
    Packet { ethernet: Some(End::Client.ethernet()), ..packet.clone() }.build()
}

fn tags(scene: &Scene) -> Vec<Step> {
    let sets: [&[u16]; 6] = [&[100], &[100, 200], &[0], &[0x6000], &[0xe000], &[0, 100]];
    let tagged = sets.into_iter().zip(0..).map(|(tags, number)| {
        let mut frame = framed(&scene.ask(number, b"in a VLAN?"));
        tag(&mut frame, tags);
        frames(vec![frame])
    });
    tagged.collect()
}

fn options(scene: &Scene) -> Vec<Step> {
    let count = if scene.is_v4() { OPTIONS.len() } else { EXTENSIONS.len() };
    let lines = |by| (0..count).map(move |options| say(by, 40, Dress { options, ..Dress::PLAIN }));
    let lines: Vec<_> = BOTH.into_iter().flat_map(lines).collect();
    let talks = PROTOCOLS.into_iter().zip(0..);
    talks.flat_map(|(protocol, number)| scene.talk(number, protocol, lines.clone(), Ending::None)).collect()
}

fn untranslatable(scene: &Scene) -> Vec<Step> {
    if scene.is_v4() {
        return Vec::new();
    }
    let going_on = [&[2, 1, 0, 0, 0, 0][..], &[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]].concat();
    let chains: [&[(u8, &[u8])]; 3] =
        [&[(AUTHENTICATION, &[0; 14])], &[(ROUTING, &going_on)], &[(DESTINATION_OPTIONS, SIX); 7]];
    let odd = chains.into_iter().zip(0..).map(|(chain, number)| {
        let mut packet = scene.ask(number, b"behind it");
        packet.ethernet = Some(End::Client.ethernet());
        but(Exception::Untranslatable, frames(vec![extended(&packet, chain)]))
    });
    odd.collect()
}

fn for_others(scene: &Scene) -> Vec<Step> {
    let to = |number, address: [u8; 6]| {
        let mut frame = framed(&scene.ask(number, b"for whom?"));
        frame[..6].copy_from_slice(&address);
        frames(vec![frame])
    };
    let nobody = if scene.is_v4() {
        ["0.0.0.0", "127.0.0.1", "224.0.0.1", "192.0.2.10"]
    } else {
        ["::", "::1", "ff02::1", "::"]
    };
    let from = |ip: &str| client(&Packet::udp((ip.parse::<IpAddr>().unwrap(), 5000).into(), scene.node(), b"by whom?"));
    let trailer = Dress { trailer: 22, ..Dress::PLAIN };
    let mut steps = nobody.map(from).to_vec();
    steps.extend([
        to(0, [2, 0, 0, 0, 0, 9]),
        to(1, [0xff; 6]),
        to(2, [1, 0, 0x5e, 0, 0, 1]),
        step(&scene.ask(3, b""), End::Client, &trailer),
        step(&scene.answer(3, b""), End::Pod(0), &trailer),
    ]);
    steps
}

fn errors(scene: &Scene) -> Vec<Step> {
    let mut lines = Vec::new();
    for (kind, is_router) in (0..talk::ERRORS).flat_map(|kind| [(kind, false), (kind, true)]) {
        for quoted in [8, 12, 20, 28, 1000] {
            for by in BOTH {
                lines.push(say(by, 600, Dress { number: quoted, ..Dress::PLAIN }));
                lines.push(Line::Complain { by, kind, quoted, is_router, dress: Dress::PLAIN });
            }
        }
    }
    let talks = PROTOCOLS.into_iter().zip(0..);
    talks.flat_map(|(protocol, number)| scene.talk(number, protocol, lines.clone(), Ending::None)).collect()
}

fn odd_quotes(scene: &Scene) -> Vec<Step> {
    let kind = if scene.is_v4() { (3, 1) } else { (1, 0) };
    let to_node = |about: &Packet, bytes| error(scene, kind, scene.client, scene.node().ip(), about, bytes);
    let mut steps = vec![client(&scene.ask(0, b"hello")), pod(&scene.answer(0, b"hello"))];
    let about = known_answer(scene, 0);
    steps.extend([0, 3].map(|bytes| client(&to_node(&about, bytes))));
    steps.extend([4, 7].map(|bytes| but(Exception::ShortQuote, client(&to_node(&about, bytes)))));
    let elsewhere = Packet::udp((node_addresses(scene.family)[1], 61_000).into(), scene.end(0), b"of another address");
    let echo = Icmp { kind: 0, code: 0, rest: [0; 4], checksum: Checksum::Right, payload: vec![1; 8] };
    let echo = Packet::new(scene.node().ip(), scene.client, Transport::Icmp(echo));
    let unmapped = Packet::udp((scene.node().ip(), 61_003).into(), scene.end(0), b"of another port");
    steps.extend([elsewhere, echo, unmapped].map(|about| client(&to_node(&about, 16))));
    if scene.is_v4() {
        steps.push(client(&error(scene, (5, 1), scene.client, scene.node().ip(), &about, 8)));
    }
    let lines: Vec<_> = BOTH
        .into_iter()
        .flat_map(|by| {
            let odd = [17, 18, 19].map(|quoted| Line::Complain {
                by,
                kind: 0,
                quoted,
                is_router: false,
                dress: Dress::PLAIN,
            });
            [vec![say(Speaker::Pod, 9, Dress::PLAIN), say(Speaker::Client, 9, Dress::PLAIN)], odd.to_vec()].concat()
        })
        .collect();
    steps.extend(scene.talk(1, Protocol::Tcp, lines, Ending::None));
    // Nobody has asked by this port.
    steps.push(but(Exception::NotTracked, client(&to_node(&known_answer(scene, 2), 16))));
    steps
}

fn errors_of_the_node(scene: &Scene) -> Vec<Step> {
    let last = Dress { hops: 1, ..Dress::PLAIN };
    let mut steps = vec![step(&scene.ask(0, b"the last hop"), End::Client, &last)];
    // Of SCTP, see `Exception::QuotedCrc`.
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let number = 1 + u16::from(protocol == Protocol::Udp);
        steps.extend(scene.talk(number, protocol, BOTH.map(|by| say(by, 50, last.clone())).to_vec(), Ending::None));
        for (service, by, bytes) in [(NARROW, Speaker::Client, 1360), (WIDE, Speaker::Pod, 1500)] {
            let large = [true, false].map(|dont_fragment| say(by, bytes, Dress { dont_fragment, ..Dress::PLAIN }));
            let opening = Opening::Handshake;
            let (family, lines) = (scene.family, large.to_vec());
            let talk = Talk { family, protocol, service, address: 1, opening, lines, ending: Ending::None };
            steps.extend(talk::steps(&talk, scene.end(number + 10)));
        }
    }
    steps
}

fn fragments(scene: &Scene) -> Vec<Step> {
    let size = 1232;
    let mut lines = Vec::new();
    for (order, number) in [Order::Sent, Order::Reversed, Order::FirstLast, Order::LastFirst].into_iter().zip(1..) {
        let cut = Dress { cut: Some(Cut { size, order }), number, ..Dress::PLAIN };
        lines.push(say(Speaker::Client, 4000, cut.clone()));
        lines.push(say(Speaker::Pod, 4000, cut));
    }
    let mut steps: Vec<_> = PROTOCOLS
        .into_iter()
        .zip(0..)
        .flat_map(|(protocol, number)| scene.talk(number, protocol, lines.clone(), Ending::None))
        .collect();
    // Two datagrams at once.
    let both = [5_u16, 6].map(|number| {
        let mut packet = scene.ask(number, &[7; 4000]);
        packet.ethernet = Some(End::Client.ethernet());
        pieces(&packet, number.into(), size.into())
    });
    steps.extend(both[0].iter().zip(&both[1]).flat_map(|(a, b)| [a, b]).map(|frame| frames(vec![frame.clone()])));
    delivered_at_once(&mut steps)
}

/// The last fragment is led by the record of the datagram before, and does not wait for the first one. So many that what is
/// noted of two of them, or of one at two hooks, is bound to meet.
fn numbers_again(scene: &Scene) -> Vec<Step> {
    let lines = (1..=200).flat_map(|number| {
        [Order::Sent, Order::Reversed].map(|order| {
            let dress = Dress { cut: Some(Cut { size: 88, order }), number, ..Dress::PLAIN };
            say(Speaker::Pod, 160, dress)
        })
    });
    scene.talk(0, Protocol::Sctp, lines.collect(), Ending::None)
}

/// The kernel hands on a datagram with its last fragment; so steps of one fragment each are one step.
fn delivered_at_once(steps: &mut Vec<Step>) -> Vec<Step> {
    let first = steps.iter().rposition(|step| step.frames.len() > 1).map_or(0, |at| at + 1);
    let singles = steps.split_off(first);
    steps.push(frames(singles.into_iter().flat_map(|step| step.frames).collect()));
    std::mem::take(steps)
}

fn not_whole(scene: &Scene) -> Vec<Step> {
    let cut = |number: u16, size: usize| {
        let mut packet = scene.ask(number, &[9; 4000]);
        packet.ethernet = Some(End::Client.ethernet());
        pieces(&packet, u32::from(number), size)
    };
    let mut incomplete = cut(0, 1232);
    incomplete.pop();
    let mut steps = vec![but(Exception::NotWhole, frames(incomplete))];
    if !scene.is_v4() {
        let mut packet = scene.ask(2, b"whole");
        packet.ethernet = Some(End::Client.ethernet());
        let lone = extended(&packet, &[(FRAGMENT, &[0, 0, 0, 0, 0, 9])]);
        steps.push(but(Exception::LoneFragment, frames(vec![lone])));
        let mut packet = scene.ask(1, &[9; 1232]);
        packet.ethernet = Some(End::Client.ethernet());
        steps.push(but(Exception::LoneFragment, frames(pieces(&packet, 1, 1232))));
    }
    // The second piece of another cut of the same datagram lies over two of this one.
    let (mut overlapping, other) = (cut(3, 1232), cut(3, 1400));
    overlapping.insert(1, other[1].clone());
    steps.push(but(Exception::NotWhole, frames(overlapping)));
    steps
}

fn ports_and_addresses(scene: &Scene) -> Vec<Step> {
    let mut steps = Vec::new();
    let [first, second] = node_addresses(scene.family);
    for (number, port) in (0..).zip([60_999, 61_000, 61_003, 61_050, 61_100, 61_101, 8080, 0, 65_535]) {
        for (address, number) in [(first, number), (second, number + 100)] {
            let to = (address, port).into();
            steps.push(client(&Packet::udp(scene.end(number), to, b"anybody there?")));
            steps.push(client(&Packet::tcp(scene.end(number), to, SYN, b"")));
        }
    }
    steps.push(client(&Packet::udp(scene.end(300), scene.pod(), b"past the mapping")));
    steps.push(pod(&Packet::udp(scene.pod(), scene.end(300), b"and back")));
    steps.push(pod(&Packet::udp(scene.pod(), scene.end(301), b"nobody has asked")));
    let other: SocketAddr = (scene.pod().ip(), 4444).into();
    steps.push(pod(&Packet::tcp(other, scene.end(302), SYN, b"")));
    steps
}

fn collision(scene: &Scene) -> Vec<Step> {
    let mut steps = scene.talk(0, Protocol::Udp, BOTH.map(|by| say(by, 8, Dress::PLAIN)).to_vec(), Ending::None);
    let second = (node_addresses(scene.family)[1], scene.node().port()).into();
    steps.push(but(Exception::TupleConflict, client(&Packet::udp(scene.end(0), second, b"the other way"))));
    steps
}

fn ends_of_flows(scene: &Scene) -> Vec<Step> {
    let mut steps = Vec::new();
    let endings = BOTH.map(|by| [Ending::Closed(by), Ending::Reset(by), Ending::Reopened(by)]).concat();
    for (ending, number) in endings.into_iter().zip(0..) {
        let lines = BOTH.map(|by| say(by, 12, Dress::PLAIN)).to_vec();
        steps.extend(scene.talk(number, Protocol::Tcp, lines, ending));
    }
    // Half-closed by the client, and the Pod sends on.
    let half = Line::Say { by: Speaker::Client, bytes: 0, flags: FIN, dress: Dress::PLAIN };
    let rest = [half, say(Speaker::Pod, 100, Dress::PLAIN), say(Speaker::Pod, 100, Dress::PLAIN)];
    steps.extend(scene.talk(20, Protocol::Tcp, rest.to_vec(), Ending::None));
    // Answers without another question.
    steps.push(client(&scene.ask(21, b"one question")));
    steps.extend((0..20_u8).map(|number| pod(&scene.answer(21, &[number; 3]))));
    steps
}

fn broken(scene: &Scene) -> Vec<Step> {
    let mut steps = Vec::new();
    // No flags, impossible ones, all, and ends of what never began.
    let flags = [0, SYN | FIN, SYN | RST, FIN | PSH | URG, 0x3f, FIN, RST, RST | ACK, FIN | ACK, SYN | ACK];
    for (flags, number) in flags.into_iter().zip(0..) {
        steps.push(but(Exception::NotTracked, client(&Packet::tcp(scene.end(number), scene.node(), flags, b""))));
    }
    let transport = V4_TRANSPORT + if scene.is_v4() { 0 } else { 20 };
    let mut bent = |packet: Packet, at: usize, byte: u8| {
        let mut frame = framed(&packet);
        frame[transport + at] = byte;
        steps.push(but(Exception::NotTracked, frames(vec![frame])));
    };
    for (doff, number) in [(0x00, 20), (0x40, 21), (0xf0, 22)] {
        bent(Packet::tcp(scene.end(number), scene.node(), SYN, b"some data"), 12, doff);
    }
    for (length, number) in [(0, 30), (7, 31), (200, 32)] {
        bent(scene.ask(number, b"a datagram"), 5, length);
    }
    steps
}
