// SPDX-License-Identifier: Apache-2.0
//! Tests IPv6 packets with extension headers between the IPv6 header and the transport header.

use npl_agent::core::model::Family;
use npl_testkit::packet::Packet;
use npl_testkit::packet::tcp_flags::{ACK, SYN};

use super::fragments::{L3, V6_HEADER};
use super::scene::{SECOND_NODE_PORT, Udp, client, from, node, node_ip, pod, tcp, to, udp, with_mappings_of};
use crate::counters::{first_request, reason, reply, request};
use crate::lab::{Lab, NEXT, Outcome};
use npl_common::names::{PROG_EGRESS, PROG_INGRESS};
use npl_common::reason::Reason;

pub(crate) const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
pub(crate) const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
pub(crate) const DESTINATION_OPTIONS: u8 = 60;

/// Offsets of IPv6 header fields in a frame.
const PAYLOAD_LENGTH: usize = L3 + 4;
const NEXT_HEADER: usize = L3 + 6;
const HEADER_END: usize = L3 + V6_HEADER;

/// Returns the frame of `packet` with additional extension headers. Each element of `extensions` is the type of a
/// header, and the header's content after the two bytes for next header and length.
pub(crate) fn extended(packet: &Packet, extensions: &[(u8, &[u8])]) -> Vec<u8> {
    let mut frame = packet.build();
    let mut next = frame[NEXT_HEADER];
    for (kind, content) in extensions.iter().rev() {
        let units = u8::try_from((content.len() + 2) / 8 - 1).unwrap();
        let header = [&[next, units], *content].concat();
        assert_eq!(header.len() % 8, 0, "an extension header is a multiple of eight bytes");
        frame.splice(HEADER_END..HEADER_END, header);
        next = *kind;
    }
    frame[NEXT_HEADER] = next;
    let length = u16::try_from(frame.len() - HEADER_END).unwrap();
    frame[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 2].copy_from_slice(&length.to_be_bytes());
    frame
}

fn in_v6(test: impl Fn(&mut Lab) + Send + Sync) {
    with_mappings_of(Family::V6, test);
}

/// Padding options of six and of fourteen bytes (RFC 8200, section 4.2).
pub(crate) const SIX: &[u8] = &[1, 4, 0, 0, 0, 0];
const FOURTEEN: &[u8] = &[1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn extension_headers_are_kept() {
    in_v6(|lab| {
        let longest = vec![0; 2046];
        let chains: [&[(u8, &[u8])]; 5] = [
            &[(HOP_BY_HOP, SIX)],
            &[(DESTINATION_OPTIONS, FOURTEEN)],
            &[(HOP_BY_HOP, SIX), (DESTINATION_OPTIONS, SIX), (DESTINATION_OPTIONS, FOURTEEN)],
            &[(DESTINATION_OPTIONS, SIX); 6],
            &[(DESTINATION_OPTIONS, &longest)],
        ];
        for (number, chain) in chains.into_iter().enumerate() {
            let packet = udp(client(), node(), b"behind extensions");
            let frame = extended(&packet, chain);
            let change = if number == 0 { first_request } else { request };
            let changes = change("61000/udp", frame.len());
            let expected = Outcome { action: NEXT, bytes: extended(&to(&packet, pod()), chain), changes };
            assert_eq!(lab.run(PROG_INGRESS, &frame), expected, "{chain:?}");
        }
        let answer = tcp(pod(), client(), ACK, b"");
        lab.ingress(&tcp(client(), node(), SYN, b""));
        let chain: &[(u8, &[u8])] = &[(DESTINATION_OPTIONS, SIX)];
        let frame = extended(&answer, chain);
        let changes = reply("61000/tcp", frame.len());
        let expected = Outcome { action: NEXT, bytes: extended(&from(&answer, node()), chain), changes };
        assert_eq!(lab.run(PROG_EGRESS, &frame), expected);
    });
}

#[test]
fn atomic_fragment_is_translated() {
    in_v6(|lab| {
        let packet = udp(client(), node(), b"an atomic fragment");
        let chain: &[(u8, &[u8])] = &[(FRAGMENT, &[0, 0, 0, 0, 0, 7])];
        let frame = extended(&packet, chain);
        let changes = first_request("61000/udp", frame.len());
        let expected = Outcome { action: NEXT, bytes: extended(&to(&packet, pod()), chain), changes };
        assert_eq!(lab.run(PROG_INGRESS, &frame), expected);
    });
}

/// Asserts that the program leaves the frame unchanged and counts exactly `changes`.
#[track_caller]
fn passes(lab: &mut Lab, program: &'static str, frame: Vec<u8>, changes: Vec<crate::counters::Change>) {
    assert_eq!(lab.run(program, &frame), Outcome { action: NEXT, bytes: frame, changes });
}

#[test]
fn packet_whose_ports_cannot_be_found_is_passed_unchanged() {
    in_v6(|lab| {
        let packet = udp(client(), node(), b"hello");
        // An authentication header covers the addresses, so a translated packet would be invalid.
        passes(lab, PROG_INGRESS, extended(&packet, &[(AUTHENTICATION, &[0; 14])]), vec![]);
        // This header's length field exceeds the packet's length.
        let mut too_long = extended(&packet, &[(DESTINATION_OPTIONS, SIX)]);
        too_long[HEADER_END + 1] = 0xff;
        passes(lab, PROG_INGRESS, too_long, vec![]);
    });
}

#[test]
fn ipv6_extension_headers_without_an_end_are_counted_for_packets_to_the_node() {
    in_v6(|lab| {
        let for_the_node = udp(client(), node(), b"hello");
        let for_another_host = udp(client(), (pod().ip(), 61_000).into(), b"hello");
        for (packet, changes) in [(for_the_node, reason(Reason::Ipv6ExtensionHeaders)), (for_another_host, vec![])] {
            let too_many = extended(&packet, &[(DESTINATION_OPTIONS, SIX); 7]);
            let cut = extended(&packet, &[(DESTINATION_OPTIONS, SIX)])[..HEADER_END + 2].to_vec();
            let segments_left = extended(&packet, &[(ROUTING, &[4, 1, 0, 0, 0, 0])]);
            for frame in [too_many, cut, segments_left] {
                passes(lab, PROG_INGRESS, frame, changes.clone());
            }
        }
        // The program does not find the ports behind seven extension headers. At egress, the address alone does not
        // show whether the packet belongs to a mapping, so no reason is counted.
        let answer = extended(&udp(pod(), client(), b"hello"), &[(DESTINATION_OPTIONS, SIX); 7]);
        passes(lab, PROG_EGRESS, answer, vec![]);
    });
}

#[test]
fn source_route_without_segments_left_is_translated() {
    in_v6(|lab| {
        let packet = tcp(client(), node(), SYN, b"");
        let chain: &[(u8, &[u8])] = &[(ROUTING, &[4, 0, 0, 0, 0, 0])];
        let frame = extended(&packet, chain);
        let changes = first_request("61000/tcp", frame.len());
        let expected = Outcome { action: NEXT, bytes: extended(&to(&packet, pod()), chain), changes };
        assert_eq!(lab.run(PROG_INGRESS, &frame), expected);
    });
}

/// The node address and the Pod address have the same one's complement sum, so the translation of the address does not
/// change the UDP checksum, and only the translation of the port does.
#[test]
fn mapping_between_addresses_with_equal_checksums_is_translated() {
    in_v6(|lab| {
        // This address is the Node's address with its first two 16-bit groups exchanged.
        let same_sum: std::net::Ipv6Addr = "db8:2001:0:1::10".parse().unwrap();
        lab.add(Udp, SECOND_NODE_PORT, (same_sum, 53).into(), 7);
        let request = udp(client(), (node_ip(), SECOND_NODE_PORT).into(), b"the same sum");
        let expected = to(&request, (same_sum, 53).into());
        lab.ingress(&request).is(&expected, first_request("61001/udp", expected.build().len()));
    });
}
