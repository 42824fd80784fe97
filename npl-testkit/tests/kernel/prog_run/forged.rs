// SPDX-License-Identifier: Apache-2.0
//! Tests that segments with a client's forged source address do not disturb the client's connection. The attacker is
//! off-path, that is, sees none of the client's packets, and guesses no sequence number correctly.

use std::net::SocketAddr;

use npl_common::mapping::protocol;
use npl_common::reason::Reason;
use npl_common::{conntrack, flow::FlowState};
use npl_testkit::packet::Packet;
use npl_testkit::packet::tcp_flags::{ACK, FIN, PSH, RST, SYN};

use super::scene::{
    CLIENT_ISN, DIRECT_ISNS, NODE_PORT, POD_ISN, Tcp, bare, client, direct_answer, establish, establishes, flow,
    is_reply_translated, is_request_translated, node, pod, second_node, tcp, to, with_isns, with_mappings,
};
use crate::counters::{first_request, reason, request};
use crate::lab::{Lab, NEXT};

pub(super) const FLAGS: [u8; 8] = [SYN, SYN | ACK, ACK, FIN | ACK, FIN, RST, RST | ACK, 0];

const ECE: u8 = 0x40;
const CWR: u8 = 0x80;

/// All combinations of the flags FIN, SYN, RST, PSH, ACK and URG, and some with ECE or CWR.
pub(crate) const ALL_FLAGS: [u8; 72] = {
    const COMBINATIONS: u8 = 64;
    let mut all = [0; 72];
    let mut flags = 0;
    while flags < COMBINATIONS {
        all[flags as usize] = flags;
        flags += 1;
    }
    let (_, more) = all.split_at_mut(COMBINATIONS as usize);
    more.copy_from_slice(&[
        ECE | CWR | SYN,
        ECE | SYN | ACK,
        ECE | ACK,
        CWR | ACK,
        ECE | CWR,
        ECE | RST,
        CWR | FIN | ACK,
        u8::MAX,
    ]);
    all
};

/// Initial sequence numbers of forged segments: outside of every window around the numbers of the connections.
pub(super) const FORGED_ISNS: [(u32, u32); 3] = forged_isns((CLIENT_ISN, POD_ISN));

/// Returns initial sequence numbers of forged segments: outside of every window around the numbers of a connection with
/// the initial sequence numbers `client` and `pod`.
pub(crate) const fn forged_isns((client, pod): (u32, u32)) -> [(u32, u32); 3] {
    [
        (client ^ 1 << 31, pod ^ 1 << 31),
        (client.wrapping_add(1 << 26), pod.wrapping_add(1 << 26)),
        (client.wrapping_sub(1 << 26), pod.wrapping_sub(1 << 26)),
    ]
}

/// Sends forged segments to `node`, and asserts that the program translates each of them to the Pod, whose TCP stack
/// would reject the segment.
#[track_caller]
fn attack(lab: &mut Lab, node: SocketAddr) {
    for isns in FORGED_ISNS {
        for flags in FLAGS {
            let forged = with_isns(tcp(client(), node, flags, b""), isns);
            let outcome = lab.ingress(&forged);
            assert_eq!((outcome.action, outcome.bytes), (NEXT, to(&forged, pod()).build()), "{flags:#x}");
        }
    }
}

#[track_caller]
fn attack_by_both(lab: &mut Lab) {
    for node in [node(), second_node()] {
        attack(lab, node);
    }
}

/// The idle timeout of a TCP connection's entry.
pub(super) fn timeout(state: &FlowState) -> u64 {
    let state = conntrack::State::established(state.client_tcp_flags, state.pod_tcp_flags);
    conntrack::established_timeout_ns(state, protocol::TCP, false)
}

/// Asserts that the connection's state is unchanged by the forged segments.
#[track_caller]
pub(super) fn is_undisturbed(lab: &mut Lab) {
    is_request_translated(lab, ACK | PSH);
    is_reply_translated(lab, ACK);
    let entry = lab.flow(flow(Tcp)).unwrap();
    assert_eq!((entry.node_addr, entry.state.node_port), (node().ip(), NODE_PORT));
    assert_eq!((entry.state.client_tcp_flags | entry.state.pod_tcp_flags) & (FIN | RST), 0);
    assert_eq!(timeout(&entry.state), conntrack::TCP_NS);
}

#[test]
fn forged_segments_before_during_and_after_a_handshake_do_not_disturb_it() {
    with_mappings(|lab| {
        attack_by_both(lab);
        let syn = tcp(client(), node(), SYN, b"");
        lab.ingress(&syn).is(&to(&syn, pod()), first_request("61000/tcp", bare()));
        attack_by_both(lab);
        is_reply_translated(lab, SYN | ACK);
        attack_by_both(lab);
        is_reply_translated(lab, SYN | ACK);
        assert_eq!(lab.flow(flow(Tcp)), None);
        establishes(lab);
        attack_by_both(lab);
        is_reply_translated(lab, ACK);
        is_undisturbed(lab);
    });
}

#[test]
fn forged_segments_do_not_disturb_an_established_connection() {
    with_mappings(|lab| {
        establish(lab);
        is_reply_translated(lab, ACK);
        for _ in 0..3 {
            attack_by_both(lab);
            is_undisturbed(lab);
        }
        // A Pod answers forged segments with challenge ACKs (RFC 5961), which must be translated.
        is_reply_translated(lab, ACK);
        is_request_translated(lab, FIN | ACK);
        is_reply_translated(lab, FIN | ACK);
        assert_eq!(timeout(&lab.flow(flow(Tcp)).unwrap().state), conntrack::CLOSED_NS, "the client's FIN must count");
    });
}

/// Asserts that the Pod's segment of the direct connection leaves unchanged.
#[track_caller]
pub(super) fn is_direct(lab: &mut Lab, packet: &Packet) {
    lab.egress(packet).is(packet, reason(Reason::UntrackedReply));
}

#[test]
fn forged_segments_do_not_divert_the_replies_of_a_direct_connection() {
    with_mappings(|lab| {
        attack_by_both(lab);
        let syn = with_isns(tcp(client(), pod(), SYN, b""), DIRECT_ISNS);
        lab.ingress(&syn).is(&syn, vec![]);
        attack_by_both(lab);
        for flags in [SYN | ACK, ACK, ACK | PSH, FIN | ACK, RST | ACK, RST] {
            is_direct(lab, &direct_answer(flags));
            attack_by_both(lab);
            is_direct(lab, &direct_answer(flags));
        }
        assert_eq!((lab.flow(flow(Tcp)), lab.own_slot(flow(Tcp))), (None, None));
    });
}

#[test]
fn lost_entry_is_recovered_within_one_round_trip_despite_forged_segments() {
    with_mappings(|lab| {
        establish(lab);
        is_reply_translated(lab, ACK);
        for _ in 0..3 {
            lab.evict(flow(Tcp));
            lab.set_slot(flow(Tcp), 0);
            attack_by_both(lab);
            let data = tcp(client(), node(), ACK | PSH, b"");
            assert_eq!(lab.ingress(&data).bytes, to(&data, pod()).build());
            is_reply_translated(lab, ACK);
            attack(lab, node());
            assert_eq!(lab.flow(flow(Tcp)), None, "no forged segment may establish the flow");
            establishes(lab);
            is_reply_translated(lab, ACK);
            is_undisturbed(lab);
        }
    });
}

/// A connection's entry was lost, and the client's next segment has created a half-open entry. After a RST of the
/// client, the flow must no longer become established from this entry: the client's next segment counts as the start of
/// a new flow.
#[test]
fn reset_by_the_client_ends_the_recovery_of_a_lost_entry() {
    with_mappings(|lab| {
        let segment = |flags| tcp(client(), node(), flags, b"");
        lab.ingress(&segment(ACK | PSH)).is(&to(&segment(ACK | PSH), pod()), first_request("61000/tcp", bare()));
        lab.ingress(&segment(RST | ACK)).is(&to(&segment(RST | ACK), pod()), request("61000/tcp", bare()));
        is_reply_translated(lab, ACK);
        lab.ingress(&segment(ACK)).is(&to(&segment(ACK), pod()), first_request("61000/tcp", bare()));
        assert_eq!(lab.flow(flow(Tcp)), None);
    });
}

/// The Pod's RST acknowledges the sequence number of the forged SYN, so it rejects only the forged handshake and not
/// the client's.
#[test]
fn refusal_of_a_forged_handshake_does_not_refuse_the_clients() {
    with_mappings(|lab| {
        let (forged_isn, pod_isn) = FORGED_ISNS[0];
        lab.ingress(&with_isns(tcp(client(), second_node(), SYN, b""), FORGED_ISNS[0]));
        lab.ingress(&tcp(client(), node(), SYN, b""));
        lab.egress(&with_isns(tcp(pod(), client(), RST | ACK, b""), (pod_isn, forged_isn)));
        is_reply_translated(lab, SYN | ACK);
        establishes(lab);
        is_reply_translated(lab, ACK);
        is_undisturbed(lab);
    });
}
