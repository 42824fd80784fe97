// SPDX-License-Identifier: Apache-2.0
//! A parser of hostile packets that shares no code with the kernel programs. The parser follows `docs/datapath.md`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use npl_agent::core::model::Protocol;
use npl_testkit::packet::protocol_number::{ICMP, ICMPV6, SCTP, TCP, UDP};

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;
/// The largest number of extension headers that NPL skips.
const MOST_EXTENSIONS: usize = 6;

/// Length of an ICMP error's header, which precedes the quote.
pub(super) const ICMP_HEADER: usize = 8;

/// Returns `N` bytes at an offset, if the frame contains all of them.
pub(super) fn bytes<const N: usize>(frame: &[u8], at: usize) -> Option<[u8; N]> {
    frame.get(at..)?.first_chunk().copied()
}

/// Returns the 16-bit number at an offset.
pub(super) fn word(frame: &[u8], at: usize) -> Option<u16> {
    bytes(frame, at).map(u16::from_be_bytes)
}

/// What a packet is, judged by its headers alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Parsed {
    /// No IP packet, or a protocol that NPL never translates.
    Foreign,
    /// The headers cannot be parsed up to a transport header. In IPv6, the packet may still have a destination.
    Unreadable { destination: Option<IpAddr> },
    /// The headers up to the transport header are complete.
    Located(Chain),
}

/// Where a packet is in its datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Whole,
    First,
    Later,
}

/// The IP header, and the headers between the IP header and the transport header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) l3: usize,
    pub(super) l4: usize,
    pub(super) protocol: u8,
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    pub(super) part: Part,
    /// The identification of the datagram that this fragment is a part of.
    pub(super) id: u32,
    /// The end of the packet according to its IP header.
    pub(super) end: usize,
    /// Whether the packet is plain TCP or UDP: no options, extension headers or fragmentation.
    pub(super) is_plain: bool,
}

impl Chain {
    pub(super) fn is_v4(&self) -> bool {
        self.source.is_ipv4()
    }

    pub(super) fn is_icmp(&self) -> bool {
        self.protocol == if self.is_v4() { ICMP } else { ICMPV6 }
    }

    /// The transport protocol, if NPL translates this protocol.
    pub(super) fn transport(&self) -> Option<Protocol> {
        Protocol::from_number(self.protocol)
    }

    /// Source and destination port.
    pub(super) fn ports(&self, frame: &[u8]) -> Option<(u16, u16)> {
        let ports: [u8; 4] = bytes(frame, self.l4)?;
        Some((u16::from_be_bytes([ports[0], ports[1]]), u16::from_be_bytes([ports[2], ports[3]])))
    }

    /// Offset of the TTL or hop limit.
    pub(super) fn ttl_at(&self) -> usize {
        self.l3 + if self.is_v4() { 8 } else { 7 }
    }

    /// Offset of the source address and of the destination address.
    pub(super) fn addresses_at(&self) -> (usize, usize) {
        if self.is_v4() { (self.l3 + 12, self.l3 + 16) } else { (self.l3 + 8, self.l3 + 24) }
    }

    /// The length of the IP packet according to its IP header.
    pub(super) fn length(&self, frame: &[u8]) -> u32 {
        let at = self.l3 + if self.is_v4() { 2 } else { 4 };
        let length = u32::from(word(frame, at).unwrap_or_default());
        if self.is_v4() { length } else { (length + 40).min(u32::from(u16::MAX)) }
    }
}

/// Parses a frame whose IP header starts at offset `l3`. `ether_type` is the type that the kernel reads in the frame.
pub(super) fn parse(frame: &[u8], ether_type: u16, l3: usize) -> Parsed {
    match ether_type {
        0x0800 => parse_v4(frame, l3),
        0x86dd => parse_v6(frame, l3),
        _ => Parsed::Foreign,
    }
}

fn parse_v4(frame: &[u8], l3: usize) -> Parsed {
    let Some(header) = bytes::<20>(frame, l3) else { return Parsed::Foreign };
    if !matches!(header[9], ICMP | TCP | UDP | SCTP) {
        return Parsed::Foreign;
    }
    chain_v4(frame, l3).map_or(Parsed::Unreadable { destination: None }, Parsed::Located)
}

/// Parses the IPv4 header of a packet, or of a quoted packet, which may have any protocol.
fn chain_v4(frame: &[u8], l3: usize) -> Option<Chain> {
    let header = bytes::<20>(frame, l3)?;
    let length = usize::from(header[0] & 15) * 4;
    if header[0] >> 4 != 4 || length < 20 {
        return None;
    }
    let fragment = word(frame, l3 + 6)?;
    let part = match (fragment & 0x1fff, fragment & 0x2000) {
        (0, 0) => Part::Whole,
        (0, _) => Part::First,
        _ => Part::Later,
    };
    let address = |at| bytes::<4>(frame, l3 + at).map(Ipv4Addr::from);
    Some(Chain {
        l3,
        l4: l3 + length,
        protocol: header[9],
        source: address(12)?.into(),
        destination: address(16)?.into(),
        part,
        id: word(frame, l3 + 4)?.into(),
        end: l3 + usize::from(word(frame, l3 + 2)?).max(length),
        is_plain: length == 20 && part == Part::Whole && matches!(header[9], TCP | UDP),
    })
}

fn parse_v6(frame: &[u8], l3: usize) -> Parsed {
    let Some(header) = bytes::<40>(frame, l3) else { return Parsed::Foreign };
    if !is_extension(header[6]) && !matches!(header[6], ICMPV6 | TCP | UDP | SCTP) {
        return Parsed::Foreign;
    }
    // The version of a plain packet is not checked: the EtherType already says that the packet is IPv6, and a receiver
    // discards a packet with another version.
    let is_plain = matches!(header[6], TCP | UDP);
    if let Some(chain) = chain_v6(frame, l3, !is_plain) {
        return Parsed::Located(Chain { is_plain, ..chain });
    }
    Parsed::Unreadable { destination: bytes::<16>(frame, l3 + 24).map(|address| Ipv6Addr::from(address).into()) }
}

/// Parses the IPv6 header of a packet, or of a quoted packet, and its extension headers.
fn chain_v6(frame: &[u8], l3: usize, checks_version: bool) -> Option<Chain> {
    let header = bytes::<40>(frame, l3)?;
    if checks_version && header[0] >> 4 != 6 {
        return None;
    }
    let (mut l4, mut protocol, mut part, mut id) = (l3 + 40, header[6], Part::Whole, 0);
    let mut skipped = 0;
    while is_extension(protocol) && part != Part::Later {
        if skipped == MOST_EXTENSIONS {
            return None;
        }
        skipped += 1;
        let extension = bytes::<8>(frame, l4).filter(|_| protocol == FRAGMENT);
        if let Some(fragment) = extension {
            let field = u16::from_be_bytes([fragment[2], fragment[3]]);
            part = match (field & 0xfff8, field & 1) {
                (0, 0) => Part::Whole,
                (0, _) => Part::First,
                _ => Part::Later,
            };
            id = u32::from_be_bytes([fragment[4], fragment[5], fragment[6], fragment[7]]);
            (protocol, l4) = (fragment[0], l4 + 8);
            continue;
        }
        let extension = bytes::<4>(frame, l4).filter(|_| protocol != FRAGMENT)?;
        if protocol == ROUTING && extension[3] != 0 {
            return None;
        }
        (protocol, l4) = (extension[0], l4 + (usize::from(extension[1]) + 1) * 8);
    }
    let address = |at| bytes::<16>(frame, l3 + at).map(Ipv6Addr::from);
    Some(Chain {
        l3,
        l4,
        protocol,
        source: address(8)?.into(),
        destination: address(24)?.into(),
        part,
        id,
        end: l3 + 40 + usize::from(word(frame, l3 + 4)?),
        is_plain: false,
    })
}

fn is_extension(protocol: u8) -> bool {
    matches!(protocol, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION_OPTIONS)
}

/// Whether the frame contains an ICMP error after `outer`'s headers.
pub(super) fn is_error(frame: &[u8], outer: &Chain) -> bool {
    let Some(header) = bytes::<ICMP_HEADER>(frame, outer.l4) else { return false };
    if outer.is_v4() { matches!(header[0], 3 | 4 | 11 | 12) } else { header[0] < 128 }
}

/// Parses the packet that an ICMP error quotes.
pub(super) fn quote(frame: &[u8], outer: &Chain) -> Option<Chain> {
    let at = outer.l4 + ICMP_HEADER;
    if outer.is_v4() { chain_v4(frame, at) } else { chain_v6(frame, at, true) }
}

/// Why a transport header cannot be translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Incomplete {
    Truncated,
    /// A first SCTP fragment whose datagram has an unknown length.
    UnknownLength,
}

/// Checks that a packet contains the transport header that a translation needs. For a first SCTP fragment, the result
/// depends on the other fragments, so both results are possible.
pub(super) fn completeness(frame: &[u8], chain: &Chain) -> Result<(), Incomplete> {
    let has = |length: usize| frame.len() >= chain.l4 + length;
    let is_complete = match chain.protocol {
        // The rest of a header that is cut by fragmentation is in the next fragment.
        TCP if chain.part == Part::First && chain.l4 + 20 > chain.end => false,
        TCP => has(20),
        UDP => has(8),
        _ if chain.part == Part::First => return Err(Incomplete::UnknownLength),
        _ => has(16) && chain.l4 + 16 <= chain.end,
    };
    if is_complete { Ok(()) } else { Err(Incomplete::Truncated) }
}
