// SPDX-License-Identifier: Apache-2.0
//! Packets that belong to no conversation: not ours, for somebody else, or broken.

use std::net::{IpAddr, SocketAddr};

use npl_agent::core::model::{Family, Protocol};
use npl_testkit::packet::tcp_flags::{ACK, PSH, RST, SYN};
use npl_testkit::packet::{Checksum, Icmp, Packet, Transport, ones_complement_sum};

use super::dress::Dress;
use super::exception::Exception;
use super::talk::Step;
use super::twin::{End, SERVICES, node_addresses, pod_end, pod_ip};
use crate::prog_run::fragments::{L3, V4_HEADER, V6_HEADER};
use crate::world::{NODE_PORT, POD_PORT};

/// One packet.
#[derive(Clone, Debug)]
pub(super) struct Stray {
    pub(super) family: Family,
    pub(super) protocol: Protocol,
    pub(super) kind: Kind,
    pub(super) dress: Dress,
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    /// To a port of the Node that nobody mapped.
    Unmapped { port: u16, flags: u8 },
    /// From the client to the Pod itself.
    Direct { flags: u8 },
    /// From a mapped port of a Pod, to somebody who has not asked.
    Unasked { flags: u8 },
    /// Of another transport, to the Node or to a Pod.
    Foreign { number: u8, to_pod: bool, bytes: u8 },
    /// To the Node, which answers.
    Echo { bytes: u8 },
    /// To a mapped port, in a VLAN or several.
    Tagged { tags: Vec<u16> },
    /// To a mapped port, in a frame for another machine or for all.
    Misdirected { to_all: bool },
    /// To a mapped port, with one byte that says something else. The header's checksum may be right again.
    Bent { place: u8, value: u8, is_summed: bool },
}

impl Stray {
    /// What a client at this address and port has to do with it.
    pub(super) fn step(&self, client: SocketAddr) -> Step {
        let node = node_addresses(self.family)[0];
        let mapped: SocketAddr = (node, NODE_PORT).into();
        let pod = pod_end(self.family, &SERVICES[0]);
        let (from, packet) = match &self.kind {
            Kind::Unmapped { port, flags } => (End::Client, self.packet(client, (node, *port).into(), *flags)),
            Kind::Direct { flags } => (End::Client, self.packet(client, pod, *flags)),
            Kind::Unasked { flags } => (End::Pod(0), self.packet(pod, client, *flags)),
            Kind::Foreign { number, to_pod, bytes } => {
                let to = if *to_pod { pod_ip(self.family, 0) } else { node };
                let bytes = (0..*bytes).collect();
                (End::Client, Packet::new(client.ip(), to, Transport::Raw { protocol: *number, bytes }))
            }
            Kind::Echo { bytes } => (End::Client, self.echo(client.ip(), node, *bytes)),
            Kind::Tagged { .. } | Kind::Misdirected { .. } | Kind::Bent { .. } => {
                (End::Client, self.packet(client, mapped, SYN))
            }
        };
        // A fragment of its own, should it be bent into one.
        let number = if matches!(self.kind, Kind::Bent { .. }) { client.port() } else { self.dress.number };
        let mut frames = Dress { number, ..self.dress.clone() }.frames(&packet, from);
        let mut exception = None;
        match &self.kind {
            Kind::Tagged { tags } => tag(&mut frames[0], tags),
            Kind::Misdirected { to_all } => frames[0][..6].copy_from_slice(if *to_all { &[0xff; 6] } else { OTHER }),
            Kind::Bent { place, value, is_summed } => {
                bend(&mut frames[0], *place, *value, *is_summed);
                exception = (!is_tracked(&frames[0])).then_some(Exception::Broken);
            }
            Kind::Unmapped { .. }
            | Kind::Direct { .. }
            | Kind::Unasked { .. }
            | Kind::Foreign { .. }
            | Kind::Echo { .. } => {}
        }
        Step { exception, ..Step::new(from, frames) }
    }

    fn packet(&self, source: SocketAddr, destination: SocketAddr, flags: u8) -> Packet {
        if self.protocol == Protocol::Tcp {
            Packet::tcp(source, destination, flags, b"")
        } else {
            Packet::udp(source, destination, b"stray")
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

/// A device that nobody here has.
const OTHER: &[u8] = &[2, 0, 0, 0, 0x4e, 0x77];

/// Flags that a connection may begin with, also where nobody saw its beginning, and some that it may not.
pub(super) const FLAGS: [u8; 5] = [SYN, ACK, ACK | PSH, SYN | ACK, RST];

/// Puts a frame into VLANs, the first of them outermost.
pub(super) fn tag(frame: &mut Vec<u8>, tags: &[u16]) {
    let bytes: Vec<u8> = tags.iter().flat_map(|it| [0x81, 0x00, it.to_be_bytes()[0], it.to_be_bytes()[1]]).collect();
    frame.splice(12..12, bytes);
}

/// Changes one byte of the headers, but none of the addresses, which could be anybody's.
fn bend(frame: &mut [u8], place: u8, value: u8, is_summed: bool) {
    let is_v4 = frame[12] == 0x08;
    let (before, header) = if is_v4 { (12, V4_HEADER) } else { (8, V6_HEADER) };
    let places = before + frame.len().min(L3 + header + 20) - L3 - header;
    let place = usize::from(place) % places;
    let place = L3 + if place < before { place } else { place - before + header };
    // An extension header that is none leads anywhere.
    let is_extension = !is_v4 && place == L3 + 6 && matches!(value, 0 | 43 | 44 | 51 | 60);
    frame[place] = if is_extension { 59 } else { value };
    if is_v4 && is_summed {
        let length = usize::from(frame[L3] & 0xf) * 4;
        frame[L3 + 10..L3 + 12].fill(0);
        let sum = !ones_complement_sum(&frame[L3..frame.len().min(L3 + length)]);
        frame[L3 + 10..L3 + 12].copy_from_slice(&sum.to_be_bytes());
    }
}

/// Whether connection tracking takes a frame for the first one of a connection, as far as its headers tell.
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
                && opens(transport[13])
                && (20..=transport.len()).contains(&(usize::from(transport[12] >> 4) * 4))
        }
        17 => {
            transport.len() >= 8
                && (8..=transport.len()).contains(&usize::from(u16::from_be_bytes([transport[4], transport[5]])))
        }
        // A segment or datagram that says it is SCTP has no chunks.
        132 => false,
        _ => true,
    }
}

/// Whether a connection may begin with these flags, of which `PSH`, `ECE` and `CWR` go with any.
fn opens(flags: u8) -> bool {
    const URG: u8 = 0x20;
    matches!(flags & 0x37, SYN | ACK) || matches!(flags & 0x37, it if it == SYN | URG || it == ACK | URG)
}

/// Ports of the Node that nobody mapped, in the range and around it.
pub(super) const UNMAPPED: [u16; 6] = [NODE_PORT + 3, NODE_PORT + 100, NODE_PORT - 1, NODE_PORT + 101, POD_PORT, 0];
