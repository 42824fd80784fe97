// SPDX-License-Identifier: Apache-2.0
//! Parses bytes into packet values.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::build::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_VLAN, transport_sums};
use super::checksum::Sums;
use super::protocol_number::{ICMP, ICMPV6, SCTP, TCP, UDP};
use super::{Checksum, Ethernet, Icmp, Ip, Ipv4, Ipv6, Packet, Sctp, Tcp, Transport, Udp};

/// The reason why bytes cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseError {
    /// The bytes end within the named header.
    Short(&'static str),
    /// The frame contains neither IPv4 nor IPv6.
    NotIp(u16),
    /// A length field of the named header is inconsistent.
    Length(&'static str),
}

impl std::fmt::Display for ParseError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Short(header) => write!(f, "the bytes end within the {header} header"),
            Self::NotIp(kind) => write!(f, "the frame contains neither IPv4 nor IPv6; its EtherType is {kind:#06x}"),
            Self::Length(header) => write!(f, "the length in the {header} header is inconsistent"),
        }
    }
}

impl std::error::Error for ParseError {}

impl Packet {
    /// Parses an Ethernet frame.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let mut cursor = Cursor { bytes, header: "Ethernet" };
        let (destination, source) = (cursor.array()?, cursor.array()?);
        let mut vlans = Vec::new();
        let mut kind = cursor.u16()?;
        while kind == ETHERTYPE_VLAN {
            vlans.push(cursor.u16()?);
            kind = cursor.u16()?;
        }
        if kind != ETHERTYPE_IPV4 && kind != ETHERTYPE_IPV6 {
            return Err(ParseError::NotIp(kind));
        }
        let packet = Self::parse_ip(cursor.bytes)?;
        Ok(Self { ethernet: Some(Ethernet { destination, source, vlans }), ..packet })
    }

    /// Parses a packet without link layer, such as a complete quote in an ICMP error.
    pub fn parse_ip(bytes: &[u8]) -> Result<Self, ParseError> {
        let version = bytes.first().ok_or(ParseError::Short("IP"))? >> 4;
        let (ip, protocol, payload) = if version == 4 { parse_v4(bytes)? } else { parse_v6(bytes)? };
        let is_later_fragment = matches!(&ip, Ip::V4(header) if header.fragment_offset > 0);
        let transport = match protocol {
            TCP if !is_later_fragment => Transport::Tcp(parse_tcp(&ip, payload)?),
            UDP if !is_later_fragment => Transport::Udp(parse_udp(&ip, payload)?),
            SCTP if !is_later_fragment => Transport::Sctp(Sctp::parse(payload)?),
            ICMP | ICMPV6 if !is_later_fragment => Transport::Icmp(parse_icmp(&ip, protocol, payload)?),
            protocol => Transport::Raw { protocol, bytes: payload.to_vec() },
        };
        Ok(Self { ethernet: None, ip, transport })
    }
}

fn parse_v4(bytes: &[u8]) -> Result<(Ip, u8, &[u8]), ParseError> {
    let mut cursor = Cursor { bytes, header: "IPv4" };
    let header_length = usize::from(cursor.u8()? & 0xf) * 4;
    let tos = cursor.u8()?;
    let total = usize::from(cursor.u16()?);
    let identification = cursor.u16()?;
    let fragment = cursor.u16()?;
    let (ttl, protocol, checksum) = (cursor.u8()?, cursor.u8()?, cursor.u16()?);
    let (source, destination) = (Ipv4Addr::from(cursor.array::<4>()?), Ipv4Addr::from(cursor.array::<4>()?));
    let options_length = header_length.checked_sub(20).ok_or(ParseError::Length("IPv4"))?;
    let options = cursor.take(options_length)?.to_vec();
    let payload = bytes.get(header_length..total).ok_or(ParseError::Length("IPv4"))?;
    let mut header = bytes.get(..header_length).unwrap_or_default().to_vec();
    header[10..12].fill(0);
    let header = Ipv4 {
        source,
        destination,
        tos,
        identification,
        dont_fragment: fragment & 0x4000 != 0,
        more_fragments: fragment & 0x2000 != 0,
        fragment_offset: fragment & 0x1fff,
        ttl,
        options,
        checksum: Sums::plain(&header).meaning(checksum),
    };
    Ok((Ip::V4(header), protocol, payload))
}

fn parse_v6(bytes: &[u8]) -> Result<(Ip, u8, &[u8]), ParseError> {
    let mut cursor = Cursor { bytes, header: "IPv6" };
    let first = u32::from_be_bytes(cursor.array()?);
    let length = usize::from(cursor.u16()?);
    let (protocol, hop_limit) = (cursor.u8()?, cursor.u8()?);
    let (source, destination) = (Ipv6Addr::from(cursor.array::<16>()?), Ipv6Addr::from(cursor.array::<16>()?));
    let [.., traffic_class] = (first >> 20).to_be_bytes();
    let header = Ipv6 { source, destination, traffic_class, flow_label: first & 0xf_ffff, hop_limit };
    Ok((Ip::V6(header), protocol, cursor.bytes.get(..length).ok_or(ParseError::Length("IPv6"))?))
}

fn parse_tcp(ip: &Ip, bytes: &[u8]) -> Result<Tcp, ParseError> {
    let mut cursor = Cursor { bytes, header: "TCP" };
    let (source, destination) = (cursor.u16()?, cursor.u16()?);
    let (sequence, acknowledgement) = (u32::from_be_bytes(cursor.array()?), u32::from_be_bytes(cursor.array()?));
    let header_length = usize::from(cursor.u8()? >> 4) * 4;
    let (flags, window, checksum) = (cursor.u8()?, cursor.u16()?, cursor.u16()?);
    let _urgent_pointer = cursor.u16()?;
    let options_length = header_length.checked_sub(20).ok_or(ParseError::Length("TCP"))?;
    let options = cursor.take(options_length)?.to_vec();
    let checksum = meaning(ip, TCP, bytes, 16, checksum);
    let payload = cursor.bytes.to_vec();
    Ok(Tcp { source, destination, sequence, acknowledgement, flags, window, options, checksum, payload })
}

fn parse_udp(ip: &Ip, bytes: &[u8]) -> Result<Udp, ParseError> {
    let mut cursor = Cursor { bytes, header: "UDP" };
    let (source, destination) = (cursor.u16()?, cursor.u16()?);
    let (length, checksum) = (usize::from(cursor.u16()?), cursor.u16()?);
    // In the first fragment of a datagram, UDP's length field exceeds the number of bytes in the fragment, so the
    // length is not checked there.
    let is_whole = matches!(ip, Ip::V4(header) if header.more_fragments) || length == bytes.len();
    if !is_whole {
        return Err(ParseError::Length("UDP"));
    }
    Ok(Udp { source, destination, checksum: meaning(ip, UDP, bytes, 6, checksum), payload: cursor.bytes.to_vec() })
}

fn parse_icmp(ip: &Ip, protocol: u8, bytes: &[u8]) -> Result<Icmp, ParseError> {
    let mut cursor = Cursor { bytes, header: "ICMP" };
    let (kind, code, checksum, rest) = (cursor.u8()?, cursor.u8()?, cursor.u16()?, cursor.array()?);
    let checksum = meaning(ip, protocol, bytes, 2, checksum);
    Ok(Icmp { kind, code, rest, checksum, payload: cursor.bytes.to_vec() })
}

fn meaning(ip: &Ip, protocol: u8, bytes: &[u8], offset: usize, value: u16) -> Checksum {
    let mut bytes = bytes.to_vec();
    bytes[offset..offset + 2].fill(0);
    transport_sums(ip, protocol, &bytes).meaning(value)
}

struct Cursor<'a> {
    bytes: &'a [u8],
    header: &'static str,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], ParseError> {
        let (taken, rest) = self.bytes.split_at_checked(length).ok_or(ParseError::Short(self.header))?;
        self.bytes = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ParseError> {
        let (taken, rest) = self.bytes.split_first_chunk().ok_or(ParseError::Short(self.header))?;
        self.bytes = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, ParseError> {
        self.array().map(u8::from_be_bytes)
    }

    fn u16(&mut self) -> Result<u16, ParseError> {
        self.array().map(u16::from_be_bytes)
    }
}
