// SPDX-License-Identifier: Apache-2.0
//! Who talks to whom in the packet tests, and what has to come of it.

use std::net::{Ipv4Addr, SocketAddr};

use npl_agent::core::model::Protocol;
use npl_common::flow::FlowKeyV4;
use npl_testkit::packet::tcp_flags::{ACK, SYN};
use npl_testkit::packet::{Ethernet, Packet, Transport};

use crate::counters::Change;
use crate::lab::{Lab, NEXT, Outcome, with_lab};

pub(crate) const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 10);
pub(crate) const SECOND_NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 11);
pub(crate) const POD: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 5);
pub(crate) const CLIENT: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);

pub(crate) const CLIENT_PORT: u16 = 43_210;
pub(crate) const NODE_PORT: u16 = 61_000;
/// Another node port of the same Pod port.
pub(crate) const SECOND_NODE_PORT: u16 = 61_001;
pub(crate) const POD_PORT: u16 = 8080;
pub(crate) const GENERATION: u32 = 0x1234;

/// The loopback device's: the frame is for this machine.
const TO_THIS_MACHINE: [u8; 6] = [0; 6];

pub(crate) use Protocol::{Tcp, Udp};

/// Both addresses of the Node, and its TCP and UDP mappings of one Pod port.
pub(crate) fn with_mappings(test: impl FnOnce(&mut Lab) + Send) {
    with_lab(|lab| {
        lab.set_addresses(&[NODE, SECOND_NODE]);
        for protocol in [Tcp, Udp] {
            lab.add(protocol, NODE_PORT, "10.0.0.5:8080", GENERATION);
        }
        test(lab);
    });
}

pub(crate) fn client() -> SocketAddr {
    (CLIENT, CLIENT_PORT).into()
}

pub(crate) fn node() -> SocketAddr {
    (NODE, NODE_PORT).into()
}

pub(crate) fn pod() -> SocketAddr {
    (POD, POD_PORT).into()
}

/// A TCP segment that arrives at the Node.
pub(crate) fn tcp(from: SocketAddr, to: SocketAddr, flags: u8, payload: &[u8]) -> Packet {
    for_us(Packet::tcp(from, to, flags, payload))
}

/// A datagram that arrives at the Node.
pub(crate) fn udp(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Packet {
    for_us(Packet::udp(from, to, payload))
}

pub(crate) fn for_us(packet: Packet) -> Packet {
    Packet { ethernet: Some(Ethernet { destination: TO_THIS_MACHINE, ..Ethernet::default() }), ..packet }
}

/// The same packet to another address and port.
pub(crate) fn to(packet: &Packet, destination: SocketAddr) -> Packet {
    let mut packet = packet.clone();
    packet.set_destination(destination);
    packet
}

/// The same packet from another address and port.
pub(crate) fn from(packet: &Packet, source: SocketAddr) -> Packet {
    let mut packet = packet.clone();
    packet.set_source(source);
    packet
}

/// What the flow between the client and the Pod is known by.
pub(crate) fn flow(protocol: Protocol) -> FlowKeyV4 {
    FlowKeyV4 {
        client_addr: CLIENT.octets(),
        pod_addr: POD.octets(),
        client_port: CLIENT_PORT,
        pod_port: POD_PORT,
        protocol: protocol.number().into(),
    }
}

impl Outcome {
    /// The packet went on as `expected`, and exactly these counters went up.
    #[track_caller]
    pub(crate) fn is(self, expected: &Packet, changes: Vec<Change>) {
        assert_eq!(self, Self { action: NEXT, bytes: expected.build(), changes });
    }
}

/// Bytes of the built packet.
pub(crate) fn length(packet: &Packet) -> usize {
    packet.build().len()
}

/// Opens a TCP flow from the client to the Node and completes its exchange.
pub(crate) fn establish(lab: &mut Lab) {
    lab.ingress(&tcp(client(), node(), SYN, b""));
    lab.egress(&tcp(pod(), client(), SYN | ACK, b""));
    lab.ingress(&tcp(client(), node(), ACK, b""));
    assert!(lab.flow(flow(Tcp)).is_some(), "the client's second packet establishes the flow");
}

/// TCP and UDP packets by turns, whose headers and payloads differ in whatever their checksums cover.
pub(crate) fn random_packets(from: SocketAddr, to: SocketAddr, count: u32) -> impl Iterator<Item = Packet> {
    // A linear congruential generator: the same packets in every run.
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
        let ip = packet.ipv4_mut().unwrap();
        [_, _, ip.tos, ip.ttl] = next().to_be_bytes();
        packet
    })
}
