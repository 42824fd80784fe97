// SPDX-License-Identifier: Apache-2.0
//! Endpoints, packets and assertions that the packet tests share.

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};

use npl_agent::core::model::{Family, Protocol};
use npl_testkit::packet::sctp_chunks::{INIT, INIT_ACK};
use npl_testkit::packet::tcp_flags::{ACK, SYN};
use npl_testkit::packet::{Ip, Packet, SCTP_TAG, Transport};

use crate::counters::{Change, establishing_request, reply, request};
use crate::lab::{FlowId, Lab, NEXT, Outcome, with_lab};

pub(crate) const CLIENT_PORT: u16 = 43_210;
pub(crate) const NODE_PORT: u16 = 61_000;
/// Another node port that some tests map to the same Pod port.
pub(crate) const SECOND_NODE_PORT: u16 = 61_001;
pub(crate) const POD_PORT: u16 = 8080;
pub(crate) const GENERATION: u32 = 0x1234;

pub(crate) use Protocol::{Sctp, Tcp, Udp};

thread_local! {
    /// The address family of the running test; a test runs in a separate thread for each family.
    static FAMILY: Cell<Family> = const { Cell::new(Family::V4) };
}

/// Runs `test` once for each family, with two node addresses and a Pod port that is mapped for every protocol.
pub(crate) fn with_mappings(test: impl Fn(&mut Lab) + Send + Sync) {
    for family in Family::ALL {
        with_mappings_of(family, &test);
    }
}

/// Does the same as [`with_mappings`], for one family only.
pub(crate) fn with_mappings_of(family: Family, test: impl Fn(&mut Lab) + Send + Sync) {
    with_family(family, |lab| {
        lab.set_addresses(&[node_ip(), second_node_ip()]);
        for protocol in [Tcp, Udp, Sctp] {
            lab.add(protocol, NODE_PORT, pod(), GENERATION);
        }
        test(lab);
    });
}

/// Runs `test` on an empty datapath, with addresses of one family.
pub(crate) fn with_family(family: Family, test: impl FnOnce(&mut Lab) + Send) {
    with_lab(|lab| {
        FAMILY.set(family);
        test(lab);
    });
}

/// The address family of the running test.
pub(crate) fn family() -> Family {
    FAMILY.get()
}

/// Returns the address of the running test's family.
pub(crate) fn ip(v4: &str, v6: &str) -> IpAddr {
    let text = if family() == Family::V4 { v4 } else { v6 };
    text.parse().unwrap()
}

pub(crate) fn node_ip() -> IpAddr {
    ip("192.0.2.10", "2001:db8:0:1::10")
}

pub(crate) fn second_node_ip() -> IpAddr {
    ip("192.0.2.11", "2001:db8:0:1::11")
}

/// Returns an address that the Node gets during a test.
pub(crate) fn third_node_ip() -> IpAddr {
    ip("192.0.2.12", "2001:db8:0:1::12")
}

pub(crate) fn pod_ip() -> IpAddr {
    ip("10.0.0.5", "fd00::a:5")
}

pub(crate) fn other_pod_ip() -> IpAddr {
    ip("10.0.0.6", "fd00::a:6")
}

pub(crate) fn client_ip() -> IpAddr {
    ip("198.51.100.2", "2001:db8:0:2::2")
}

/// Returns the address of a router between the client and the Node.
pub(crate) fn router_ip() -> IpAddr {
    ip("203.0.113.1", "2001:db8:0:9::1")
}

/// Returns an address that no host has.
pub(crate) fn unused_ip() -> IpAddr {
    ip("192.0.2.99", "2001:db8:0:1::99")
}

pub(crate) fn client() -> SocketAddr {
    (client_ip(), CLIENT_PORT).into()
}

pub(crate) fn router() -> SocketAddr {
    (router_ip(), CLIENT_PORT).into()
}

pub(crate) fn node() -> SocketAddr {
    (node_ip(), NODE_PORT).into()
}

pub(crate) fn second_node() -> SocketAddr {
    (second_node_ip(), NODE_PORT).into()
}

pub(crate) fn pod() -> SocketAddr {
    (pod_ip(), POD_PORT).into()
}

/// Length of a TCP segment without options and payload.
pub(crate) fn bare() -> usize {
    length(&tcp(client(), node(), ACK, b""))
}

/// Returns a TCP segment that is addressed to this host's link-layer address.
///
/// The sequence and acknowledgement numbers are those of one connection, in which neither side has sent data yet.
pub(crate) fn tcp(from: SocketAddr, to: SocketAddr, flags: u8, payload: &[u8]) -> Packet {
    let isns =
        if [pod_ip(), other_pod_ip()].contains(&from.ip()) { (POD_ISN, CLIENT_ISN) } else { (CLIENT_ISN, POD_ISN) };
    with_isns(Packet::tcp(from, to, flags, payload).to_this_machine(), isns)
}

/// Sets the segment's sequence and acknowledgement numbers to those of a connection in which neither side has sent data
/// yet. `own` and `other` are the initial sequence numbers of the segment's sender and of the other side.
pub(crate) fn with_isns(mut packet: Packet, (own, other): (u32, u32)) -> Packet {
    if let Transport::Tcp(segment) = &mut packet.transport {
        segment.sequence = if segment.flags & SYN == 0 { own.wrapping_add(1) } else { own };
        segment.acknowledgement = if segment.flags & ACK == 0 { 0 } else { other.wrapping_add(1) };
    }
    packet
}

/// Initial sequence number of the client's connections.
pub(crate) const CLIENT_ISN: u32 = 0x1000_0000;
/// Initial sequence number of the Pod's connections.
pub(crate) const POD_ISN: u32 = 0x2000_0000;

/// Initial sequence numbers of the client and the Pod in a direct connection with the same flow tuple.
pub(crate) const DIRECT_ISNS: (u32, u32) = (0x7000_0000, 0x6000_0000);

/// Returns the Pod's segment of a direct connection with the same flow tuple and other sequence numbers.
pub(crate) fn direct_answer(flags: u8) -> Packet {
    let (client_isn, pod_isn) = DIRECT_ISNS;
    with_isns(tcp(pod(), client(), flags, b""), (pod_isn, client_isn))
}

/// Returns a UDP datagram that is addressed to this host's link-layer address.
pub(crate) fn udp(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Packet {
    Packet::udp(from, to, payload).to_this_machine()
}

/// Returns an SCTP packet that has one chunk and is addressed to this host's link-layer address.
pub(crate) fn sctp(from: SocketAddr, to: SocketAddr, kind: u8, content: &[u8]) -> Packet {
    let mut content = content.to_vec();
    if matches!(kind, INIT | INIT_ACK) {
        content.resize(content.len().max(4), 0);
        content[..4].copy_from_slice(&SCTP_TAG.to_be_bytes());
    }
    Packet::sctp(from, to, kind, &content).to_this_machine()
}

/// Returns the packet with another destination address and port.
pub(crate) fn to(packet: &Packet, destination: SocketAddr) -> Packet {
    let mut packet = packet.clone();
    packet.set_destination(destination);
    packet
}

/// Returns the packet with another source address and port.
pub(crate) fn from(packet: &Packet, source: SocketAddr) -> Packet {
    let mut packet = packet.clone();
    packet.set_source(source);
    packet
}

/// Returns the flow tuple of the client and the Pod.
pub(crate) fn flow(protocol: Protocol) -> FlowId {
    FlowId { client: client(), pod: pod(), protocol }
}

impl Outcome {
    /// Asserts that the packet was passed as `expected` and that exactly these counters increased.
    #[track_caller]
    pub(crate) fn is(self, expected: &Packet, changes: Vec<Change>) {
        assert_eq!(self, Self { action: NEXT, bytes: expected.build(), changes });
    }
}

/// Length of the built packet.
pub(crate) fn length(packet: &Packet) -> usize {
    packet.build().len()
}

/// Opens a TCP connection from the client to the Node and completes the handshake.
pub(crate) fn establish(lab: &mut Lab) {
    lab.ingress(&tcp(client(), node(), SYN, b""));
    lab.egress(&tcp(pod(), client(), SYN | ACK, b""));
    lab.ingress(&tcp(client(), node(), ACK, b""));
    assert!(lab.flow(flow(Tcp)).is_some(), "the client's second packet must establish the flow");
}

/// Asserts that the Pod's TCP segment is translated to come from the node port, and that only the packet and byte
/// counters increase.
#[track_caller]
pub(crate) fn is_reply_translated(lab: &mut Lab, flags: u8) {
    let answer = tcp(pod(), client(), flags, b"");
    lab.egress(&answer).is(&from(&answer, node()), reply("61000/tcp", bare()));
}

/// Asserts that the client's TCP segment is translated to the Pod, and that only the packet and byte counters increase.
#[track_caller]
pub(crate) fn is_request_translated(lab: &mut Lab, flags: u8) {
    let packet = tcp(client(), node(), flags, b"");
    lab.ingress(&packet).is(&to(&packet, pod()), request("61000/tcp", bare()));
}

/// Asserts that the client's acknowledgement is translated and establishes the flow.
#[track_caller]
pub(crate) fn establishes(lab: &mut Lab) {
    let ack = tcp(client(), node(), ACK, b"");
    lab.ingress(&ack).is(&to(&ack, pod()), establishing_request("61000/tcp", bare()));
}

/// Returns alternating TCP and UDP packets with random payloads and header fields.
pub(crate) fn random_packets(from: SocketAddr, to: SocketAddr, count: u32) -> impl Iterator<Item = Packet> {
    // The packets come from a linear congruential generator with a fixed seed, so that every run uses the same packets.
    let mut state = 1_u32;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    (0..count).map(move |number| {
        let payload: Vec<u8> = (0..next() % 1400).map(|_| next().to_be_bytes()[2]).collect();
        let mut packet = if number % 2 == 0 { tcp(from, to, ACK, &payload) } else { udp(from, to, &payload) };
        if let Transport::Tcp(segment) = &mut packet.transport {
            (segment.sequence, segment.acknowledgement) = (next() << 8, next() << 8);
        }
        let [_, _, class, hops] = next().to_be_bytes();
        match &mut packet.ip {
            Ip::V4(header) => (header.tos, header.ttl) = (class, hops),
            Ip::V6(header) => (header.traffic_class, header.hop_limit) = (class, hops),
        }
        packet
    })
}

/// Runs a program on a frame and asserts its output and counter changes.
#[track_caller]
pub(crate) fn becomes(lab: &mut Lab, program: &'static str, frame: &[u8], bytes: Vec<u8>, changes: Vec<Change>) {
    assert_eq!(lab.run(program, frame), Outcome { action: NEXT, bytes, changes }, "{program}");
}
