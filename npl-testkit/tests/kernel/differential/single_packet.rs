// SPDX-License-Identifier: Apache-2.0
//! Single packets that belong to no connection: packets to ports without a mapping, packets for another host, and
//! corrupt packets.

use std::net::{IpAddr, SocketAddr};

use npl_agent::core::model::{Family, Protocol};
use npl_testkit::packet::tcp_flags::{ACK, PSH, RST, SYN};
use npl_testkit::packet::{Checksum, Icmp, Packet, Transport, ones_complement_sum};

use super::connection::Step;
use super::exception::Exception;
use super::node_pair::{Endpoint, SERVICES, backend, node_addresses, pod_ip};
use super::packet_fields::PacketFields;
use crate::prog_run::fragments::{L3, V4_HEADER, V6_HEADER};
use crate::world::{NODE_PORT, POD_PORT};

/// A single packet.
#[derive(Clone, Debug)]
pub(super) struct SinglePacket {
    pub(super) family: Family,
    pub(super) protocol: Protocol,
    pub(super) kind: Kind,
    pub(super) fields: PacketFields,
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    /// A packet to a node address and a port without a mapping.
    Unmapped { port: u16, flags: u8 },
    /// A packet from the client to the Pod's own address.
    Direct { flags: u8 },
    /// A packet from a mapped port of a Pod, to a client that has sent no packet.
    Unsolicited { flags: u8 },
    /// A packet with a transport protocol other than TCP, UDP and SCTP, to the Node or to a Pod.
    Foreign { protocol_number: u8, to_pod: bool, bytes: u8 },
    /// An ICMP echo request to the Node, which replies.
    Echo { bytes: u8 },
    /// A packet to a mapped port, with one or more VLAN tags.
    Tagged { tags: Vec<u16> },
    /// A packet to a mapped port, in a frame whose link-layer destination is another host or broadcast.
    OtherDestination { to_all: bool },
    /// A packet to a mapped port, in which one header byte has a random value. With `is_summed`, the IP header checksum
    /// is corrected afterwards.
    Corrupted { position: u8, value: u8, is_summed: bool },
}

impl SinglePacket {
    /// Returns the packet as a step, from a client at this address and port.
    pub(super) fn step(&self, client: SocketAddr) -> Step {
        let node = node_addresses(self.family)[0];
        let mapped: SocketAddr = (node, NODE_PORT).into();
        let pod = backend(self.family, &SERVICES[0]);
        let (from, packet) = match &self.kind {
            Kind::Unmapped { port, flags } => (Endpoint::Client, self.packet(client, (node, *port).into(), *flags)),
            Kind::Direct { flags } => (Endpoint::Client, self.packet(client, pod, *flags)),
            Kind::Unsolicited { flags } => (Endpoint::Pod(0), self.packet(pod, client, *flags)),
            Kind::Foreign { protocol_number, to_pod, bytes } => {
                let to = if *to_pod { pod_ip(self.family, 0) } else { node };
                let bytes = (0..*bytes).collect();
                (Endpoint::Client, Packet::new(client.ip(), to, Transport::Raw { protocol: *protocol_number, bytes }))
            }
            Kind::Echo { bytes } => (Endpoint::Client, self.echo(client.ip(), node, *bytes)),
            Kind::Tagged { .. } | Kind::OtherDestination { .. } | Kind::Corrupted { .. } => {
                (Endpoint::Client, self.packet(client, mapped, SYN))
            }
        };
        // Each corrupted packet has its own identification, because the corruption may turn the packet into a fragment,
        // which must not match the fragments of another packet.
        let identification =
            if matches!(self.kind, Kind::Corrupted { .. }) { client.port() } else { self.fields.identification };
        let mut frames = PacketFields { identification, ..self.fields.clone() }.frames(&packet, from);
        let mut exception = None;
        match &self.kind {
            Kind::Tagged { tags } => tag(&mut frames[0], tags),
            Kind::OtherDestination { to_all } => {
                frames[0][..6].copy_from_slice(if *to_all { &[0xff; 6] } else { UNUSED_ADDRESS });
            }
            Kind::Corrupted { position, value, is_summed } => {
                corrupt(&mut frames[0], *position, *value, *is_summed);
                exception = (!is_tracked(&frames[0])).then_some(Exception::Broken);
            }
            Kind::Unmapped { .. }
            | Kind::Direct { .. }
            | Kind::Unsolicited { .. }
            | Kind::Foreign { .. }
            | Kind::Echo { .. } => {}
        }
        Step { exception, ..Step::new(from, frames) }
    }

    fn packet(&self, source: SocketAddr, destination: SocketAddr, flags: u8) -> Packet {
        if self.protocol == Protocol::Tcp {
            Packet::tcp(source, destination, flags, b"")
        } else {
            Packet::udp(source, destination, b"single")
        }
    }

    fn echo(&self, from: IpAddr, to: IpAddr, bytes: u8) -> Packet {
        let kind = if self.family == Family::V4 { 8 } else { 128 };
        let payload = (0..bytes).collect();
        Packet::new(
            from,
            to,
            Transport::Icmp(Icmp { kind, code: 0, rest: [1, 2, 3, 4], checksum: Checksum::Right, payload }),
        )
    }
}

/// A link-layer address that no device has.
const UNUSED_ADDRESS: &[u8] = &[2, 0, 0, 0, 0x4e, 0x77];

/// TCP flags of the first packet of a connection. With `SYN`, `ACK` or `ACK | PSH`, kernel conntrack creates an entry
/// for the connection; a packet with `ACK` may be from the middle of a stream. With `SYN | ACK` or `RST`, kernel
/// conntrack creates no entry.
pub(super) const FLAGS: [u8; 5] = [SYN, ACK, ACK | PSH, SYN | ACK, RST];

/// Adds VLAN tags to a frame, the outermost first.
pub(super) fn tag(frame: &mut Vec<u8>, tags: &[u16]) {
    let bytes: Vec<u8> = tags.iter().flat_map(|it| [0x81, 0x00, it.to_be_bytes()[0], it.to_be_bytes()[1]]).collect();
    frame.splice(12..12, bytes);
}

/// Changes one header byte other than those of the addresses, because a changed address would be a different test.
fn corrupt(frame: &mut [u8], position: u8, value: u8, is_summed: bool) {
    let is_v4 = frame[12] == 0x08;
    let (before, header) = if is_v4 { (12, V4_HEADER) } else { (8, V6_HEADER) };
    let positions = before + frame.len().min(L3 + header + 20) - L3 - header;
    let position = usize::from(position) % positions;
    let position = L3 + if position < before { position } else { position - before + header };
    // If the random type is that of an extension header, the parser would read payload as a header. In this case, the
    // type "no next header" is used instead.
    let is_extension = !is_v4 && position == L3 + 6 && matches!(value, 0 | 43 | 44 | 51 | 60);
    frame[position] = if is_extension { 59 } else { value };
    if is_v4 && is_summed {
        let length = usize::from(frame[L3] & 0xf) * 4;
        frame[L3 + 10..L3 + 12].fill(0);
        let sum = !ones_complement_sum(&frame[L3..frame.len().min(L3 + length)]);
        frame[L3 + 10..L3 + 12].copy_from_slice(&sum.to_be_bytes());
    }
}

/// Whether kernel conntrack accepts a frame as the start of a connection, judged by its headers.
fn is_tracked(frame: &[u8]) -> bool {
    let ip = &frame[L3..];
    let (protocol, header, total) = if frame[12] == 0x08 {
        if (u16::from_be_bytes([ip[6], ip[7]]) & 0x3fff) != 0 {
            return false;
        }
        (ip[9], usize::from(ip[0] & 0xf) * 4, usize::from(u16::from_be_bytes([ip[2], ip[3]])))
    } else {
        (ip[6], V6_HEADER, V6_HEADER + usize::from(u16::from_be_bytes([ip[4], ip[5]])))
    };
    let transport = ip.get(header..total.min(ip.len())).unwrap_or_default();
    match protocol {
        6 => {
            transport.len() >= 20
                && starts_connection(transport[13])
                && (20..=transport.len()).contains(&(usize::from(transport[12] >> 4) * 4))
        }
        17 => {
            transport.len() >= 8
                && (8..=transport.len()).contains(&usize::from(u16::from_be_bytes([transport[4], transport[5]])))
        }
        // If the corruption has changed the protocol to SCTP, the payload contains no valid SCTP chunks.
        132 => false,
        _ => true,
    }
}

/// Whether conntrack accepts these flags as the start of a connection; `PSH`, `ECE` and `CWR` do not matter.
fn starts_connection(flags: u8) -> bool {
    const URG: u8 = 0x20;
    matches!(flags & 0x37, SYN | ACK) || matches!(flags & 0x37, flags if flags == SYN | URG || flags == ACK | URG)
}

/// Ports of the Node without a mapping, inside and outside of the range.
pub(super) const UNMAPPED: [u16; 6] = [NODE_PORT + 3, NODE_PORT + 100, NODE_PORT - 1, NODE_PORT + 101, POD_PORT, 0];
