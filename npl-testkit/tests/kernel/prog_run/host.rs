// SPDX-License-Identifier: Apache-2.0
//! What the host has under way by a node port, as it masquerades Pods behind any port: what comes back is the host's.

use npl_common::names::PROG_EGRESS;
use npl_common::reason::Reason;
use npl_testkit::packet::Packet;
use npl_testkit::packet::sctp_chunks::{ABORT, DATA};
use npl_testkit::packet::tcp_flags::{ACK, FIN, PSH, RST, SYN};

use super::errors::{about_reply, too_large};
use super::fragments::pieces;
use super::scene::{
    Tcp, Udp, becomes, client, establish, flow, from, is_answered, length, node, pod, sctp, tcp, to, udp, with_mappings,
};
use crate::counters::{establishing_request, first_request, reason, request};
use crate::lab::Lab;

/// A packet leaves by a node port, as it is.
#[track_caller]
fn leaves(lab: &mut Lab, packet: &Packet) {
    lab.egress(packet).is(packet, vec![]);
}

#[test]
fn of_host_is_what_answers_something_under_way() {
    with_mappings(|lab| {
        leaves(lab, &tcp(node(), client(), SYN, b""));
        for flags in [SYN | ACK, ACK, PSH | ACK, FIN | ACK, RST] {
            let answer = tcp(client(), node(), flags, b"");
            lab.ingress(&answer).is(&answer, reason(Reason::HostConnection));
        }
        leaves(lab, &udp(node(), client(), b"question"));
        let answer = udp(client(), node(), b"answer");
        lab.ingress(&answer).is(&answer, reason(Reason::HostConnection));
        assert_eq!((lab.slot(flow(Tcp)), lab.slot(flow(Udp))), (None, None));
    });
}

#[test]
fn of_host_are_errors_about_something_under_way() {
    with_mappings(|lab| {
        for sent in [tcp(node(), client(), PSH | ACK, b"question"), udp(node(), client(), b"question")] {
            leaves(lab, &sent);
            let (error, _) = about_reply(too_large(), &sent, 64);
            lab.ingress(&error).is(&error, reason(Reason::HostConnection));
        }
    });
}

/// A client may open a connection by an end that the host has talked to: nobody answers a question with one.
#[test]
fn connections_of_clients_are_theirs_whatever_the_host_had_under_way() {
    with_mappings(|lab| {
        leaves(lab, &tcp(node(), client(), SYN, b""));
        establish(lab);
        is_answered(lab, ACK);
        let more = tcp(client(), node(), PSH | ACK, b"more");
        lab.ingress(&more).is(&to(&more, pod()), request("61000/tcp", length(&more)));
    });
}

#[test]
fn errors_about_connections_of_clients_are_theirs_whatever_the_host_had_under_way() {
    with_mappings(|lab| {
        leaves(lab, &tcp(node(), client(), SYN, b""));
        let (arrives, expected) = about_reply(too_large(), &tcp(pod(), client(), PSH | ACK, b"answer"), 64);
        let goes_to_pod = |lab: &mut Lab| lab.ingress(&arrives).is(&expected, request("61000/tcp", length(&arrives)));
        let is_of_host = |lab: &mut Lab| lab.ingress(&arrives).is(&arrives, reason(Reason::HostConnection));
        is_of_host(lab);
        lab.ingress(&tcp(client(), node(), SYN, b""));
        goes_to_pod(lab);
        is_answered(lab, SYN | ACK);
        lab.ingress(&tcp(client(), node(), RST, b""));
        is_of_host(lab);
        establish(lab);
        goes_to_pod(lab);
        lab.set_slot(flow(Tcp), 0);
        goes_to_pod(lab);
    });
}

/// Who answers so has nothing under way: a client may have come to the port before it led to a Pod, and comes again.
#[test]
fn refusals_leave_no_note() {
    with_mappings(|lab| {
        for flags in [RST, RST | ACK] {
            leaves(lab, &tcp(node(), client(), flags, b""));
        }
        leaves(lab, &sctp(node(), client(), ABORT, b""));
        let more = tcp(client(), node(), PSH | ACK, b"more");
        lab.ingress(&more).is(&to(&more, pod()), first_request("61000/tcp", length(&more)));
        let more = sctp(client(), node(), DATA, b"more");
        lab.ingress(&more).is(&to(&more, pod()), first_request("61000/sctp", length(&more)));
    });
}

/// Of what the Node masquerades, and of replies that went past the stack: no first one is to come that they would wait for.
#[test]
fn fragments_that_leave_from_a_node_port_are_not_taken_for_early() {
    with_mappings(|lab| {
        for (number, packet) in (1..).zip([udp(node(), client(), &[7; 1000]), tcp(node(), client(), ACK, &[7; 1000])]) {
            for frame in pieces(&packet, number, 504) {
                becomes(lab, PROG_EGRESS, &frame, frame.clone(), vec![]);
            }
        }
    });
}

/// As the last device sees replies that go past the stack, or that one above it has translated.
#[test]
fn translated_replies_are_nothing_that_the_host_has_under_way() {
    with_mappings(|lab| {
        let (question, answer) = (udp(client(), node(), b"question"), udp(pod(), client(), b"answer"));
        for changes in [first_request, establishing_request, request] {
            lab.ingress(&question).is(&to(&question, pod()), changes("61000/udp", length(&question)));
            lab.egress(&answer);
            leaves(lab, &from(&answer, node()));
        }
        // Known by the flow table alone.
        lab.set_slot(flow(Udp), 0);
        leaves(lab, &from(&answer, node()));
        lab.evict(flow(Udp));
        lab.set_slot(flow(Udp), 0);
        lab.ingress(&question).is(&to(&question, pod()), first_request("61000/udp", length(&question)));
    });
}
