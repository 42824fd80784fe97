// SPDX-License-Identifier: Apache-2.0
//! The expected translation of a frame, byte by byte, for cases in which the kernel's NAT gives no reference.

use std::net::{IpAddr, SocketAddr};

use npl_agent::core::model::Family;
use npl_testkit::packet::{crc32c, ones_complement_sum};

use super::compare::end_of_packet;
use super::connection::Step;
use super::node_pair::{Endpoint, SERVICES, backend, node_addresses};
use crate::prog_run::fragments::{L3, V4_HEADER, V6_HEADER};

const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;
const ICMP: u8 = 1;
const ICMP_V6: u8 = 58;
/// Length of an ICMP error's header, which precedes the quote.
const ICMP_HEADER: usize = 8;

/// The address and port to translate: source or destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Source,
    Destination,
}

/// Offsets in a packet from its IP header on; the packet may be truncated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) family: Family,
    pub(super) protocol: u8,
    pub(super) transport: usize,
    /// Whether the packet is a later fragment, which has no ports.
    is_later: bool,
}

impl Layout {
    /// Returns the layout of an IP packet of this family. The family comes from the ethertype; the packet's version
    /// field is ignored, because it may contradict the ethertype.
    pub(super) fn of(family: Family, ip: &[u8]) -> Option<Self> {
        if family == Family::V4 {
            let is_later = u16::from_be_bytes([*ip.get(6)?, *ip.get(7)?]) & 0x1fff != 0;
            let transport = usize::from(*ip.first()? & 0xf) * 4;
            return Some(Self { family, protocol: *ip.get(9)?, transport, is_later });
        }
        let (mut protocol, mut transport, mut is_later) = (*ip.get(6)?, V6_HEADER, false);
        while matches!(protocol, 0 | 43 | 44 | 60) {
            let length = if protocol == 44 { 8 } else { usize::from(*ip.get(transport + 1)?) * 8 + 8 };
            is_later |=
                protocol == 44 && u16::from_be_bytes([*ip.get(transport + 2)?, *ip.get(transport + 3)?]) >> 3 != 0;
            (protocol, transport) = (*ip.get(transport)?, transport + length);
        }
        Some(Self { family, protocol, transport, is_later })
    }

    /// Offset of the addresses, and the length of each.
    const fn addresses(self) -> (usize, usize) {
        if matches!(self.family, Family::V4) { (12, 4) } else { (8, 16) }
    }

    /// Returns the bytes of addresses and ports, which the TCP and UDP checksums cover.
    fn covered(self, ip: &[u8]) -> Vec<u8> {
        let (at, size) = self.addresses();
        let ports = ip.get(self.transport..self.transport + 4).unwrap_or_default();
        [&ip[at..at + 2 * size], ports].concat()
    }
}

/// Returns the translated frames of a step, as the receiver gets them after one hop.
pub(super) fn translated(step: &Step) -> Vec<Vec<u8>> {
    step.frames.iter().map(|frame| translate(frame, step)).collect()
}

fn translate(frame: &[u8], step: &Step) -> Vec<u8> {
    let frame = untagged(frame);
    let mut ip = frame[L3..].to_vec();
    let family = family(&frame);
    let Some(layout) = Layout::of(family, &ip) else { return frame };
    let service = &SERVICES[step.service];
    let (node, pod) = (node_addresses(family)[step.address], backend(family, service));
    let node = SocketAddr::from((node, service.node_port));
    let (side, quoted_side, to) = if step.from == Endpoint::Client {
        (Side::Destination, Side::Source, pod)
    } else {
        (Side::Source, Side::Destination, node)
    };
    if matches!(layout.protocol, ICMP | ICMP_V6) {
        // Bytes after the end of the packet do not belong to the quote.
        let end = ip.len().min(end_of_packet(&frame) - L3);
        let before = ip[layout.transport..end].to_vec();
        readdress(family, &mut ip[layout.transport + ICMP_HEADER..end], quoted_side, to);
        let after = ip[layout.transport..end].to_vec();
        adjust(&mut ip, layout.transport + 2, &before, &after);
    }
    readdress(family, &mut ip, side, to);
    decrement_ttl(&mut ip, family);
    // If the transport header extends beyond the end that the IP header states, the program translates the whole
    // transport header, but the receiver gets only the bytes before this end.
    ip.truncate(end_of_packet(&frame) - L3);
    let link = if step.from == Endpoint::Client { Endpoint::Pod(service.pod) } else { Endpoint::Client };
    let ethernet = link.ethernet();
    [ethernet.source.as_slice(), &ethernet.destination, &frame[12..L3], &ip].concat()
}

/// Returns the address family of a frame's ethertype.
pub(super) fn family(frame: &[u8]) -> Family {
    if frame[12] == 0x08 { Family::V4 } else { Family::V6 }
}

/// Returns a frame without its VLAN tag.
pub(super) fn untagged(frame: &[u8]) -> Vec<u8> {
    let rest_start = if frame[12..14] == [0x81, 0x00] { 16 } else { 12 };
    [&frame[..12], &frame[rest_start..]].concat()
}

/// Translates an address, and the port if the packet has one, and updates every checksum that covers them.
pub(super) fn readdress(family: Family, ip: &mut [u8], side: Side, to: SocketAddr) {
    let Some(layout) = Layout::of(family, ip) else { return };
    let before = ip.to_vec();
    let (addresses, size) = layout.addresses();
    let at = if side == Side::Source { addresses } else { addresses + size };
    match to.ip() {
        IpAddr::V4(address) => ip[at..at + size].copy_from_slice(&address.octets()),
        IpAddr::V6(address) => ip[at..at + size].copy_from_slice(&address.octets()),
    }
    if layout.family == Family::V4 {
        let after = ip[at..at + size].to_vec();
        adjust(ip, 10, &before[at..at + size], &after);
    }
    if layout.is_later {
        return;
    }
    let port = layout.transport + if side == Side::Source { 0 } else { 2 };
    if matches!(layout.protocol, TCP | UDP | SCTP) && port + 2 <= ip.len() {
        ip[port..port + 2].copy_from_slice(&to.port().to_be_bytes());
    }
    adjust_transport(ip, &before, layout);
}

/// Updates the transport checksum, if the packet contains it, for changed addresses and ports.
pub(super) fn adjust_transport(ip: &mut [u8], before: &[u8], layout: Layout) {
    let (old, new) = (layout.covered(before), layout.covered(ip));
    match layout.protocol {
        TCP => adjust(ip, layout.transport + 16, &old, &new),
        UDP => adjust_datagram(ip, layout.transport + 6, &old, &new),
        SCTP => adjust_crc(ip, before, layout),
        ICMP_V6 => adjust(ip, layout.transport + 2, &old[..32], &new[..32]),
        _ => {}
    }
}

/// Updates an Internet checksum for changed content (RFC 1624, equation 3).
pub(super) fn adjust(ip: &mut [u8], at: usize, old: &[u8], new: &[u8]) {
    let Some(field) = ip.get_mut(at..at + 2) else { return };
    let terms = [!u16::from_be_bytes([field[0], field[1]]), !ones_complement_sum(old), ones_complement_sum(new)];
    let sum = ones_complement_sum(&terms.map(u16::to_be_bytes).concat());
    field.copy_from_slice(&(!sum).to_be_bytes());
}

/// Updates a UDP checksum as [`adjust`] does, and keeps zero, which means "no checksum".
fn adjust_datagram(ip: &mut [u8], at: usize, old: &[u8], new: &[u8]) {
    if matches!(ip.get(at..at + 2), None | Some(&[0, 0])) {
        return;
    }
    adjust(ip, at, old, new);
    if ip[at..at + 2] == [0, 0] {
        ip[at..at + 2].fill(0xff);
    }
}

/// Updates a CRC for changed content. A CRC is linear, so bytes that are missing in the quote can be taken as zeros,
/// because the translation does not change these bytes.
fn adjust_crc(ip: &mut [u8], before: &[u8], layout: Layout) {
    let at = layout.transport + 8;
    let Some(field) = before.get(at..at + 4).filter(|field| **field != [0; 4]) else { return };
    let header = |at: usize| usize::from(u16::from_be_bytes([before[at], before[at + 1]]));
    let end = if layout.family == Family::V4 { header(2) } else { V6_HEADER + header(4) };
    let crc = |packet: &[u8]| {
        let mut whole = packet[..packet.len().min(end)].to_vec();
        whole.resize(end, 0);
        whole[at..at + 4].fill(0);
        crc32c(&whole[layout.transport..])
    };
    let check = u32::from_le_bytes(field.try_into().unwrap()) ^ crc(before) ^ crc(ip);
    ip[at..at + 4].copy_from_slice(&check.to_le_bytes());
}

fn decrement_ttl(ip: &mut [u8], family: Family) {
    if family == Family::V6 {
        ip[7] = ip[7].wrapping_sub(1);
        return;
    }
    let before = [ip[8], ip[9]];
    ip[8] = ip[8].wrapping_sub(1);
    adjust(ip, 10, &before, &[ip[8], ip[9]].map(u8::from));
}

/// Length in bytes of the IPv4 header with its options: at least 20, and no more than the frame contains.
pub(super) fn header_length(frame: &[u8]) -> usize {
    let Some(first) = frame.get(L3) else { return V4_HEADER };
    let length = usize::from(first & 0x0f) * 4;
    length.min(frame.len() - L3).max(V4_HEADER)
}
