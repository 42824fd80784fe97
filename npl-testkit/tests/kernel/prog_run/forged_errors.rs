// SPDX-License-Identifier: Apache-2.0
//! Tests forged ICMP errors about a client's packets. An error never changes connection tracking. An error to a node
//! address is translated to the Pod only if the quoted flow is known; an error to the Pod's own address is passed
//! unchanged. The Pod's TCP stack checks the quoted sequence number (RFC 5927).

use std::net::SocketAddr;

use npl_common::reason::Reason;
use npl_testkit::packet::tcp_flags::{ACK, FIN, PSH, SYN};
use npl_testkit::packet::{Packet, tcp_flags};

use super::errors::{error, kinds};
use super::forged::{FORGED_ISNS, is_direct, is_undisturbed};
use super::scene::{
    DIRECT_ISNS, Tcp, Udp, client, direct_answer, establish, establishes, flow, from, is_reply_translated, node, pod,
    router_ip, second_node, tcp, to, udp, unused_ip, with_isns, with_mappings,
};
use super::sweep::expire_flows;
use crate::counters::reason;
use crate::lab::{FlowEntry, Lab, NEXT};

/// Quoted bytes of the transport header: the minimum of RFC 792, a whole TCP header, and more.
const QUOTED: [usize; 3] = [8, 20, 64];

/// Whether NPL knows the flow that the forged errors quote. Of the errors to a node address, only those about a known
/// flow are translated to the Pod.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Known,
    Unknown,
}

/// The flow's entry in the flow table, its entry in the half-open cache ([`Lab::slot`]), and the entry of its
/// handshake.
type Entries = (Option<FlowEntry>, Option<u64>, Option<u64>);

fn entries(lab: &mut Lab) -> [Entries; 2] {
    [Tcp, Udp].map(|it| (lab.flow(flow(it)), lab.slot(flow(it)), lab.handshake(flow(it))))
}

/// Returns segments of the Pod with sequence numbers that no connection of the tests has.
fn segments() -> impl Iterator<Item = Packet> {
    let segment = |(client_isn, pod_isn)| with_isns(tcp(pod(), client(), ACK | PSH, &[7; 100]), (pod_isn, client_isn));
    FORGED_ISNS.into_iter().map(segment)
}

fn datagrams() -> impl Iterator<Item = Packet> {
    [udp(pod(), client(), &[7; 100])].into_iter()
}

/// Sends forged errors about `replies`: to both node addresses, to the Pod, and from the Pod's side to the client.
/// Asserts that no entry changes.
#[track_caller]
fn attack(lab: &mut Lab, replies: impl Iterator<Item = Packet>, flow: Flow) {
    let before = entries(lab);
    for reply in replies {
        for kind in kinds() {
            for bytes in QUOTED {
                for sender in [node(), second_node()] {
                    about_reply(lab, kind, &from(&reply, sender), bytes, flow);
                }
                let to_pod = error(kind, router_ip(), &reply, bytes);
                lab.ingress(&to_pod).is(&to_pod, vec![]);
                let request = from(&to(&reply, pod()), client());
                let outcome = lab.egress(&error(kind, unused_ip(), &request, bytes));
                assert_eq!(outcome.action, NEXT);
            }
        }
    }
    assert!(entries(lab) == before, "an error has changed connection tracking");
}

#[track_caller]
fn about_reply(lab: &mut Lab, kind: (u8, u8), reply: &Packet, bytes: usize, flow: Flow) {
    let arrives = error(kind, router_ip(), reply, bytes);
    let outcome = lab.ingress(&arrives);
    if flow == Flow::Unknown {
        outcome.is(&arrives, reason(Reason::UntrackedError));
    } else {
        let expected = error(kind, router_ip(), &from(reply, pod()), bytes);
        assert_eq!((outcome.action, outcome.bytes), (NEXT, expected.build()));
    }
}

#[test]
fn forged_errors_before_during_and_after_a_handshake_do_not_disturb_it() {
    with_mappings(|lab| {
        attack(lab, segments(), Flow::Unknown);
        let syn = tcp(client(), node(), SYN, b"");
        assert_eq!(lab.ingress(&syn).bytes, to(&syn, pod()).build());
        attack(lab, segments(), Flow::Unknown);
        is_reply_translated(lab, SYN | ACK);
        attack(lab, segments(), Flow::Unknown);
        establishes(lab);
        attack(lab, segments(), Flow::Known);
        is_reply_translated(lab, ACK);
        attack(lab, segments(), Flow::Known);
        is_undisturbed(lab);
    });
}

/// Forged errors must not affect an idle connection that has lost its entry in the flow table, and on which the Pod
/// sends first.
#[test]
fn forged_errors_do_not_disturb_an_idle_connection() {
    with_mappings(|lab| {
        establish(lab);
        is_reply_translated(lab, ACK);
        attack(lab, segments(), Flow::Known);
        expire_flows(lab);
        assert_eq!(lab.flow(flow(Tcp)), None, "an error must not refresh an entry");
        attack(lab, segments(), Flow::Known);
        is_reply_translated(lab, ACK);
        attack(lab, segments(), Flow::Known);
        establishes(lab);
        is_reply_translated(lab, ACK);
        is_undisturbed(lab);
    });
}

#[test]
fn forged_errors_do_not_disturb_a_direct_connection() {
    with_mappings(|lab| {
        let syn = with_isns(tcp(client(), pod(), SYN, b""), DIRECT_ISNS);
        lab.ingress(&syn).is(&syn, vec![]);
        for flags in [SYN | ACK, ACK, ACK | PSH, FIN | ACK, tcp_flags::RST] {
            attack(lab, segments(), Flow::Unknown);
            is_direct(lab, &direct_answer(flags));
        }
    });
}

#[test]
fn forged_errors_do_not_disturb_flows_of_datagrams() {
    let exchange = |lab: &mut Lab, server: SocketAddr, known: Flow| {
        let (question, answer) = (udp(client(), server, b"question"), udp(pod(), client(), b"answer"));
        for _exchange in 0..3 {
            assert_eq!(lab.ingress(&question).bytes, to(&question, pod()).build());
            for _answer in 0..2 {
                attack(lab, datagrams(), known);
                assert_eq!(lab.egress(&answer).bytes, from(&answer, server).build());
            }
        }
    };
    with_mappings(|lab| {
        attack(lab, datagrams(), Flow::Unknown);
        exchange(lab, node(), Flow::Known);
        expire_flows(lab);
        attack(lab, datagrams(), Flow::Known);
        let answer = udp(pod(), client(), b"first words of the Pod");
        assert_eq!(lab.egress(&answer).bytes, from(&answer, node()).build());
    });
    with_mappings(|lab| exchange(lab, pod(), Flow::Unknown));
}
