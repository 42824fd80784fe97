// SPDX-License-Identifier: Apache-2.0
//! Parses addresses, ports and flags from the first bytes of an IP packet.

use std::{fmt, net::IpAddr};

use etherparse::LaxIpSlice;
use serde::Serialize;

use crate::core::model::Protocol;

/// The bits of the TCP flags with their letters, in the order in which tcpdump prints the letters.
const FLAGS: [(u8, char); 8] =
    [(0x02, 'S'), (0x01, 'F'), (0x04, 'R'), (0x08, 'P'), (0x20, 'U'), (0x40, 'E'), (0x80, 'W'), (0x10, '.')];
/// The offset of the flags in a TCP header.
const TCP_FLAGS: usize = 13;
/// The length of an IPv6 header in bytes.
const IPV6_HEADER: usize = 40;
/// The types of IPv6 extension headers, by IANA number.
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;
/// The length of an ICMP header in bytes.
const ICMP_HEADER: usize = 8;
/// The types of ICMP errors (RFC 792) and of `ICMPv6` errors (RFC 4443), each list with the protocol's IANA number.
const ERRORS: [(u8, &[u8]); 2] = [(1, &[3, 4, 5, 11, 12]), (58, &[1, 2, 3, 4])];

/// Addresses, ports and flags of a packet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Packet {
    /// The source address in the IP header.
    pub source: IpAddr,
    /// The destination address in the IP header.
    pub destination: IpAddr,
    /// The IANA number of the transport protocol.
    pub protocol: u8,
    /// Source and destination port; `None` for protocols without ports, and for fragments except the first one.
    pub ports: Option<[u16; 2]>,
    /// The TCP flags in the letters of tcpdump, such as `S.` for SYN and ACK; empty for protocols other than TCP, and
    /// for fragments except the first one.
    pub flags: String,
    /// Whether the packet is a fragment.
    pub is_fragment: bool,
    /// The packet that an ICMP error quotes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quoted: Option<Box<Self>>,
}

impl Packet {
    /// Parses the first bytes of a packet, which begin with the IP header; `None` if the IP header is incomplete.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut packet = Self::without_quote(bytes)?;
        packet.quoted = quote(bytes, packet.protocol).and_then(Self::without_quote).map(Box::new);
        Some(packet)
    }

    fn without_quote(bytes: &[u8]) -> Option<Self> {
        let (ip, _incomplete) = LaxIpSlice::from_slice(bytes).ok()?;
        let payload = ip.payload();
        let is_later = is_later_fragment(bytes, &ip);
        let protocol = Protocol::from_number(payload.ip_number.0).filter(|_| !is_later);
        let ports = protocol.and_then(|_| ports(payload.payload));
        let flags = protocol.filter(|protocol| *protocol == Protocol::Tcp).and_then(|_| payload.payload.get(TCP_FLAGS));
        Some(Self {
            source: ip.source_addr(),
            destination: ip.destination_addr(),
            protocol: payload.ip_number.0,
            ports,
            flags: flags.map(|flags| letters(*flags)).unwrap_or_default(),
            is_fragment: payload.fragmented,
            quoted: None,
        })
    }

    /// The source and destination address, each with its port if the packet has ports.
    pub fn ends(&self) -> [(IpAddr, Option<u16>); 2] {
        let [source, destination] = self.ports.map_or([None; 2], |ports| ports.map(Some));
        [(self.source, source), (self.destination, destination)]
    }

    /// Whether the packet's protocol has ports, or the packet is a fragment. The packet itself may lack the ports, for
    /// example if it is the second fragment of a datagram.
    pub const fn may_have_ports(&self) -> bool {
        Protocol::from_number(self.protocol).is_some() || self.is_fragment
    }

    /// The name of the transport protocol; if NPL knows no name, the IANA number.
    fn protocol_name(&self) -> String {
        match (Protocol::from_number(self.protocol), self.protocol) {
            (Some(protocol), _) => protocol.as_str().to_owned(),
            (None, 1 | 58) => "icmp".to_owned(),
            (None, number) => format!("proto {number}"),
        }
    }
}

/// Formats a packet as `tcp 192.0.2.7:50000 > 10.0.0.1:61000 [S]`.
impl fmt::Display for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [source, destination] = self.ends().map(|(ip, port)| match (ip, port) {
            (IpAddr::V6(ip), Some(port)) => format!("[{ip}]:{port}"),
            (ip, Some(port)) => format!("{ip}:{port}"),
            (ip, None) => ip.to_string(),
        });
        write!(f, "{} {source} > {destination}", self.protocol_name())?;
        if !self.flags.is_empty() {
            write!(f, " [{}]", self.flags)?;
        }
        if self.is_fragment {
            f.write_str(" fragment")?;
        }
        self.quoted.as_ref().map_or(Ok(()), |quoted| write!(f, " about {quoted}"))
    }
}

fn is_later_fragment(bytes: &[u8], ip: &LaxIpSlice<'_>) -> bool {
    match ip {
        LaxIpSlice::Ipv4(ip) => ip.header().fragments_offset().value() != 0,
        LaxIpSlice::Ipv6(ip) => {
            let headers = bytes.get(IPV6_HEADER..).unwrap_or_default();
            has_fragment_offset(ip.header().next_header().0, headers)
        }
    }
}

/// Whether a chain of IPv6 extension headers has a fragment header with an offset. `kind` is the type of the first
/// header. The iterator of etherparse is not used, because it reads beyond the end of a chain that is cut off.
fn has_fragment_offset(mut kind: u8, mut headers: &[u8]) -> bool {
    while let [next, length, ..] = *headers {
        let bytes = match kind {
            FRAGMENT => return matches!(headers, [_, _, high, low, ..] if *high != 0 || low & 0xf8 != 0),
            AUTHENTICATION => (usize::from(length) + 2) * 4,
            HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => (usize::from(length) + 1) * 8,
            _ => return false,
        };
        kind = next;
        headers = headers.get(bytes..).unwrap_or_default();
    }
    false
}

/// Returns the packet that an ICMP error quotes; `None` if the bytes are not an ICMP error.
fn quote(bytes: &[u8], protocol: u8) -> Option<&[u8]> {
    let (_, errors) = ERRORS.into_iter().find(|(of, _)| *of == protocol)?;
    let (ip, _incomplete) = LaxIpSlice::from_slice(bytes).ok()?;
    let error = ip.payload().payload;
    let is_error = error.first().is_some_and(|kind| errors.contains(kind)) && !is_later_fragment(bytes, &ip);
    error.get(ICMP_HEADER..).filter(|_| is_error)
}

fn ports(header: &[u8]) -> Option<[u16; 2]> {
    let [a, b, c, d, ..] = *header else { return None };
    Some([u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])])
}

fn letters(flags: u8) -> String {
    let letters: String = FLAGS.iter().filter(|(flag, _)| flags & flag != 0).map(|(_, letter)| letter).collect();
    if letters.is_empty() { "none".to_owned() } else { letters }
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::Packet;

    fn shown(bytes: &[u8]) -> String {
        Packet::parse(bytes).unwrap().to_string()
    }

    #[test]
    fn a_packet_is_shown_in_the_notation_of_tcpdump() {
        let mut syn = Vec::new();
        let builder = PacketBuilder::ipv4([192, 0, 2, 7], [10, 0, 0, 1], 64).tcp(50_000, 61_000, 1, 1000).syn();
        builder.write(&mut syn, &[]).unwrap();
        assert_eq!(shown(&syn), "tcp 192.0.2.7:50000 > 10.0.0.1:61000 [S]");
        let mut answer = Vec::new();
        let builder = PacketBuilder::ipv6([1; 16], [2; 16], 64).tcp(61_000, 50_000, 1, 1000).syn().ack(2);
        builder.write(&mut answer, &[]).unwrap();
        let shown = shown(&answer);
        assert!(shown.ends_with("[S.]") && shown.contains("]:61000 > ["), "{shown}");
    }

    #[test]
    fn a_packet_that_the_record_cuts_off_is_parsed_as_far_as_it_goes() {
        let mut datagram = Vec::new();
        let builder = PacketBuilder::ipv4([192, 0, 2, 7], [10, 0, 0, 1], 64).udp(50_000, 61_000);
        builder.write(&mut datagram, &[0; 1000]).unwrap();
        assert_eq!(shown(&datagram[..128]), "udp 192.0.2.7:50000 > 10.0.0.1:61000");
        assert_eq!(shown(&datagram[..22]), "udp 192.0.2.7 > 10.0.0.1");
        assert_eq!(Packet::parse(&datagram[..19]), None);
        assert_eq!(Packet::parse(&[]), None);
    }

    #[test]
    fn an_icmp_error_is_shown_with_the_packet_that_it_quotes() {
        let mut quoted = Vec::new();
        let builder = PacketBuilder::ipv4([10, 0, 0, 1], [192, 0, 2, 7], 64).udp(61_000, 50_000);
        builder.write(&mut quoted, &[]).unwrap();
        let mut error = Vec::new();
        let unreachable =
            etherparse::Icmpv4Type::DestinationUnreachable(etherparse::icmpv4::DestUnreachableHeader::Host);
        let builder = PacketBuilder::ipv4([198, 51, 100, 1], [10, 0, 0, 1], 64).icmpv4(unreachable);
        builder.write(&mut error, &quoted).unwrap();
        let expected = "icmp 198.51.100.1 > 10.0.0.1 about udp 10.0.0.1:61000 > 192.0.2.7:50000";
        assert_eq!(shown(&error), expected);
    }

    #[test]
    fn extension_headers_of_ipv6_that_are_cut_off_are_not_read_beyond_their_end() {
        let mut datagram = Vec::new();
        PacketBuilder::ipv6([1; 16], [2; 16], 64).udp(50_000, 61_000).write(&mut datagram, &[]).unwrap();
        let udp = datagram.split_off(40);
        // A hop-by-hop header and a fragment header with the offset 8.
        let headers = [44, 0, 1, 4, 0, 0, 0, 0, 17, 0, 0, 8, 0, 0, 0, 1];
        datagram[5] = u8::try_from(headers.len() + udp.len()).unwrap();
        datagram[6] = 0;
        let fragment = [&datagram[..], &headers, &udp].concat();
        let parsed = Packet::parse(&fragment).unwrap();
        assert_eq!((parsed.ports, parsed.is_fragment), (None, true));
        for length in 40..fragment.len() {
            assert_eq!(Packet::parse(&fragment[..length]).and_then(|packet| packet.ports), None, "{length}");
        }
        // The length of the last header exceeds the packet.
        datagram[5] = 8;
        for kind in [0, 43, 44, 51, 60] {
            datagram[6] = kind;
            let packet = [&datagram[..], &[17, 255, 0, 0, 0, 0, 0, 0]].concat();
            assert_eq!(Packet::parse(&packet).and_then(|packet| packet.ports), None, "{kind}");
        }
    }

    #[test]
    fn bytes_of_a_later_fragment_are_not_ports() {
        let mut fragment = Vec::new();
        let builder = PacketBuilder::ipv4([192, 0, 2, 7], [10, 0, 0, 1], 64).udp(50_000, 61_000);
        builder.write(&mut fragment, &[0; 64]).unwrap();
        fragment[6..8].copy_from_slice(&[0x20, 0]);
        assert_eq!(shown(&fragment), "udp 192.0.2.7:50000 > 10.0.0.1:61000 fragment");
        fragment[6..8].copy_from_slice(&[0, 8]);
        assert_eq!(shown(&fragment), "udp 192.0.2.7 > 10.0.0.1 fragment");
    }
}
