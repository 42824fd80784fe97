// SPDX-License-Identifier: Apache-2.0
//! Builds bytes from packet values.

use super::checksum::{Sums, pseudo_header};
use super::protocol_number::{ICMP, ICMPV6, SCTP, TCP, UDP};
use super::{Checksum, Ethernet, Icmp, Ip, Ipv4, Ipv6, Packet, Tcp, Transport, Udp};

/// The `EtherType` of an IEEE 802.1Q tag.
pub(super) const ETHERTYPE_VLAN: u16 = 0x8100;
/// `EtherType` of IPv4.
pub(super) const ETHERTYPE_IPV4: u16 = 0x0800;
/// `EtherType` of IPv6.
pub(super) const ETHERTYPE_IPV6: u16 = 0x86dd;

/// The offset of the checksum in the IPv4 header; the next constants are the offsets in other headers.
const IPV4_CHECKSUM: usize = 10;
const TCP_CHECKSUM: usize = 16;
const UDP_CHECKSUM: usize = 6;
const ICMP_CHECKSUM: usize = 2;

impl Packet {
    /// The bytes on the wire, or in a socket buffer if the checksum is [`Checksum::Partial`].
    ///
    /// # Panics
    /// Panics if a length does not fit its field, which is an error of the test.
    pub fn build(&self) -> Vec<u8> {
        let (protocol, transport) = self.transport.build(&self.ip);
        let mut bytes = self.ethernet.as_ref().map(|ethernet| ethernet.build(&self.ip)).unwrap_or_default();
        match &self.ip {
            Ip::V4(header) => bytes.extend(header.build(protocol, transport.len())),
            Ip::V6(header) => bytes.extend(header.build(protocol, transport.len())),
        }
        bytes.extend(transport);
        bytes
    }
}

impl Ethernet {
    fn build(&self, ip: &Ip) -> Vec<u8> {
        let mut bytes = [self.destination, self.source].concat();
        for vlan in &self.vlans {
            bytes.extend(ETHERTYPE_VLAN.to_be_bytes());
            bytes.extend(vlan.to_be_bytes());
        }
        let kind = match ip {
            Ip::V4(_) => ETHERTYPE_IPV4,
            Ip::V6(_) => ETHERTYPE_IPV6,
        };
        bytes.extend(kind.to_be_bytes());
        bytes
    }
}

impl Ipv4 {
    fn build(&self, protocol: u8, payload: usize) -> Vec<u8> {
        let options = padded(&self.options);
        let length = 20 + options.len();
        let words = fit::<u8>(length / 4);
        let fragment =
            u16::from(self.dont_fragment) << 14 | u16::from(self.more_fragments) << 13 | self.fragment_offset;
        let mut bytes = vec![0x40 | words, self.tos];
        bytes.extend(fit::<u16>(length + payload).to_be_bytes());
        bytes.extend(self.identification.to_be_bytes());
        bytes.extend(fragment.to_be_bytes());
        bytes.extend([self.ttl, protocol, 0, 0]);
        bytes.extend(self.source.octets());
        bytes.extend(self.destination.octets());
        bytes.extend(options);
        let sums = Sums::plain(&bytes);
        put(&mut bytes, IPV4_CHECKSUM, sums.value(self.checksum));
        bytes
    }
}

impl Ipv6 {
    fn build(&self, protocol: u8, payload: usize) -> Vec<u8> {
        let first = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow_label & 0xf_ffff;
        let mut bytes = first.to_be_bytes().to_vec();
        bytes.extend(fit::<u16>(payload).to_be_bytes());
        bytes.extend([protocol, self.hop_limit]);
        bytes.extend(self.source.octets());
        bytes.extend(self.destination.octets());
        bytes
    }
}

impl Transport {
    fn build(&self, ip: &Ip) -> (u8, Vec<u8>) {
        match self {
            Self::Tcp(tcp) => (TCP, with_checksum(ip, TCP, tcp.build(), TCP_CHECKSUM, tcp.checksum)),
            Self::Udp(udp) => (UDP, with_checksum(ip, UDP, udp.build(), UDP_CHECKSUM, udp.checksum)),
            Self::Sctp(sctp) => (SCTP, sctp.build()),
            Self::Icmp(icmp) => {
                let protocol = if matches!(ip, Ip::V4(_)) { ICMP } else { ICMPV6 };
                (protocol, with_checksum(ip, protocol, icmp.build(), ICMP_CHECKSUM, icmp.checksum))
            }
            Self::Raw { protocol, bytes } => (*protocol, bytes.clone()),
        }
    }
}

impl Tcp {
    fn build(&self) -> Vec<u8> {
        let options = padded(&self.options);
        let words = fit::<u8>((20 + options.len()) / 4);
        let mut bytes = [self.source.to_be_bytes(), self.destination.to_be_bytes()].concat();
        bytes.extend(self.sequence.to_be_bytes());
        bytes.extend(self.acknowledgement.to_be_bytes());
        bytes.extend([words << 4, self.flags]);
        bytes.extend(self.window.to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend(options);
        bytes.extend(&self.payload);
        bytes
    }
}

impl Udp {
    fn build(&self) -> Vec<u8> {
        let length = fit::<u16>(8 + self.payload.len());
        let mut bytes = [self.source, self.destination, length, 0].map(u16::to_be_bytes).concat();
        bytes.extend(&self.payload);
        bytes
    }
}

impl Icmp {
    fn build(&self) -> Vec<u8> {
        let mut bytes = vec![self.kind, self.code, 0, 0];
        bytes.extend(self.rest);
        bytes.extend(&self.payload);
        bytes
    }
}

/// Computes the checksums of a transport header and payload whose checksum field is zero. ICMP over IPv4 has no pseudo
/// header.
pub(super) fn transport_sums(ip: &Ip, protocol: u8, bytes: &[u8]) -> Sums {
    if protocol == ICMP {
        return Sums::plain(bytes);
    }
    Sums::transport(&pseudo_header(ip, protocol, bytes.len()), bytes, protocol == UDP)
}

fn with_checksum(ip: &Ip, protocol: u8, mut bytes: Vec<u8>, offset: usize, wanted: Checksum) -> Vec<u8> {
    let sums = transport_sums(ip, protocol, &bytes);
    put(&mut bytes, offset, sums.value(wanted));
    bytes
}

fn put(bytes: &mut [u8], offset: usize, value: u16) {
    bytes[offset..offset + 2].copy_from_slice(&value.to_be_bytes());
}

/// Pads options to a multiple of four bytes; zero is the end-of-options option.
fn padded(options: &[u8]) -> Vec<u8> {
    let mut options = options.to_vec();
    options.resize(options.len().next_multiple_of(4), 0);
    options
}

#[expect(clippy::expect_used, reason = "an unrepresentable packet is an error of the test")]
fn fit<T: TryFrom<usize, Error: std::fmt::Debug>>(value: usize) -> T {
    value.try_into().expect("the length exceeds its field")
}
