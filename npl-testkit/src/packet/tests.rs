// SPDX-License-Identifier: Apache-2.0

use super::protocol_number::UDP;
use super::tcp_flags::{ACK, PSH, SYN};
use super::*;

fn client() -> SocketAddr {
    "198.51.100.2:43210".parse().unwrap()
}

fn node() -> SocketAddr {
    "192.0.2.10:61000".parse().unwrap()
}

#[track_caller]
fn check_round_trip(packet: &Packet) {
    assert_eq!(Packet::parse(&packet.build()).as_ref(), Ok(packet));
}

#[test]
fn tcp_with_options_survives_the_round_trip() {
    let mut packet = Packet::tcp(client(), node(), SYN, b"");
    let Transport::Tcp(tcp) = &mut packet.transport else { unreachable!() };
    tcp.options = vec![2, 4, 5, 0xb4];
    packet.ipv4_mut().unwrap().options = vec![7, 7, 4, 0, 0, 0, 0, 0];
    check_round_trip(&packet);
}

#[test]
fn every_checksum_survives_the_round_trip() {
    for checksum in [Checksum::Right, Checksum::Zero, Checksum::Partial, Checksum::Wrong(0x1234)] {
        let mut packet = Packet::udp(client(), node(), b"odd");
        *packet.transport.checksum_mut().unwrap() = checksum;
        check_round_trip(&packet);
    }
}

#[test]
fn vlan_ipv6_and_fragments_survive_the_round_trip() {
    let client = "[2001:db8:0:2::2]:43210".parse().unwrap();
    let mut packet = Packet::tcp(client, "[2001:db8:0:1::10]:61000".parse().unwrap(), ACK | PSH, b"hello");
    packet.ethernet.as_mut().unwrap().vlans = vec![100, 200];
    let Ip::V6(header) = &mut packet.ip else { unreachable!() };
    (header.traffic_class, header.flow_label) = (0xb8, 0xa_bcde);
    check_round_trip(&packet);
    let raw = Transport::Raw { protocol: UDP, bytes: vec![1, 2, 3, 4] };
    let mut fragment = Packet::new("198.51.100.2".parse().unwrap(), "192.0.2.10".parse().unwrap(), raw);
    let header = fragment.ipv4_mut().unwrap();
    (header.dont_fragment, header.fragment_offset) = (false, 185);
    check_round_trip(&fragment);
}

#[test]
fn icmp_error_quotes_the_packet_and_survives_the_round_trip() {
    let quoted = Packet::udp(node(), client(), b"too long");
    let error = Packet::icmp_error("203.0.113.1".parse().unwrap(), 3, 4, &quoted, 8);
    let Transport::Icmp(icmp) = &error.transport else { unreachable!() };
    assert_eq!(icmp.payload.len(), 28);
    assert_eq!(error.destination_ip(), node().ip());
    check_round_trip(&error);
}

#[test]
fn bytes_match_the_standards() {
    let packet = Packet::udp(client(), node(), b"hi");
    #[rustfmt::skip]
    let expected = [
        2, 0, 0, 0, 0, 0x10, 2, 0, 0, 0, 0, 0x02, 0x08, 0x00,
        0x45, 0, 0, 30, 0x4e, 0x50, 0x40, 0, 64, 17, 0x00, 0x3f, 198, 51, 100, 2, 192, 0, 2, 10,
        0xa8, 0xca, 0xee, 0x48, 0, 10, 0x14, 0x1d, b'h', b'i',
    ];
    assert_eq!(packet.build(), expected);
}

#[test]
fn truncated_and_non_ip_frames_are_reported() {
    let bytes = Packet::tcp(client(), node(), SYN, b"").build();
    assert_eq!(Packet::parse(&bytes[..10]), Err(ParseError::Short("Ethernet")));
    assert_eq!(Packet::parse(&bytes[..20]), Err(ParseError::Short("IPv4")));
    assert_eq!(Packet::parse(&bytes[..40]), Err(ParseError::Length("IPv4")));
    let mut arp = bytes;
    arp[12..14].copy_from_slice(&0x0806_u16.to_be_bytes());
    assert_eq!(Packet::parse(&arp), Err(ParseError::NotIp(0x0806)));
}
