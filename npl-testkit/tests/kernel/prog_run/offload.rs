// SPDX-License-Identifier: Apache-2.0
//! Tests `--forwarding offload` packet by packet: a flow is redirected only if the kernel stack has recently forwarded
//! packets of this flow.

use std::time::Duration;

use npl_common::half_open::slot;
use npl_common::names::{PROG_EGRESS_OFFLOAD, PROG_INGRESS_OFFLOAD, PROG_TO_PODS};
use npl_testkit::packet::Packet;
use npl_testkit::packet::tcp_flags::{ACK, FIN, RST, SYN};
use npl_testkit::poll;

use super::errors::{about_reply, too_large};
use super::fragments::pieces;
use super::redirect::{NEXT_HOP, REDIRECT, after_one_hop, set_next_hop};
use super::scene::{Tcp, client, flow, from, ip, node, pod, pod_ip, second_node, tcp, to, udp, with_mappings};
use crate::lab::{FlowId, Lab, NEXT, Outcome, hash};

/// The time limit of waits: far longer than the interval after which an offloaded flow returns to the kernel stack.
const LIMIT: Duration = Duration::from_secs(30);

/// Runs the ingress program on a client's packet, which is translated and then redirected or passed to the stack.
fn request(lab: &mut Lab, packet: &Packet) -> i32 {
    let outcome = lab.run(PROG_INGRESS_OFFLOAD, &packet.build());
    let translated = to(packet, pod());
    let expected = if outcome.action == REDIRECT { after_one_hop(&translated) } else { translated };
    assert_eq!(outcome.bytes, expected.build());
    outcome.action
}

/// Runs the egress program of the Pod's device with a translated request: the program records that the kernel stack has
/// forwarded the request.
fn stack_forwards_to_pod(lab: &mut Lab, packet: &Packet) {
    let packet = to(packet, pod()).build();
    let Outcome { action, bytes, changes } = lab.run(PROG_TO_PODS, &packet);
    assert_eq!((action, bytes, changes), (NEXT, packet, vec![]), "the program must only record an observation");
}

/// Runs the egress program of the uplink with a reply: the program translates the reply, and records that the kernel
/// stack has forwarded the reply.
fn stack_forwards_to_client(lab: &mut Lab, packet: &Packet) {
    let outcome = lab.run(PROG_EGRESS_OFFLOAD, &packet.build());
    assert_eq!((outcome.action, outcome.bytes), (NEXT, from(packet, node()).build()));
}

/// Sends a request, and records that the kernel stack has forwarded the request and its reply.
fn exchange(lab: &mut Lab, question: &Packet, answer: &Packet) {
    assert_eq!(request(lab, question), NEXT);
    stack_forwards_to_pod(lab, question);
    stack_forwards_to_client(lab, answer);
}

/// Does the same as [`exchange`], but the request may also be redirected.
fn exchange_unless_offloaded(lab: &mut Lab, question: &Packet, answer: &Packet) {
    if request(lab, question) == NEXT {
        stack_forwards_to_pod(lab, question);
    }
    stack_forwards_to_client(lab, answer);
}

fn data() -> Packet {
    tcp(client(), node(), ACK, b"data")
}

/// Opens a connection and offloads it.
fn offloaded_connection(lab: &mut Lab) {
    set_next_hop(pod_ip(), NEXT_HOP);
    exchange(lab, &tcp(client(), node(), SYN, b""), &tcp(pod(), client(), SYN | ACK, b""));
    exchange(lab, &data(), &tcp(pod(), client(), ACK, b"answer"));
    assert_eq!(request(lab, &data()), REDIRECT);
}

#[test]
fn connection_is_offloaded_once_the_stack_has_forwarded_both_directions() {
    with_mappings(|lab| {
        set_next_hop(pod_ip(), NEXT_HOP);
        exchange(lab, &tcp(client(), node(), SYN, b""), &tcp(pod(), client(), SYN | ACK, b""));
        // This packet ends the handshake. NPL offloads a flow only after its connection tracking has seen the complete
        // handshake.
        assert_eq!(request(lab, &data()), NEXT);
        assert_eq!(
            request(lab, &data()),
            NEXT,
            "the flow is offloaded before the stack has forwarded a packet of the established flow"
        );
        stack_forwards_to_pod(lab, &data());
        assert_eq!(request(lab, &data()), NEXT, "the flow is offloaded before the stack has forwarded a reply");
        stack_forwards_to_client(lab, &tcp(pod(), client(), ACK, b"answer"));
        assert_eq!(request(lab, &data()), REDIRECT);
        stack_forwards_to_pod(lab, &data());
        assert_eq!(request(lab, &data()), REDIRECT);
    });
}

#[test]
fn udp_flow_is_offloaded_once_it_is_established() {
    with_mappings(|lab| {
        set_next_hop(pod_ip(), NEXT_HOP);
        let (question, answer) = (udp(client(), node(), b"question"), udp(pod(), client(), b"answer"));
        exchange(lab, &question, &answer);
        exchange(lab, &question, &answer);
        assert_eq!(request(lab, &question), REDIRECT);
    });
}

/// Forged datagrams to any address of the Pod port must not end the offload of a UDP flow. When an offloaded flow
/// returns to the stack temporarily, the flow must be offloaded again within the time limit.
#[test]
fn forged_datagrams_do_not_end_the_offload_of_a_udp_flow() {
    with_mappings(|lab| {
        set_next_hop(pod_ip(), NEXT_HOP);
        let (question, answer) = (udp(client(), node(), b"question"), udp(pod(), client(), b"answer"));
        for forged_to in [node(), second_node(), pod()] {
            poll::until("an offloaded question", LIMIT, || {
                exchange_unless_offloaded(lab, &question, &answer);
                lab.run(PROG_INGRESS_OFFLOAD, &udp(client(), forged_to, b"forged").build());
                (request(lab, &question) == REDIRECT).then_some(())
            })
            .unwrap();
        }
    });
}

/// An offloaded flow must return to the stack periodically, so that the stack can drop its packets, for example by a
/// new rule. If the stack drops a packet, NPL observes no forwarded packet, and does not redirect the flow again.
#[test]
fn offloaded_flow_returns_to_the_stack_periodically() {
    with_mappings(|lab| {
        offloaded_connection(lab);
        poll::until("a packet that is passed to the stack", LIMIT, || (request(lab, &data()) == NEXT).then_some(()))
            .unwrap();
        assert_eq!(
            request(lab, &data()),
            NEXT,
            "the flow is redirected again, although the stack has not forwarded a packet of the flow"
        );
        stack_forwards_to_pod(lab, &data());
        assert_eq!(request(lab, &data()), REDIRECT);
    });
}

#[test]
fn fin_or_reset_returns_the_connection_to_the_stack() {
    for flags in [FIN | ACK, RST] {
        with_mappings(|lab| {
            offloaded_connection(lab);
            let end = tcp(client(), node(), flags, b"");
            assert_eq!(request(lab, &end), NEXT);
            stack_forwards_to_pod(lab, &end);
            for _ in 0..2 {
                exchange(lab, &data(), &tcp(pod(), client(), ACK, b"answer"));
            }
            assert_eq!(request(lab, &data()), NEXT);
            // A new connection with the same ports must be offloaded again.
            offloaded_connection(lab);
        });
    }
}

/// Several flows may share a slot of the stack observations. While one of these flows is offloaded, a SYN, FIN or RST
/// of another flow must not end the offload.
#[test]
fn end_of_a_connection_does_not_stop_offload_of_another_one_in_its_slot() {
    with_mappings(|lab| {
        let slot_of = |client| slot(hash(FlowId { client, ..flow(Tcp) }));
        let addresses = (1..=250).map(|n| ip(&format!("203.0.113.{n}"), &format!("2001:db8:0:9::{n}")));
        let mut clients = addresses.flat_map(|ip| (1024..=u16::MAX).map(move |port| (ip, port).into()));
        let other = clients.find(|other| slot_of(*other) == slot_of(client())).unwrap();
        for flags in [FIN | ACK, RST, SYN] {
            offloaded_connection(lab);
            assert_eq!(request(lab, &tcp(other, node(), flags, b"")), NEXT);
            assert_eq!(request(lab, &data()), REDIRECT, "after {flags:#x}");
        }
    });
}

#[test]
fn fragments_and_icmp_errors_are_passed_to_the_stack() {
    with_mappings(|lab| {
        set_next_hop(pod_ip(), NEXT_HOP);
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
fn pod_without_a_next_hop_is_never_offloaded() {
    with_mappings(|lab| {
        exchange(lab, &tcp(client(), node(), SYN, b""), &tcp(pod(), client(), SYN | ACK, b""));
        for _ in 0..3 {
            exchange(lab, &data(), &tcp(pod(), client(), ACK, b"answer"));
        }
    });
}
