// SPDX-License-Identifier: Apache-2.0
//! Tests ICMP errors, which quote the beginning of another packet.

use std::net::{IpAddr, SocketAddr};

use npl_agent::core::model::Family;
use npl_common::names::{PROG_EGRESS, PROG_INGRESS};
use npl_common::reason::Reason;
use npl_testkit::packet::tcp_flags::{ACK, PSH, SYN};
use npl_testkit::packet::{Checksum, Packet, Transport};

use super::extensions::{DESTINATION_OPTIONS, SIX, extended};
use super::scene::{
    CLIENT_PORT, DIRECT_ISNS, NODE_PORT, POD_PORT, Tcp, Udp, client, client_ip, establish, family, flow, from, length,
    node, node_ip, pod, pod_ip, random_packets, router_ip, second_node_ip, tcp, to, udp, unused_ip, with_isns,
    with_mappings, with_mappings_of,
};
use crate::counters::{Change, reason, reply, request};
use crate::lab::{Lab, NEXT, Outcome};

/// Returns types and codes of ICMP errors: unreachable, too large, time exceeded, parameter problem, and source quench
/// (IPv4) or a reserved type (IPv6).
pub(crate) fn kinds() -> [(u8, u8); 6] {
    if family() == Family::V4 {
        [(3, 1), (3, 3), (3, 4), (11, 0), (12, 0), (4, 0)]
    } else {
        [(1, 0), (1, 4), (2, 0), (3, 0), (4, 1), (127, 0)]
    }
}

/// Type and code of the ICMP error that reports the path MTU.
pub(crate) fn too_large() -> (u8, u8) {
    kinds()[2]
}

/// Returns an error from `sender` that quotes the IP header of `quoted` and the `bytes` bytes after this header.
pub(super) fn error((kind, code): (u8, u8), sender: IpAddr, quoted: &Packet, bytes: usize) -> Packet {
    let mut error = Packet::icmp_error(sender, kind, code, quoted, bytes);
    let Transport::Icmp(icmp) = &mut error.transport else { unreachable!("the packet is an ICMP error") };
    icmp.rest = [0, 0, 5, 20];
    error.to_this_machine()
}

/// Returns an error about a reply: as the Node receives it, and as it must arrive at the Pod.
pub(crate) fn about_reply(kind: (u8, u8), reply: &Packet, bytes: usize) -> (Packet, Packet) {
    (error(kind, router_ip(), &from(reply, node()), bytes), error(kind, router_ip(), &from(reply, pod()), bytes))
}

/// Returns an error about a request: as it leaves the Pod, and as the client must receive it.
pub(crate) fn about_request(kind: (u8, u8), sender: IpAddr, request: &Packet, bytes: usize) -> (Packet, Packet) {
    (error(kind, sender, &to(request, pod()), bytes), error(kind, node_ip(), &to(request, node()), bytes))
}

#[track_caller]
fn passes(lab: &mut Lab, program: &'static str, frame: Vec<u8>, changes: Vec<Change>) {
    assert_eq!(lab.run(program, &frame), Outcome { action: NEXT, bytes: frame, changes }, "{program}");
}

/// Opens a TCP flow and a UDP flow.
fn open(lab: &mut Lab) {
    lab.ingress(&tcp(client(), node(), SYN, b""));
    lab.ingress(&udp(client(), node(), b"hello"));
}

/// Opens a TCP flow and a UDP flow, and makes the Pod reply on both.
fn exchange(lab: &mut Lab) {
    establish(lab);
    lab.ingress(&udp(client(), node(), b"hello"));
    lab.egress(&udp(pod(), client(), b"hello"));
}

#[test]
fn error_about_a_reply_goes_to_the_pod() {
    with_mappings(|lab| {
        exchange(lab);
        for kind in kinds() {
            // Quoted bytes of the transport header: the minimum of RFC 792, enough to include the checksum, and more.
            for bytes in [8, 12, 18, 20, 64] {
                for (reply, mapping) in [
                    (tcp(pod(), client(), PSH | ACK, &[7; 100]), "61000/tcp"),
                    (udp(pod(), client(), &[7; 100]), "61000/udp"),
                ] {
                    let (arrives, expected) = about_reply(kind, &reply, bytes);
                    lab.ingress(&arrives).is(&expected, request(mapping, length(&arrives)));
                }
            }
        }
    });
}

#[test]
fn error_about_a_request_comes_from_the_node_for_any_sender() {
    with_mappings(|lab| {
        open(lab);
        errors_come_from_the_node(lab, SYN);
        establish(lab);
        errors_come_from_the_node(lab, PSH | ACK);
    });
}

/// Asserts that errors about a segment with these flags and about a datagram, from any sender, leave with the Node's
/// address as source.
#[track_caller]
fn errors_come_from_the_node(lab: &mut Lab, flags: u8) {
    for kind in kinds() {
        for bytes in [8, 12, 18, 20, 64] {
            for sender in [pod_ip(), node_ip(), second_node_ip(), unused_ip()] {
                for (request, mapping) in [
                    (tcp(client(), node(), flags, &[7; 100]), "61000/tcp"),
                    (udp(client(), node(), &[7; 100]), "61000/udp"),
                ] {
                    let (leaves, expected) = about_request(kind, sender, &request, bytes);
                    lab.egress(&leaves).is(&expected, reply(mapping, length(&leaves)));
                }
            }
        }
    }
}

/// Connection tracking has no established entry of the connection, and the Pod sends an ICMP error about the client's
/// segment. The error must leave with the Node's address as source. Its quote is longer than the minimum of RFC 792, so
/// it contains the segment's sequence and acknowledgement number, by which NPL recognizes the connection.
#[test]
fn error_about_a_request_in_the_middle_of_a_lost_connection_comes_from_the_node() {
    with_mappings(|lab| {
        let request = tcp(client(), node(), PSH | ACK, &[7; 100]);
        lab.ingress(&request);
        for bytes in [12, 18, 20, 64] {
            let (leaves, expected) = about_request(too_large(), pod_ip(), &request, bytes);
            lab.egress(&leaves).is(&expected, reply("61000/tcp", length(&leaves)));
        }
    });
}

/// A forged SYN with the same flow tuple and other sequence numbers has created an entry in the half-open cache. A
/// Pod's ICMP error about a segment of a direct connection must nevertheless leave unchanged.
#[test]
fn error_about_a_direct_segment_is_unchanged_despite_a_handshake_with_other_numbers() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        let direct = with_isns(tcp(client(), node(), SYN, b""), DIRECT_ISNS);
        let (leaves, _) = about_request(too_large(), pod_ip(), &direct, 20);
        lab.egress(&leaves).is(&leaves, reason(Reason::UntrackedReply));
    });
}

#[test]
fn error_about_a_request_of_an_established_flow_quotes_the_clients_nat_address() {
    with_mappings(|lab| {
        establish(lab);
        let request = tcp(client(), node(), ACK, b"too long for the Pod's link");
        let (leaves, expected) = about_request(too_large(), second_node_ip(), &request, 20);
        lab.egress(&leaves).is(&expected, reply("61000/tcp", length(&leaves)));
    });
}

#[test]
fn quoted_udp_checksum_of_zero_stays_zero() {
    with_mappings(|lab| {
        exchange(lab);
        let mut answer = udp(pod(), client(), b"no checksum");
        *answer.transport.checksum_mut().unwrap() = Checksum::Zero;
        let (arrives, expected) = about_reply(too_large(), &answer, 16);
        lab.ingress(&arrives).is(&expected, request("61000/udp", length(&arrives)));
        let mut question = udp(client(), node(), b"no checksum");
        *question.transport.checksum_mut().unwrap() = Checksum::Zero;
        let (leaves, expected) = about_request(too_large(), pod_ip(), &question, 16);
        lab.egress(&leaves).is(&expected, reply("61000/udp", length(&leaves)));
    });
}

#[test]
fn updated_checksums_of_errors_equal_a_full_computation() {
    with_mappings(|lab| {
        exchange(lab);
        for (number, packet) in random_packets(pod(), client(), 200).enumerate() {
            let (arrives, expected) = about_reply(too_large(), &packet, 8 + number % 40);
            assert_eq!(lab.ingress(&arrives).bytes, expected.build(), "{packet:?}");
        }
        for (number, packet) in random_packets(client(), node(), 200).enumerate() {
            let (leaves, expected) = about_request(too_large(), pod_ip(), &packet, 8 + number % 40);
            assert_eq!(lab.egress(&leaves).bytes, expected.build(), "{packet:?}");
        }
    });
}

#[test]
fn wrong_checksum_of_an_error_stays_wrong() {
    with_mappings(|lab| {
        exchange(lab);
        let (mut arrives, mut expected) = about_reply(too_large(), &udp(pod(), client(), b"hello"), 13);
        *arrives.transport.checksum_mut().unwrap() = Checksum::Wrong(0x1234);
        let outcome = lab.ingress(&arrives);
        let mut arrived = Packet::parse(&outcome.bytes).unwrap();
        let checksum = std::mem::replace(arrived.transport.checksum_mut().unwrap(), Checksum::Right);
        assert!(matches!(checksum, Checksum::Wrong(_)), "{checksum:?} was corrected by the translation");
        expected.ethernet.clone_from(&arrived.ethernet);
        assert_eq!(arrived, expected);
    });
}

#[test]
fn options_of_an_error_and_of_its_quote_are_kept() {
    with_mappings_of(Family::V4, |lab| {
        exchange(lab);
        let mut answer = tcp(pod(), client(), ACK, b"options");
        answer.ipv4_mut().unwrap().options = vec![1; 11];
        let (mut arrives, mut expected) = about_reply(too_large(), &answer, 20);
        for packet in [&mut arrives, &mut expected] {
            packet.ipv4_mut().unwrap().options = vec![1; 7];
        }
        lab.ingress(&arrives).is(&expected, request("61000/tcp", length(&arrives)));
    });
}

/// Returns an IPv6 error that has an extension header, and that quotes a packet with an extension header.
fn behind_extensions(sender: IpAddr, quoted: &Packet) -> Vec<u8> {
    let quoted_frame = extended(quoted, &[(DESTINATION_OPTIONS, SIX)]);
    let mut error = error(too_large(), sender, quoted, 8);
    let Transport::Icmp(icmp) = &mut error.transport else { unreachable!("the packet is an ICMP error") };
    icmp.payload = quoted_frame[14..].to_vec();
    extended(&error, &[(DESTINATION_OPTIONS, SIX)])
}

#[test]
fn extension_headers_of_an_error_and_of_its_quote_are_kept() {
    with_mappings_of(Family::V6, |lab| {
        exchange(lab);
        let answer = udp(pod(), client(), b"behind extensions");
        let frame = behind_extensions(router_ip(), &from(&answer, node()));
        let (bytes, changes) = (behind_extensions(router_ip(), &answer), request("61000/udp", frame.len()));
        assert_eq!(lab.run(PROG_INGRESS, &frame), Outcome { action: NEXT, bytes, changes });
        let question = udp(client(), node(), b"behind extensions");
        let frame = behind_extensions(pod_ip(), &to(&question, pod()));
        let (bytes, changes) = (behind_extensions(node_ip(), &question), reply("61000/udp", frame.len()));
        assert_eq!(lab.run(PROG_EGRESS, &frame), Outcome { action: NEXT, bytes, changes });
    });
}

#[test]
fn icmp_echo_and_redirect_are_passed_to_the_host() {
    with_mappings(|lab| {
        exchange(lab);
        let (echo, redirect) = if family() == Family::V4 { ([8, 0], 5) } else { ([128, 129], 137) };
        for kind in [echo[0], echo[1], redirect] {
            let (arrives, _) = about_reply((kind, 0), &udp(pod(), client(), b"hello"), 8);
            passes(lab, PROG_INGRESS, arrives.build(), vec![]);
            let (leaves, _) = about_request((kind, 0), pod_ip(), &udp(client(), node(), b"hello"), 8);
            passes(lab, PROG_EGRESS, leaves.build(), vec![]);
        }
    });
}

#[test]
fn error_about_an_unmapped_packet_is_passed_unchanged() {
    with_mappings(|lab| {
        exchange(lab);
        let kind = too_large();
        let other_port = udp((node_ip(), 22).into(), client(), b"hello");
        let by_direct_client = udp((pod_ip(), POD_PORT).into(), client(), b"hello");
        let ping = Packet::new(node_ip(), client_ip(), Transport::Raw { protocol: 47, bytes: vec![0; 16] });
        for quoted in [other_port, by_direct_client, ping.to_this_machine()] {
            passes(lab, PROG_INGRESS, error(kind, router_ip(), &quoted, 8).build(), vec![]);
        }
        let other_pod_port = udp(client(), (pod_ip(), POD_PORT + 1).into(), b"hello");
        passes(lab, PROG_EGRESS, error(kind, pod_ip(), &other_pod_port, 8).build(), vec![]);
    });
}

#[test]
fn no_mapping_is_counted_for_an_error_about_an_unmapped_port() {
    with_mappings(|lab| {
        let quoted = tcp((node_ip(), 61_050).into(), client(), ACK, b"");
        passes(lab, PROG_INGRESS, error(too_large(), router_ip(), &quoted, 8).build(), reason(Reason::NoMapping));
    });
}

#[test]
fn untracked_reply_is_counted_for_an_error_about_a_direct_request() {
    with_mappings(|lab| {
        let direct = udp(client(), pod(), b"hello");
        passes(lab, PROG_EGRESS, error(too_large(), pod_ip(), &direct, 8).build(), reason(Reason::UntrackedReply));
    });
}

#[test]
fn bad_quote_is_counted_for_a_truncated_quote() {
    with_mappings(|lab| {
        exchange(lab);
        let header = if family() == Family::V4 { 20 } else { 40 };
        let (arrives, _) = about_reply(too_large(), &udp(pod(), client(), b"hello"), 8);
        let (leaves, _) = about_request(too_large(), pod_ip(), &udp(client(), node(), b"hello"), 8);
        for (program, packet) in [(PROG_INGRESS, arrives), (PROG_EGRESS, leaves)] {
            for bytes in (0..header + 4).step_by(2) {
                let mut short = packet.clone();
                let Transport::Icmp(icmp) = &mut short.transport else { unreachable!("the packet is an ICMP error") };
                icmp.payload.truncate(bytes);
                passes(lab, program, short.build(), reason(Reason::BadQuote));
            }
        }
    });
}

/// Bytes after the end of the packet, such as Ethernet padding, must not be read as a part of the quote.
#[test]
fn bad_quote_is_counted_although_padding_follows_the_packet() {
    with_mappings(|lab| {
        let (mut short, _) = about_reply(too_large(), &udp(pod(), client(), b"hello"), 8);
        let Transport::Icmp(icmp) = &mut short.transport else { unreachable!("the packet is an ICMP error") };
        let cut = icmp.payload.split_off(icmp.payload.len() - 6);
        let frame = [short.build(), cut].concat();
        passes(lab, PROG_INGRESS, frame, reason(Reason::BadQuote));
    });
}

#[test]
fn bad_quote_is_counted_for_another_address_or_a_later_fragment() {
    with_mappings(|lab| {
        exchange(lab);
        let mut elsewhere = error(too_large(), router_ip(), &udp(node(), client(), b"hello"), 8);
        elsewhere.set_destination((second_node_ip(), 0).into());
        passes(lab, PROG_INGRESS, elsewhere.build(), reason(Reason::BadQuote));
        let mut elsewhere = error(too_large(), pod_ip(), &udp(client(), pod(), b"hello"), 8);
        elsewhere.set_destination((unused_ip(), 0).into());
        passes(lab, PROG_EGRESS, elsewhere.build(), reason(Reason::BadQuote));
    });
    with_mappings_of(Family::V4, |lab| {
        let mut fragment = udp(node(), client(), b"looks like ports");
        let ip = fragment.ipv4_mut().unwrap();
        (ip.fragment_offset, ip.dont_fragment) = (185, false);
        passes(lab, PROG_INGRESS, error(too_large(), router_ip(), &fragment, 8).build(), reason(Reason::BadQuote));
    });
}

#[test]
fn bad_quote_is_counted_for_an_invalid_header() {
    with_mappings(|lab| {
        let (mut garbage, _) = about_reply(too_large(), &udp(pod(), client(), b"hello"), 64);
        for byte in [0_u8, 0x41, 0x4f, 0x6f, 0xff] {
            let Transport::Icmp(icmp) = &mut garbage.transport else { unreachable!("the packet is an ICMP error") };
            icmp.payload[0] = byte;
            // The changed byte makes the IP version or the header length invalid, or makes the header longer than the
            // packet. In IPv6, 0x6f is left out, because it is a valid first byte of an IPv6 header.
            if (family(), byte) != (Family::V6, 0x6f) {
                passes(lab, PROG_INGRESS, garbage.build(), reason(Reason::BadQuote));
            }
        }
    });
}

#[test]
fn icmp_error_neither_opens_nor_refreshes_a_flow() {
    with_mappings(|lab| {
        let (arrives, expected) = about_reply(too_large(), &tcp(pod(), client(), ACK, b""), 20);
        lab.ingress(&arrives).is(&arrives, reason(Reason::UntrackedError));
        assert_eq!((lab.slot(flow(Tcp)), lab.flow(flow(Tcp))), (None, None));
        establish(lab);
        let before = (lab.slot(flow(Tcp)), lab.flow(flow(Tcp)));
        lab.ingress(&arrives).is(&expected, request("61000/tcp", length(&arrives)));
        let (leaves, expected) = about_request(too_large(), pod_ip(), &tcp(client(), node(), ACK, b""), 20);
        lab.egress(&leaves).is(&expected, reply("61000/tcp", length(&leaves)));
        assert_eq!((lab.slot(flow(Tcp)), lab.flow(flow(Tcp))), before);
        lab.ingress(&udp(client(), node(), b"hello"));
        let before = lab.slot(flow(Udp));
        let (leaves, expected) = about_request(too_large(), pod_ip(), &udp(client(), node(), b"hello"), 8);
        for _ in 0..3 {
            lab.egress(&leaves).is(&expected, reply("61000/udp", length(&leaves)));
        }
        assert_eq!((lab.slot(flow(Udp)), lab.flow(flow(Udp))), (before, None));
    });
}

/// An ICMP error about a packet that belongs to no flow is not passed to a Pod. Otherwise, a forged error would lower
/// the path MTU from a Pod to any host.
#[test]
fn untracked_error_is_counted_for_an_error_about_a_packet_that_belongs_to_no_flow() {
    with_mappings(|lab| {
        let other_client: SocketAddr = (unused_ip(), CLIENT_PORT).into();
        let other_port: SocketAddr = (client_ip(), CLIENT_PORT + 1).into();
        let is_passed = |lab: &mut Lab, client: SocketAddr, kind, bytes| {
            for reply in [udp(pod(), client, &[7; 100]), tcp(pod(), client, PSH | ACK, &[7; 100])] {
                let (arrives, _) = about_reply(kind, &reply, bytes);
                passes(lab, PROG_INGRESS, arrives.build(), reason(Reason::UntrackedError));
            }
        };
        for (kind, bytes) in kinds().into_iter().zip([8, 12, 20, 64, 8, 8]) {
            for client in [other_client, other_port, client()] {
                is_passed(lab, client, kind, bytes);
            }
        }
        exchange(lab);
        for client in [other_client, other_port] {
            is_passed(lab, client, too_large(), 8);
        }
        let (arrives, expected) = about_reply(too_large(), &udp(pod(), client(), b"x"), 8);
        lab.ingress(&arrives).is(&expected, request("61000/udp", length(&arrives)));
        lab.remove(family(), Udp, NODE_PORT);
        passes(lab, PROG_INGRESS, arrives.build(), reason(Reason::NoMapping));
    });
}
