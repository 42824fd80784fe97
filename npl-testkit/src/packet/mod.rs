// SPDX-License-Identifier: Apache-2.0
//! Packets as values, which tests build to bytes and parse from bytes. Checksums are computed independently of the code
//! under test.
//!
//! ```
//! use npl_testkit::packet::{Packet, Transport};
//!
//! let client = "198.51.100.2:43210".parse().unwrap();
//! let request = Packet::udp(client, "192.0.2.10:61000".parse().unwrap(), b"hello");
//! let mut expected = request.clone();
//! expected.set_destination("10.244.0.1:8080".parse().unwrap());
//! assert_ne!(request.build(), expected.build());
//! assert_eq!(Packet::parse(&expected.build()).unwrap(), expected);
//! ```

mod build;
mod checksum;
mod parse;
mod sctp;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub use self::checksum::ones_complement_sum;
pub use self::parse::ParseError;
pub use self::sctp::{Crc, SCTP_TAG, Sctp, crc32c, sctp_chunks};

pub mod protocol_number {
    //! IP protocol numbers.

    pub const ICMP: u8 = 1;
    pub const TCP: u8 = 6;
    pub const UDP: u8 = 17;
    pub const ICMPV6: u8 = 58;
    pub const SCTP: u8 = 132;
}

pub mod tcp_flags {
    /// The sender has no more data.
    pub const FIN: u8 = 0x01;
    /// Opens the connection. Only the first segment of each direction has this flag.
    pub const SYN: u8 = 0x02;
    /// Rejects or aborts the connection.
    pub const RST: u8 = 0x04;
    /// Asks the receiver to deliver the data to the application without delay.
    pub const PSH: u8 = 0x08;
    /// The acknowledgement number is valid.
    pub const ACK: u8 = 0x10;
}

/// A frame or packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The link layer; absent on devices without one, such as TUN.
    pub ethernet: Option<Ethernet>,
    /// The network layer.
    pub ip: Ip,
    /// The payload of the network layer.
    pub transport: Transport,
}

/// An Ethernet header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ethernet {
    /// The destination MAC address.
    pub destination: [u8; 6],
    /// The source MAC address.
    pub source: [u8; 6],
    /// VLAN identifiers, outermost first.
    pub vlans: Vec<u16>,
}

/// A network header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ip {
    V4(Ipv4),
    V6(Ipv6),
}

/// An IPv4 header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ipv4 {
    /// The source address.
    pub source: Ipv4Addr,
    /// The destination address.
    pub destination: Ipv4Addr,
    /// The field "type of service".
    pub tos: u8,
    /// The identification, equal in all fragments of a datagram.
    pub identification: u16,
    /// The don't-fragment flag.
    pub dont_fragment: bool,
    /// The more-fragments flag.
    pub more_fragments: bool,
    /// The fragment offset in units of eight bytes.
    pub fragment_offset: u16,
    pub ttl: u8,
    /// Options, padded to four bytes by the builder.
    pub options: Vec<u8>,
    /// The header checksum.
    pub checksum: Checksum,
}

/// An IPv6 header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ipv6 {
    /// The source address.
    pub source: Ipv6Addr,
    /// The destination address.
    pub destination: Ipv6Addr,
    /// The field "traffic class".
    pub traffic_class: u8,
    /// The flow label, 20 bits.
    pub flow_label: u32,
    pub hop_limit: u8,
}

/// The payload of an IP packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A TCP segment.
    Tcp(Tcp),
    /// A UDP datagram.
    Udp(Udp),
    /// An SCTP packet.
    Sctp(Sctp),
    /// An ICMP message of the packet's family.
    Icmp(Icmp),
    /// Any other protocol, and fragments other than the first.
    Raw {
        /// The IP protocol number.
        protocol: u8,
        /// The bytes after the network header.
        bytes: Vec<u8>,
    },
}

/// A TCP segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tcp {
    /// The source port.
    pub source: u16,
    /// The destination port.
    pub destination: u16,
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledgement number.
    pub acknowledgement: u32,
    /// The TCP flags, as listed in [`tcp_flags`].
    pub flags: u8,
    /// Receive window.
    pub window: u16,
    /// Options, padded to four bytes by the builder.
    pub options: Vec<u8>,
    pub checksum: Checksum,
    pub payload: Vec<u8>,
}

/// A UDP datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Udp {
    /// The source port.
    pub source: u16,
    /// The destination port.
    pub destination: u16,
    pub checksum: Checksum,
    pub payload: Vec<u8>,
}

/// An ICMP message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Icmp {
    /// The type.
    pub kind: u8,
    pub code: u8,
    /// The four bytes after the checksum: identifier and sequence number, or the next-hop MTU.
    pub rest: [u8; 4],
    pub checksum: Checksum,
    /// The payload; in an error message, the beginning of the packet that caused the error.
    pub payload: Vec<u8>,
}

/// The value of a checksum field, relative to the correct checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// The correct checksum.
    Right,
    /// Zero, which means "no checksum" for UDP over IPv4.
    Zero,
    /// The sum of the pseudo header, to be completed by the device (`CHECKSUM_PARTIAL`).
    Partial,
    /// A wrong value.
    Wrong(u16),
}

impl Packet {
    /// Creates a TCP segment with the given flags, as received by the Node.
    pub fn tcp(source: SocketAddr, destination: SocketAddr, flags: u8, payload: &[u8]) -> Self {
        let tcp = Tcp {
            source: source.port(),
            destination: destination.port(),
            sequence: 0x1000_0001,
            acknowledgement: if flags & tcp_flags::ACK == 0 { 0 } else { 0x2000_0001 },
            flags,
            window: 64_240,
            options: Vec::new(),
            checksum: Checksum::Right,
            payload: payload.to_vec(),
        };
        Self::new(source.ip(), destination.ip(), Transport::Tcp(tcp))
    }

    /// Sets the destination MAC address to the address of the loopback device, so that a test run of a program
    /// classifies the packet as addressed to this machine.
    #[must_use]
    pub fn to_this_machine(self) -> Self {
        Self { ethernet: Some(Ethernet { destination: [0; 6], ..Ethernet::default() }), ..self }
    }

    /// Creates a UDP datagram, as received by the Node.
    pub fn udp(source: SocketAddr, destination: SocketAddr, payload: &[u8]) -> Self {
        let udp = Udp {
            source: source.port(),
            destination: destination.port(),
            checksum: Checksum::Right,
            payload: payload.to_vec(),
        };
        Self::new(source.ip(), destination.ip(), Transport::Udp(udp))
    }

    /// Creates an ICMP error that quotes the IP header of `quoted` and `quoted_bytes` bytes after it.
    pub fn icmp_error(source: IpAddr, kind: u8, code: u8, quoted: &Self, quoted_bytes: usize) -> Self {
        let mut inner = Self { ethernet: None, ..quoted.clone() }.build();
        inner.truncate(quoted.ip.header_length() + quoted_bytes);
        let icmp = Icmp { kind, code, rest: [0; 4], checksum: Checksum::Right, payload: inner };
        Self::new(source, quoted.source_ip(), Transport::Icmp(icmp))
    }

    /// Creates a packet with any transport between two addresses of one family.
    pub fn new(source: IpAddr, destination: IpAddr, transport: Transport) -> Self {
        let ip = match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => Ip::V4(Ipv4::new(source, destination)),
            (source, destination) => Ip::V6(Ipv6::new(as_v6(source), as_v6(destination))),
        };
        Self { ethernet: Some(Ethernet::default()), ip, transport }
    }

    /// The source address.
    pub fn source_ip(&self) -> IpAddr {
        match &self.ip {
            Ip::V4(header) => header.source.into(),
            Ip::V6(header) => header.source.into(),
        }
    }

    /// The destination address.
    pub fn destination_ip(&self) -> IpAddr {
        match &self.ip {
            Ip::V4(header) => header.destination.into(),
            Ip::V6(header) => header.destination.into(),
        }
    }

    /// Changes the source address, and the port if the transport has ports.
    pub fn set_source(&mut self, source: SocketAddr) {
        match (&mut self.ip, source.ip()) {
            (Ip::V4(header), IpAddr::V4(ip)) => header.source = ip,
            (Ip::V6(header), ip) => header.source = as_v6(ip),
            (Ip::V4(header), IpAddr::V6(ip)) => self.ip = Ip::V6(Ipv6::new(ip, header.destination.to_ipv6_mapped())),
        }
        if let Some((port, _)) = self.transport.ports_mut() {
            *port = source.port();
        }
    }

    /// Changes the destination address, and the port if the transport has ports.
    pub fn set_destination(&mut self, destination: SocketAddr) {
        match (&mut self.ip, destination.ip()) {
            (Ip::V4(header), IpAddr::V4(ip)) => header.destination = ip,
            (Ip::V6(header), ip) => header.destination = as_v6(ip),
            (Ip::V4(header), IpAddr::V6(ip)) => self.ip = Ip::V6(Ipv6::new(header.source.to_ipv6_mapped(), ip)),
        }
        if let Some((_, port)) = self.transport.ports_mut() {
            *port = destination.port();
        }
    }

    /// The IPv4 header, which the caller can change; `None` for IPv6.
    pub fn ipv4_mut(&mut self) -> Option<&mut Ipv4> {
        match &mut self.ip {
            Ip::V4(header) => Some(header),
            Ip::V6(_) => None,
        }
    }
}

impl Transport {
    /// The source and destination port, if the transport has ports.
    pub fn ports_mut(&mut self) -> Option<(&mut u16, &mut u16)> {
        match self {
            Self::Tcp(tcp) => Some((&mut tcp.source, &mut tcp.destination)),
            Self::Udp(udp) => Some((&mut udp.source, &mut udp.destination)),
            Self::Sctp(sctp) => Some((&mut sctp.source, &mut sctp.destination)),
            Self::Icmp(_) | Self::Raw { .. } => None,
        }
    }

    /// The checksum field, if the transport has an Internet checksum.
    pub fn checksum_mut(&mut self) -> Option<&mut Checksum> {
        match self {
            Self::Tcp(tcp) => Some(&mut tcp.checksum),
            Self::Udp(udp) => Some(&mut udp.checksum),
            Self::Icmp(icmp) => Some(&mut icmp.checksum),
            Self::Sctp(_) | Self::Raw { .. } => None,
        }
    }
}

impl Default for Ethernet {
    fn default() -> Self {
        // Both MAC addresses are locally administered, so no vendor assigns them to a device.
        Self { destination: [2, 0, 0, 0, 0, 0x10], source: [2, 0, 0, 0, 0, 0x02], vlans: Vec::new() }
    }
}

impl Ip {
    fn header_length(&self) -> usize {
        match self {
            Self::V4(header) => 20 + header.options.len().next_multiple_of(4),
            Self::V6(_) => 40,
        }
    }
}

impl Ipv4 {
    fn new(source: Ipv4Addr, destination: Ipv4Addr) -> Self {
        Self {
            source,
            destination,
            tos: 0,
            identification: 0x4e50,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            ttl: 64,
            options: Vec::new(),
            checksum: Checksum::Right,
        }
    }
}

impl Ipv6 {
    fn new(source: Ipv6Addr, destination: Ipv6Addr) -> Self {
        Self { source, destination, traffic_class: 0, flow_label: 0, hop_limit: 64 }
    }
}

fn as_v6(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}
