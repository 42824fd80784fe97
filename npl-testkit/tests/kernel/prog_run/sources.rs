// SPDX-License-Identifier: Apache-2.0
//! Tests mappings with an allow-list of source ranges.

use std::net::{IpAddr, SocketAddr};

use npl_agent::core::model::Family;
use npl_common::names::PROG_INGRESS;
use npl_common::reason::Reason;
use npl_testkit::packet::tcp_flags::{ACK, PSH, SYN};
use npl_testkit::packet::{Ip, Packet, sctp_chunks};

use super::errors::{about_reply, too_large};
use super::extensions::{DESTINATION_OPTIONS, SIX, extended};
use super::fragments::fragments;
use super::scene::{
    CLIENT_PORT, GENERATION, NODE_PORT, SECOND_NODE_PORT, Sctp, Tcp, Udp, bare, client, client_ip, establish, family,
    flow, from, length, node, node_ip, pod, router_ip, sctp, tcp, to, udp, with_mappings,
};
use crate::counters::{first_request, reason, request};
use crate::lab::{DROP, Lab, Outcome};

/// Restricts each mapping of the test to `ranges`.
fn restrict(lab: &mut Lab, ranges: &str) {
    for protocol in [Tcp, Udp, Sctp] {
        lab.add_restricted(protocol, NODE_PORT, pod(), GENERATION, ranges);
    }
}

/// Asserts that the frame is dropped and counted once.
#[track_caller]
fn is_dropped(lab: &mut Lab, frame: &[u8]) {
    let expected = Outcome { action: DROP, bytes: frame.to_vec(), changes: reason(Reason::SourceRefused) };
    assert_eq!(lab.run(PROG_INGRESS, frame), expected);
}

/// Returns an address of the running test's family, by its last two bytes.
fn address(high: u8, low: u8) -> IpAddr {
    match family() {
        Family::V4 => [198, 51, high, low].into(),
        Family::V6 => [0x2001, 0xdb8, 0, 0, 0, 0, 0xc633, u16::from_be_bytes([high, low])].into(),
    }
}

/// Whether the client's datagram reaches the Pod; a dropped datagram must not change.
#[track_caller]
fn gets_through(lab: &mut Lab, client: IpAddr) -> bool {
    let request = udp((client, CLIENT_PORT).into(), node(), b"hello");
    let outcome = lab.ingress(&request);
    let is_refused = outcome.changes == reason(Reason::SourceRefused);
    let bytes = if is_refused { request.build() } else { to(&request, pod()).build() };
    assert_eq!((outcome.action == DROP, outcome.bytes), (is_refused, bytes), "{client}");
    !is_refused
}

#[test]
fn source_refused_is_counted_for_every_protocol_and_leaves_no_flow() {
    with_mappings(|lab| {
        restrict(lab, &router_ip().to_string());
        for packet in [
            tcp(client(), node(), SYN, b""),
            tcp(client(), node(), PSH | ACK, b"in the middle"),
            udp(client(), node(), b"hello"),
            sctp(client(), node(), sctp_chunks::INIT, &[0; 16]),
        ] {
            is_dropped(lab, &packet.build());
        }
        for protocol in [Tcp, Udp, Sctp] {
            assert_eq!((lab.slot(flow(protocol)), lab.flow(flow(protocol))), (None, None), "{protocol}");
        }
    });
}

#[test]
fn allowed_source_is_translated_as_without_an_allow_list() {
    with_mappings(|lab| {
        restrict(lab, &client_ip().to_string());
        let packet = tcp(client(), node(), SYN, b"");
        lab.ingress(&packet).is(&to(&packet, pod()), first_request("61000/tcp", bare()));
        let packet = udp(client(), node(), b"hello");
        lab.ingress(&packet).is(&to(&packet, pod()), first_request("61000/udp", length(&packet)));
        establish(lab);
        is_dropped(lab, &tcp((router_ip(), CLIENT_PORT).into(), node(), SYN, b"").build());
    });
}

#[test]
fn source_ranges_match_exactly_their_prefix() {
    with_mappings(|lab| {
        let all = if family() == Family::V4 { 32 } else { 128 };
        let [lowest, highest] = match family() {
            Family::V4 => [IpAddr::from([0; 4]), IpAddr::from([255; 4])],
            Family::V6 => [IpAddr::from([0; 16]), IpAddr::from([0xff; 16])],
        };
        let within = |first: IpAddr, short: u8| format!("{first}/{}", all - short);
        for (ranges, inside, outside) in [
            (within(lowest, all), vec![lowest, highest, address(1, 1)], vec![]),
            (within(lowest, all - 1), vec![lowest], vec![highest]),
            (within(highest, all - 1), vec![highest], vec![lowest]),
            (within(address(100, 2), 0), vec![address(100, 2)], vec![address(100, 3), address(100, 0)]),
            (
                within(address(100, 2), 1),
                vec![address(100, 2), address(100, 3)],
                vec![address(100, 1), address(100, 4)],
            ),
            (
                within(address(100, 0), 8),
                vec![address(100, 0), address(100, 255)],
                vec![address(99, 255), address(101, 0)],
            ),
            (
                format!("{},{}", within(address(100, 0), 8), within(address(7, 7), 0)),
                vec![address(100, 9), address(7, 7)],
                vec![address(7, 8), address(7, 6)],
            ),
            (String::new(), vec![], vec![lowest, highest, address(100, 2)]),
        ] {
            restrict(lab, &ranges);
            for (clients, expected) in [(inside, true), (outside, false)] {
                for client in clients {
                    assert_eq!(gets_through(lab, client), expected, "{client} of {ranges:?}");
                }
            }
        }
    });
}

#[test]
fn allow_list_applies_to_one_port_and_protocol() {
    with_mappings(|lab| {
        lab.add_restricted(Tcp, NODE_PORT, pod(), GENERATION, &client_ip().to_string());
        lab.add_restricted(Udp, NODE_PORT, pod(), GENERATION, "");
        lab.add_restricted(Tcp, SECOND_NODE_PORT, pod(), GENERATION, "");
        let allowed = tcp(client(), node(), SYN, b"");
        lab.ingress(&allowed).is(&to(&allowed, pod()), first_request("61000/tcp", bare()));
        is_dropped(lab, &udp(client(), node(), b"").build());
        is_dropped(lab, &tcp(client(), (node_ip(), SECOND_NODE_PORT).into(), SYN, b"").build());
        let unrestricted = sctp(client(), node(), sctp_chunks::INIT, &[0; 16]);
        lab.ingress(&unrestricted).is(&to(&unrestricted, pod()), first_request("61000/sctp", length(&unrestricted)));
    });
}

#[test]
fn ranges_of_an_unrestricted_mapping_are_ignored() {
    with_mappings(|lab| {
        lab.allow(Tcp, NODE_PORT, pod(), &router_ip().to_string());
        let packet = tcp(client(), node(), SYN, b"");
        lab.ingress(&packet).is(&to(&packet, pod()), first_request("61000/tcp", bare()));
    });
}

#[test]
fn options_and_extension_headers_do_not_bypass_the_allow_list() {
    with_mappings(|lab| {
        restrict(lab, &router_ip().to_string());
        let mut packet = udp(client(), node(), b"hello");
        match &mut packet.ip {
            Ip::V4(header) => {
                header.options = vec![1; 4];
                is_dropped(lab, &packet.build());
            }
            Ip::V6(_) => is_dropped(lab, &extended(&packet, &[(DESTINATION_OPTIONS, SIX)])),
        }
    });
}

#[test]
fn established_connection_is_dropped_when_its_source_is_removed() {
    with_mappings(|lab| {
        restrict(lab, &client_ip().to_string());
        establish(lab);
        lab.disallow(Tcp, NODE_PORT, pod(), &client_ip().to_string());
        is_dropped(lab, &tcp(client(), node(), PSH | ACK, b"more").build());
        lab.allow(Tcp, NODE_PORT, pod(), &client_ip().to_string());
        let more = tcp(client(), node(), PSH | ACK, b"more");
        lab.ingress(&more).is(&to(&more, pod()), request("61000/tcp", length(&more)));
    });
}

/// Returns a datagram and a segment that are large enough for several fragments, each with the name of its mapping.
fn large(client: SocketAddr) -> [(Packet, &'static str); 2] {
    let payload = [7; 300];
    [(udp(client, node(), &payload), "61000/udp"), (tcp(client, node(), PSH | ACK, &payload), "61000/tcp")]
}

#[test]
fn all_fragments_of_a_refused_source_are_dropped() {
    with_mappings(|lab| {
        restrict(lab, &router_ip().to_string());
        for (id, (packet, _)) in (1..).zip(large(client())) {
            for frame in fragments(&packet, id) {
                is_dropped(lab, &frame);
            }
        }
        for (id, (packet, mapping)) in (3..).zip(large((router_ip(), CLIENT_PORT).into())) {
            let (frames, expected) = (fragments(&packet, id), fragments(&to(&packet, pod()), id));
            for (number, (frame, bytes)) in frames.iter().zip(expected).enumerate() {
                let change = if number == 0 { first_request } else { request };
                let outcome = lab.run(PROG_INGRESS, frame);
                assert_eq!((outcome.bytes, outcome.changes), (bytes, change(mapping, frame.len())));
            }
        }
    });
}

#[test]
fn later_fragments_are_dropped_when_their_source_is_removed() {
    with_mappings(|lab| {
        restrict(lab, &client_ip().to_string());
        let [(packet, mapping), _] = large(client());
        let frames = fragments(&packet, 9);
        assert_eq!(lab.run(PROG_INGRESS, &frames[0]).changes, first_request(mapping, frames[0].len()));
        lab.disallow(Udp, NODE_PORT, pod(), &client_ip().to_string());
        is_dropped(lab, &frames[1]);
    });
}

#[test]
fn icmp_error_is_allowed_by_the_quoted_client() {
    with_mappings(|lab| {
        restrict(lab, &client_ip().to_string());
        let answer = udp(pod(), client(), &[7; 100]);
        lab.ingress(&udp(client(), node(), b"hello"));
        lab.egress(&answer);
        let (arrives, expected) = about_reply(too_large(), &answer, 20);
        lab.ingress(&arrives).is(&expected, request("61000/udp", length(&arrives)));
        restrict(lab, &router_ip().to_string());
        is_dropped(lab, &arrives.build());
        let other_client = (router_ip(), CLIENT_PORT).into();
        let others = udp(pod(), other_client, &[7; 100]);
        lab.ingress(&udp(other_client, node(), b"hello"));
        lab.egress(&others);
        let (arrives, expected) = about_reply(too_large(), &others, 20);
        lab.ingress(&arrives).is(&expected, request("61000/udp", length(&arrives)));
    });
}

#[test]
fn replies_are_not_checked_against_the_allow_list() {
    with_mappings(|lab| {
        restrict(lab, &client_ip().to_string());
        establish(lab);
        restrict(lab, "");
        let answer = tcp(pod(), client(), PSH | ACK, b"the rest");
        let outcome = lab.egress(&answer);
        assert_eq!(outcome.bytes, from(&answer, node()).build(), "the reply to an earlier request must be translated");
    });
}
