// SPDX-License-Identifier: Apache-2.0
//! `--forwarding offload`, packet by packet: what goes past the host's stack is what that has let through a moment ago.

use std::time::Duration;

use npl_common::half_open::slot;
use npl_common::names::{PROG_EGRESS_OFFLOAD, PROG_INGRESS_OFFLOAD, PROG_TO_PODS};
use npl_testkit::packet::Packet;
use npl_testkit::packet::tcp_flags::{ACK, FIN, RST, SYN};
use npl_testkit::poll;

use super::errors::{about_reply, too_large};
use super::fragments::pieces;
use super::redirect::{REDIRECT, WAY, lead, one_hop_on};
use super::scene::{Tcp, client, flow, from, ip, node, pod, pod_ip, tcp, to, udp, with_mappings};
use crate::lab::{FlowId, Lab, NEXT, Outcome, hash};

/// Many times the longest that a flow is offloaded without another look.
const LIMIT: Duration = Duration::from_secs(30);

/// A packet of the client arrives.
fn request(lab: &mut Lab, packet: &Packet) -> i32 {
    let outcome = lab.run(PROG_INGRESS_OFFLOAD, &packet.build());
    let translated = to(packet, pod());
    let expected = if outcome.action == REDIRECT { one_hop_on(&translated) } else { translated };
    assert_eq!(outcome.bytes, expected.build());
    outcome.action
}

/// The host's stack has let a packet of the client through.
fn leaves_for_the_pod(lab: &mut Lab, packet: &Packet) {
    let packet = to(packet, pod()).build();
    let Outcome { action, bytes, changes } = lab.run(PROG_TO_PODS, &packet);
    assert_eq!((action, bytes, changes), (NEXT, packet, vec![]), "it only looks");
}

/// The host's stack has let a packet of the Pod through.
fn leaves_for_the_client(lab: &mut Lab, packet: &Packet) {
    let outcome = lab.run(PROG_EGRESS_OFFLOAD, &packet.build());
    assert_eq!((outcome.action, outcome.bytes), (NEXT, from(packet, node()).build()));
}

/// A request and its answer, by the host's stack.
fn exchange(lab: &mut Lab, question: &Packet, answer: &Packet) {
    assert_eq!(request(lab, question), NEXT);
    leaves_for_the_pod(lab, question);
    leaves_for_the_client(lab, answer);
}

fn data() -> Packet {
    tcp(client(), node(), ACK, b"data")
}

/// A connection that is offloaded.
fn offloaded_connection(lab: &mut Lab) {
    lead(pod_ip(), WAY);
    exchange(lab, &tcp(client(), node(), SYN, b""), &tcp(pod(), client(), SYN | ACK, b""));
    exchange(lab, &data(), &tcp(pod(), client(), ACK, b"answer"));
    assert_eq!(request(lab, &data()), REDIRECT);
}

#[test]
fn a_connection_is_offloaded_once_the_stack_has_let_both_directions_through() {
    with_mappings(|lab| {
        lead(pod_ip(), WAY);
        exchange(lab, &tcp(client(), node(), SYN, b""), &tcp(pod(), client(), SYN | ACK, b""));
        // The end of the handshake is connection tracking's to see.
        assert_eq!(request(lab, &data()), NEXT);
        assert_eq!(request(lab, &data()), NEXT, "nothing has come out of the stack");
        leaves_for_the_pod(lab, &data());
        assert_eq!(request(lab, &data()), NEXT, "the Pod has not answered");
        leaves_for_the_client(lab, &tcp(pod(), client(), ACK, b"answer"));
        assert_eq!(request(lab, &data()), REDIRECT);
        leaves_for_the_pod(lab, &data());
        assert_eq!(request(lab, &data()), REDIRECT);
    });
}

#[test]
fn datagrams_are_offloaded_once_their_flow_is_established() {
    with_mappings(|lab| {
        lead(pod_ip(), WAY);
        let (question, answer) = (udp(client(), node(), b"question"), udp(pod(), client(), b"answer"));
        exchange(lab, &question, &answer);
        exchange(lab, &question, &answer);
        assert_eq!(request(lab, &question), REDIRECT);
    });
}

/// Nothing that the stack drops comes out of it, and so nothing more goes past it.
#[test]
fn after_a_while_a_packet_shows_whether_the_stack_still_lets_the_flow_through() {
    with_mappings(|lab| {
        offloaded_connection(lab);
        poll::until("a packet for the stack", LIMIT, || (request(lab, &data()) == NEXT).then_some(())).unwrap();
        assert_eq!(request(lab, &data()), NEXT, "that one has not come out of the stack");
        leaves_for_the_pod(lab, &data());
        assert_eq!(request(lab, &data()), REDIRECT);
    });
}

#[test]
fn what_ends_a_connection_takes_the_stack_and_all_that_follows() {
    for flags in [FIN | ACK, RST] {
        with_mappings(|lab| {
            offloaded_connection(lab);
            let end = tcp(client(), node(), flags, b"");
            assert_eq!(request(lab, &end), NEXT);
            leaves_for_the_pod(lab, &end);
            for _ in 0..2 {
                exchange(lab, &data(), &tcp(pod(), client(), ACK, b"answer"));
            }
            assert_eq!(request(lab, &data()), NEXT);
            // The same ports again are another connection.
            offloaded_connection(lab);
        });
    }
}

/// Flows of one slot take turns, and the end of one is not another's.
#[test]
fn end_of_a_connection_is_not_that_of_another_one_of_its_slot() {
    with_mappings(|lab| {
        let slot_of = |client| slot(hash(FlowId { client, ..flow(Tcp) }));
        let addresses = (1..=250).map(|n| ip(&format!("203.0.113.{n}"), &format!("2001:db8:0:9::{n}")));
        let mut ends = addresses.flat_map(|ip| (1024..=u16::MAX).map(move |port| (ip, port).into()));
        let other = ends.find(|end| slot_of(*end) == slot_of(client())).unwrap();
        for flags in [FIN | ACK, RST, SYN] {
            offloaded_connection(lab);
            assert_eq!(request(lab, &tcp(other, node(), flags, b"")), NEXT);
            assert_eq!(request(lab, &data()), REDIRECT, "after {flags:#x}");
        }
    });
}

#[test]
fn fragments_and_errors_take_the_stack() {
    with_mappings(|lab| {
        lead(pod_ip(), WAY);
        let (question, answer) = (udp(client(), node(), &[7; 1000]), udp(pod(), client(), b"hello"));
        exchange(lab, &question, &answer);
        exchange(lab, &question, &answer);
        assert_eq!(request(lab, &question), REDIRECT);
        for (frame, expected) in pieces(&question, 1, 504).iter().zip(pieces(&to(&question, pod()), 1, 504)) {
            let outcome = lab.run(PROG_INGRESS_OFFLOAD, frame);
            assert_eq!((outcome.action, outcome.bytes), (NEXT, expected));
        }
        let (arrives, expected) = about_reply(too_large(), &answer, 8);
        let outcome = lab.run(PROG_INGRESS_OFFLOAD, &arrives.build());
        assert_eq!((outcome.action, outcome.bytes), (NEXT, expected.build()));
    });
}

#[test]
fn a_pod_without_a_way_gets_everything_by_the_stack() {
    with_mappings(|lab| {
        exchange(lab, &tcp(client(), node(), SYN, b""), &tcp(pod(), client(), SYN | ACK, b""));
        for _ in 0..3 {
            exchange(lab, &data(), &tcp(pod(), client(), ACK, b"answer"));
        }
    });
}
