// SPDX-License-Identifier: Apache-2.0
//! ICMP errors, which are about another packet and quote its beginning.

use std::net::{IpAddr, SocketAddr};

use npl_agent::core::model::Family;
use npl_common::names::{PROG_EGRESS, PROG_INGRESS};
use npl_common::reason::Reason;
use npl_testkit::packet::tcp_flags::{ACK, PSH, SYN};
use npl_testkit::packet::{Checksum, Packet, Transport};

use super::extensions::{DESTINATION_OPTIONS, SIX, extended};
use super::scene::{
    CLIENT_PORT, NODE_PORT, POD_PORT, Tcp, Udp, client, client_ip, establish, family, flow, from, length, node,
    node_ip, pod, pod_ip, random_packets, router_ip, second_node_ip, strange_ip, tcp, to, udp, with_mappings,
    with_mappings_of,
};
use crate::counters::{Change, reason, reply, request};
use crate::lab::{Lab, NEXT, Outcome};

/// Types and codes of the errors: unreachable, too large, out of time, at fault; slow down, or one that nobody knows yet.
fn kinds() -> [(u8, u8); 6] {
    if family() == Family::V4 {
        [(3, 1), (3, 3), (3, 4), (11, 0), (12, 0), (4, 0)]
    } else {
        [(1, 0), (1, 4), (2, 0), (3, 0), (4, 1), (127, 0)]
    }
}

/// That which tells the largest size that fits.
pub(crate) fn too_large() -> (u8, u8) {
    kinds()[2]
}

/// An error from `sender` about `quoted`, of whose transport it quotes `bytes`.
fn error((kind, code): (u8, u8), sender: IpAddr, quoted: &Packet, bytes: usize) -> Packet {
    let mut error = Packet::icmp_error(sender, kind, code, quoted, bytes);
    let Transport::Icmp(icmp) = &mut error.transport else { unreachable!("an error was asked for") };
    icmp.rest = [0, 0, 5, 20];
    error.to_this_machine()
}

/// What the Pod gets of an error about a reply, and what the Node gets of it.
pub(crate) fn about_reply(kind: (u8, u8), reply: &Packet, bytes: usize) -> (Packet, Packet) {
    (error(kind, router_ip(), &from(reply, node()), bytes), error(kind, router_ip(), &from(reply, pod()), bytes))
}

/// What leaves the Node of an error about a request, and what the client gets of it.
pub(crate) fn about_request(kind: (u8, u8), sender: IpAddr, request: &Packet, bytes: usize) -> (Packet, Packet) {
    (error(kind, sender, &to(request, pod()), bytes), error(kind, node_ip(), &to(request, node()), bytes))
}

#[track_caller]
fn passes(lab: &mut Lab, program: &'static str, frame: Vec<u8>, changes: Vec<Change>) {
    assert_eq!(lab.run(program, &frame), Outcome { action: NEXT, bytes: frame, changes }, "{program}");
}

/// The client's first packets, which open a flow by each protocol.
fn open(lab: &mut Lab) {
    lab.ingress(&tcp(client(), node(), SYN, b""));
    lab.ingress(&udp(client(), node(), b"hello"));
}

#[test]
fn error_about_a_reply_goes_to_the_pod() {
    with_mappings(|lab| {
        for kind in kinds() {
            // As much as the standard demands, as much as a checksum needs, and more.
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
fn error_about_a_request_comes_from_the_node_whoever_sent_it() {
    with_mappings(|lab| {
        open(lab);
        for kind in kinds() {
            for bytes in [8, 12, 18, 20, 64] {
                for sender in [pod_ip(), node_ip(), second_node_ip(), strange_ip()] {
                    for (request, mapping) in [
                        (tcp(client(), node(), PSH | ACK, &[7; 100]), "61000/tcp"),
                        (udp(client(), node(), &[7; 100]), "61000/udp"),
                    ] {
                        let (leaves, expected) = about_request(kind, sender, &request, bytes);
                        lab.egress(&leaves).is(&expected, reply(mapping, length(&leaves)));
                    }
                }
            }
        }
    });
}

#[test]
fn error_about_a_request_of_an_established_flow_names_the_address_that_the_client_asked() {
    with_mappings(|lab| {
        establish(lab);
        let request = tcp(client(), node(), ACK, b"too long for the Pod's link");
        let (leaves, expected) = about_request(too_large(), second_node_ip(), &request, 20);
        lab.egress(&leaves).is(&expected, reply("61000/tcp", length(&leaves)));
    });
}

#[test]
fn quoted_checksum_of_zero_says_that_there_is_none_and_stays() {
    with_mappings(|lab| {
        open(lab);
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
fn changed_checksums_of_errors_are_those_of_a_full_sum() {
    with_mappings(|lab| {
        open(lab);
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
        let (mut arrives, mut expected) = about_reply(too_large(), &udp(pod(), client(), b"hello"), 13);
        *arrives.transport.checksum_mut().unwrap() = Checksum::Wrong(0x1234);
        let outcome = lab.ingress(&arrives);
        let mut arrived = Packet::parse(&outcome.bytes).unwrap();
        let checksum = std::mem::replace(arrived.transport.checksum_mut().unwrap(), Checksum::Right);
        assert!(matches!(checksum, Checksum::Wrong(_)), "{checksum:?} was mended on the way");
        expected.ethernet.clone_from(&arrived.ethernet);
        assert_eq!(arrived, expected);
    });
}

#[test]
fn options_of_an_error_and_of_what_it_quotes_are_kept() {
    with_mappings_of(Family::V4, |lab| {
        let mut answer = tcp(pod(), client(), ACK, b"options");
        answer.ipv4_mut().unwrap().options = vec![1; 11];
        let (mut arrives, mut expected) = about_reply(too_large(), &answer, 20);
        for packet in [&mut arrives, &mut expected] {
            packet.ipv4_mut().unwrap().options = vec![1; 7];
        }
        lab.ingress(&arrives).is(&expected, request("61000/tcp", length(&arrives)));
    });
}

/// An IPv6 error about a packet with an extension header; the error has one too.
fn behind_extensions(sender: IpAddr, quoted: &Packet) -> Vec<u8> {
    let quoted_frame = extended(quoted, &[(DESTINATION_OPTIONS, SIX)]);
    let mut error = error(too_large(), sender, quoted, 8);
    let Transport::Icmp(icmp) = &mut error.transport else { unreachable!("an error was asked for") };
    icmp.payload = quoted_frame[14..].to_vec();
    extended(&error, &[(DESTINATION_OPTIONS, SIX)])
}

#[test]
fn extension_headers_of_an_error_and_of_what_it_quotes_are_kept() {
    with_mappings_of(Family::V6, |lab| {
        open(lab);
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
fn echo_and_other_messages_are_the_hosts() {
    with_mappings(|lab| {
        open(lab);
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
fn error_about_what_is_not_ours_is_not_ours() {
    with_mappings(|lab| {
        open(lab);
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
fn no_mapping_leaves_an_error_about_a_reply_to_the_host() {
    with_mappings(|lab| {
        let quoted = tcp((node_ip(), 61_050).into(), client(), ACK, b"");
        passes(lab, PROG_INGRESS, error(too_large(), router_ip(), &quoted, 8).build(), reason(Reason::NoMapping));
    });
}

#[test]
fn untracked_reply_is_also_an_error_about_a_direct_request() {
    with_mappings(|lab| {
        let direct = udp(client(), pod(), b"hello");
        passes(lab, PROG_EGRESS, error(too_large(), pod_ip(), &direct, 8).build(), reason(Reason::UntrackedReply));
    });
}

#[test]
fn bad_quote_that_ends_too_early_is_left_alone() {
    with_mappings(|lab| {
        open(lab);
        let header = if family() == Family::V4 { 20 } else { 40 };
        let (arrives, _) = about_reply(too_large(), &udp(pod(), client(), b"hello"), 8);
        let (leaves, _) = about_request(too_large(), pod_ip(), &udp(client(), node(), b"hello"), 8);
        for (program, packet) in [(PROG_INGRESS, arrives), (PROG_EGRESS, leaves)] {
            for bytes in (0..header + 4).step_by(2) {
                let mut short = packet.clone();
                let Transport::Icmp(icmp) = &mut short.transport else { unreachable!("an error was asked for") };
                icmp.payload.truncate(bytes);
                passes(lab, program, short.build(), reason(Reason::BadQuote));
            }
        }
    });
}

/// What stands behind the packet's end, as padding of a frame does, is none of the quote.
#[test]
fn bad_quote_is_not_completed_by_what_follows_the_packet() {
    with_mappings(|lab| {
        let (mut short, _) = about_reply(too_large(), &udp(pod(), client(), b"hello"), 8);
        let Transport::Icmp(icmp) = &mut short.transport else { unreachable!("an error was asked for") };
        let cut = icmp.payload.split_off(icmp.payload.len() - 6);
        let frame = [short.build(), cut].concat();
        passes(lab, PROG_INGRESS, frame, reason(Reason::BadQuote));
    });
}

#[test]
fn bad_quote_of_another_address_or_of_a_later_fragment_is_left_alone() {
    with_mappings(|lab| {
        open(lab);
        let mut elsewhere = error(too_large(), router_ip(), &udp(node(), client(), b"hello"), 8);
        elsewhere.set_destination((second_node_ip(), 0).into());
        passes(lab, PROG_INGRESS, elsewhere.build(), reason(Reason::BadQuote));
        let mut elsewhere = error(too_large(), pod_ip(), &udp(client(), pod(), b"hello"), 8);
        elsewhere.set_destination((strange_ip(), 0).into());
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
fn bad_quote_of_garbage_is_left_alone() {
    with_mappings(|lab| {
        let (mut garbage, _) = about_reply(too_large(), &udp(pod(), client(), b"hello"), 64);
        for byte in [0_u8, 0x41, 0x4f, 0x6f, 0xff] {
            let Transport::Icmp(icmp) = &mut garbage.transport else { unreachable!("an error was asked for") };
            icmp.payload[0] = byte;
            // A version or length that no header has, or one that leads beyond the packet's end.
            if (family(), byte) != (Family::V6, 0x6f) {
                passes(lab, PROG_INGRESS, garbage.build(), reason(Reason::BadQuote));
            }
        }
    });
}

#[test]
fn error_neither_opens_nor_refreshes_a_flow() {
    with_mappings(|lab| {
        let (arrives, expected) = about_reply(too_large(), &tcp(pod(), client(), ACK, b""), 20);
        lab.ingress(&arrives).is(&expected, request("61000/tcp", length(&arrives)));
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

#[test]
fn error_about_a_reply_to_another_client_needs_no_flow() {
    with_mappings(|lab| {
        let stranger: SocketAddr = (strange_ip(), CLIENT_PORT).into();
        let (arrives, expected) = about_reply(too_large(), &udp(pod(), stranger, b"hello"), 8);
        lab.ingress(&arrives).is(&expected, request("61000/udp", length(&arrives)));
        lab.remove(family(), Udp, NODE_PORT);
        passes(lab, PROG_INGRESS, arrives.build(), reason(Reason::NoMapping));
    });
}
