// SPDX-License-Identifier: Apache-2.0
//! Tests connection tracking packet by packet: half-open, established, evicted and replaced entries.

use std::net::SocketAddr;

use npl_common::reason::Reason;
use npl_common::{conntrack::Phase, half_open};
use npl_testkit::packet::Transport;
use npl_testkit::packet::tcp_flags::{ACK, FIN, PSH, RST, SYN};

use super::scene::{
    CLIENT_ISN, DIRECT_ISNS, GENERATION, NODE_PORT, POD_ISN, POD_PORT, SECOND_NODE_PORT, Tcp, Udp, bare, client,
    establish, establishes, family, flow, from, is_reply_translated, is_request_translated, length, node, node_ip,
    other_pod_ip, pod, second_node, second_node_ip, tcp, third_node_ip, to, udp, with_isns, with_mappings,
};
use crate::counters::{Change, and, establishing_reply, establishing_request, first_request, reason, reply, request};
use crate::lab::Lab;

/// Asserts that the Pod's packet leaves unchanged and is counted as an untracked reply.
#[track_caller]
fn is_untracked(lab: &mut Lab) {
    let answer = tcp(pod(), client(), ACK, b"");
    lab.egress(&answer).is(&answer, reason(Reason::UntrackedReply));
}

#[test]
fn flow_is_established_by_the_clients_second_packet() {
    with_mappings(|lab| {
        let syn = tcp(client(), node(), SYN, b"");
        lab.ingress(&syn).is(&to(&syn, pod()), first_request("61000/tcp", bare()));
        assert_eq!(lab.slot(flow(Tcp)).map(half_open::phase), Some(Phase::REQUESTED));
        is_reply_translated(lab, SYN | ACK);
        assert_eq!(lab.slot(flow(Tcp)).map(half_open::phase), Some(Phase::REPLIED));
        assert_eq!(lab.flow(flow(Tcp)), None, "the flow table must have no entry before the handshake is complete");
        establishes(lab);
        let entry = lab.flow(flow(Tcp)).unwrap();
        let state = entry.state;
        assert_eq!((entry.node_addr, state.node_port, state.generation), (node_ip(), NODE_PORT, GENERATION));
        assert_eq!((state.client_tcp_flags, state.pod_tcp_flags), (ACK, 0));
        assert!(state.last_seen_ns > 0);
        assert_eq!(lab.handshake(flow(Tcp)), None, "the handshake entry must be removed");
        is_reply_translated(lab, ACK | PSH);
        is_request_translated(lab, ACK);
        assert_eq!(lab.flow(flow(Tcp)).unwrap().state.pod_tcp_flags, ACK | PSH);
    });
}

#[test]
fn established_flow_needs_only_the_flow_table_for_replies() {
    with_mappings(|lab| {
        establish(lab);
        lab.set_slot(flow(Tcp), 0);
        is_reply_translated(lab, ACK);
    });
}

#[test]
fn half_open_flow_needs_only_the_half_open_cache_for_replies() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        assert_eq!(lab.flow(flow(Tcp)), None);
        is_reply_translated(lab, SYN | ACK);
    });
}

#[test]
fn evicted_flow_is_served_from_the_half_open_cache_and_established_again() {
    with_mappings(|lab| {
        establish(lab);
        lab.evict(flow(Tcp));
        is_reply_translated(lab, ACK);
        let data = tcp(client(), node(), ACK, b"");
        lab.ingress(&data).is(&to(&data, pod()), establishing_request("61000/tcp", bare()));
        assert!(lab.flow(flow(Tcp)).is_some());
        is_reply_translated(lab, ACK);
    });
}

/// After an eviction, the flow slot's word is the flow's only entry. A FIN or RST with the NAT address of this word is no
/// packet of a second connection.
#[test]
fn end_of_an_evicted_flow_is_no_tuple_conflict() {
    for flags in [FIN | ACK, RST | ACK] {
        with_mappings(|lab| {
            establish(lab);
            lab.evict(flow(Tcp));
            let end = tcp(client(), node(), flags, b"");
            lab.ingress(&end).is(&to(&end, pod()), request("61000/tcp", bare()));
            is_reply_translated(lab, ACK);
        });
    }
}

#[test]
fn lost_flow_is_recreated_by_the_clients_next_packet() {
    with_mappings(|lab| {
        establish(lab);
        lab.evict(flow(Tcp));
        lab.set_slot(flow(Tcp), 0);
        is_untracked(lab);
        let data = tcp(client(), node(), ACK, b"");
        lab.ingress(&data).is(&to(&data, pod()), first_request("61000/tcp", bare()));
        is_reply_translated(lab, ACK);
        lab.ingress(&data).is(&to(&data, pod()), establishing_request("61000/tcp", bare()));
        is_reply_translated(lab, ACK);
    });
}

/// With TCP Fast Open, the Pod's SYN-ACK may acknowledge the SYN and its payload, or only the SYN. Both kinds of
/// SYN-ACK must be translated.
#[test]
fn syn_ack_is_translated_whether_or_not_it_acknowledges_the_payload_of_the_syn() {
    for acknowledged in [0, 5] {
        with_mappings(|lab| {
            let syn = tcp(client(), node(), SYN, b"early");
            lab.ingress(&syn).is(&to(&syn, pod()), first_request("61000/tcp", length(&syn)));
            let mut answer = tcp(pod(), client(), SYN | ACK, b"");
            if let Transport::Tcp(segment) = &mut answer.transport {
                segment.acknowledgement += acknowledged;
            }
            lab.egress(&answer).is(&from(&answer, node()), reply("61000/tcp", bare()));
        });
    }
}

#[test]
fn overwritten_half_open_flow_is_recreated_by_a_retransmission() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        let other = half_open::entry(!crate::lab::hash(flow(Tcp)), Phase::REQUESTED, 0, NODE_PORT);
        lab.set_handshake(flow(Tcp), other);
        is_untracked(lab);
        let syn = tcp(client(), node(), SYN, b"");
        lab.ingress(&syn).is(&to(&syn, pod()), first_request("61000/tcp", bare()));
        is_reply_translated(lab, SYN | ACK);
    });
}

#[test]
fn half_open_flow_does_not_overwrite_a_handshake_that_waits_for_its_reply() {
    with_mappings(|lab| {
        let other = half_open::entry(!crate::lab::hash(flow(Tcp)), Phase::REQUESTED, 0, NODE_PORT);
        lab.set_handshake(flow(Tcp), other);
        let syn = tcp(client(), node(), SYN, b"");
        lab.ingress(&syn).is(&to(&syn, pod()), first_request("61000/tcp", bare()));
        assert_eq!(lab.slot(flow(Tcp)), None, "the flow must not overwrite the other flow's entry");
        is_reply_translated(lab, SYN | ACK);
        establishes(lab);
    });
}

/// A flood of SYNs may overwrite handshake entries, including entries that the Pod has answered. Later packets must
/// still establish a connection whose entry was overwritten.
#[test]
fn connection_whose_handshake_entry_is_lost_is_established_later() {
    with_mappings(|lab| {
        sends_syn(lab, node(), vec![]);
        is_reply_translated(lab, SYN | ACK);
        lab.forget_handshake(flow(Tcp));
        let ack = tcp(client(), node(), ACK, b"");
        lab.ingress(&ack).is(&to(&ack, pod()), first_request("61000/tcp", bare()));
        is_reply_translated(lab, ACK);
        lab.ingress(&ack).is(&to(&ack, pod()), establishing_request("61000/tcp", bare()));
        is_reply_translated(lab, ACK);
    });
}

#[test]
fn established_flow_does_not_overwrite_another_flows_entry_in_its_slot() {
    with_mappings(|lab| {
        establish(lab);
        let other = half_open::entry(!crate::lab::hash(flow(Tcp)), Phase::REPLIED, 0, NODE_PORT);
        lab.set_slot(flow(Tcp), other);
        is_request_translated(lab, ACK);
        is_reply_translated(lab, ACK);
        assert_eq!(lab.slot(flow(Tcp)), None, "the flow must not overwrite the other flow's entry");
        lab.set_slot(flow(Tcp), 0);
        is_request_translated(lab, ACK);
        assert_eq!(lab.slot(flow(Tcp)).map(half_open::phase), Some(Phase::ESTABLISHED), "an empty slot must be used");
    });
}

/// As in a fast upload, the client's sequence number is further ahead of the Pod's last acknowledgement number than
/// every window in which NPL accepts a number as proof of the sender. If the empty slot, for example after an upgrade,
/// were not filled again, each packet of the client would need a lookup in the flow table.
#[test]
fn empty_slot_of_a_fast_upload_is_used_again() {
    with_mappings(|lab| {
        establish(lab);
        is_reply_translated(lab, ACK);
        lab.set_slot(flow(Tcp), 0);
        let ahead = with_isns(tcp(client(), node(), ACK, b""), (CLIENT_ISN.wrapping_add(64 << 20), POD_ISN));
        lab.ingress(&ahead).is(&to(&ahead, pod()), request("61000/tcp", bare()));
        assert_eq!(lab.slot(flow(Tcp)).map(half_open::phase), Some(Phase::ESTABLISHED));
    });
}

#[test]
fn refusal_by_a_closed_pod_port_reaches_the_client_and_leaves_no_flow() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        for _again in 0..2 {
            is_reply_translated(lab, RST | ACK);
            assert_eq!(lab.slot(flow(Tcp)).map(half_open::phase), Some(Phase::REFUSED));
        }
        sends_syn(lab, node(), vec![]);
        is_reply_translated(lab, RST | ACK);
        assert_eq!(lab.flow(flow(Tcp)), None);
    });
}

/// An attacker who forges the client's SYN can forge its ACK too, and the Pod answers this ACK with a RST. No entry of
/// such a connection may stay in the flow table.
#[test]
fn connection_that_the_pod_resets_at_once_leaves_no_flow() {
    with_mappings(|lab| {
        establish(lab);
        assert!(lab.flow(flow(Tcp)).is_some());
        for _again in 0..3 {
            is_reply_translated(lab, RST);
            assert_eq!(lab.flow(flow(Tcp)), None);
            let more = lab.ingress(&tcp(client(), node(), ACK, b""));
            assert_eq!(more.changes, first_request("61000/tcp", bare()), "a refused flow must not count as a conflict");
        }
        // If the Pod has sent data on a connection, its entry must stay after a RST, because packets of the other side
        // may still be on the way.
        establish(lab);
        is_reply_translated(lab, ACK);
        is_reply_translated(lab, RST);
        assert!(lab.flow(flow(Tcp)).is_some());
    });
}

#[test]
fn client_reset_during_the_handshake_leaves_no_flow() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        is_reply_translated(lab, SYN | ACK);
        is_request_translated(lab, RST);
        assert_eq!(lab.flow(flow(Tcp)), None);
        is_reply_translated(lab, ACK);
    });
}

#[test]
fn client_reset_with_the_sequence_number_of_the_handshake_ends_it() {
    with_mappings(|lab| {
        sends_syn(lab, node(), vec![]);
        is_request_translated(lab, RST);
        assert_eq!(lab.handshake(flow(Tcp)).map(half_open::phase), Some(Phase::REFUSED));
        is_reply_translated(lab, SYN | ACK);
        assert_eq!(lab.flow(flow(Tcp)), None);
    });
}

/// An off-path attacker may send a RST with a guessed sequence number, which must not end the client's handshake.
#[test]
fn client_reset_with_a_forged_number_does_not_end_the_handshake() {
    with_mappings(|lab| {
        sends_syn(lab, node(), vec![]);
        let forged = with_isns(tcp(client(), node(), RST, b""), DIRECT_ISNS);
        lab.ingress(&forged).is(&to(&forged, pod()), request("61000/tcp", bare()));
        is_reply_translated(lab, SYN | ACK);
        lab.ingress(&forged).is(&to(&forged, pod()), request("61000/tcp", bare()));
        establishes(lab);
    });
}

#[test]
fn fin_flags_of_both_sides_are_recorded() {
    with_mappings(|lab| {
        establish(lab);
        is_request_translated(lab, FIN | ACK);
        is_reply_translated(lab, FIN | ACK);
        let entry = lab.flow(flow(Tcp)).unwrap().state;
        assert_eq!((entry.client_tcp_flags & FIN, entry.pod_tcp_flags & FIN), (FIN, FIN));
    });
}

/// Sends the client's SYN to one of the Node's addresses, and asserts that the SYN is translated and counted.
#[track_caller]
fn sends_syn(lab: &mut Lab, node: SocketAddr, counted: Vec<Change>) {
    let syn = tcp(client(), node, SYN, b"");
    lab.ingress(&syn).is(&to(&syn, pod()), and(counted, first_request("61000/tcp", bare())));
}

#[test]
fn reopened_flow_tuple_starts_without_the_flags_of_the_previous_connection() {
    with_mappings(|lab| {
        establish(lab);
        is_request_translated(lab, FIN | ACK);
        is_reply_translated(lab, FIN | ACK);
        sends_syn(lab, node(), vec![]);
        is_reply_translated(lab, SYN | ACK);
        establishes(lab);
        let entry = lab.flow(flow(Tcp)).unwrap().state;
        assert_eq!((entry.client_tcp_flags, entry.pod_tcp_flags), (ACK, 0));
    });
}

#[test]
fn unaccepted_syn_does_not_change_the_established_flow() {
    with_mappings(|lab| {
        for nat_address in [node(), second_node()] {
            establish(lab);
            sends_syn(lab, nat_address, vec![]);
            assert_eq!(lab.slot(flow(Tcp)).map(half_open::phase), Some(Phase::ESTABLISHED));
            // The Pod's answer to a SYN on an open connection is a challenge ACK (RFC 5961), which must be translated.
            is_reply_translated(lab, ACK);
            is_request_translated(lab, ACK);
            is_reply_translated(lab, ACK | PSH);
        }
    });
}

#[test]
fn refusal_of_a_new_handshake_comes_from_its_own_nat_address() {
    with_mappings(|lab| {
        establish(lab);
        let second = second_node();
        sends_syn(lab, second, vec![]);
        let refusal = tcp(pod(), client(), RST | ACK, b"");
        lab.egress(&refusal).is(&from(&refusal, second), reply("61000/tcp", bare()));
    });
}

#[test]
fn udp_flow_is_established_by_the_second_reply() {
    with_mappings(|lab| {
        let question = udp(client(), node(), b"subscribe");
        lab.ingress(&question).is(&to(&question, pod()), first_request("61000/udp", length(&question)));
        let update = udp(pod(), client(), b"update");
        let bytes = length(&update);
        lab.egress(&update).is(&from(&update, node()), reply("61000/udp", bytes));
        lab.egress(&update).is(&from(&update, node()), establishing_reply("61000/udp", bytes));
        lab.set_slot(flow(Udp), 0);
        lab.egress(&update).is(&from(&update, node()), reply("61000/udp", bytes));
    });
}

#[test]
fn flow_of_an_earlier_pod_with_the_same_address_is_untracked() {
    with_mappings(|lab| {
        establish(lab);
        lab.set_slot(flow(Tcp), 0);
        lab.add(Tcp, NODE_PORT, pod(), GENERATION + 1);
        is_untracked(lab);
        sends_syn(lab, node(), vec![]);
        is_reply_translated(lab, SYN | ACK);
        establishes(lab);
        assert_eq!(lab.flow(flow(Tcp)).unwrap().state.generation, GENERATION + 1);
    });
}

/// For the client's first segment to the next Pod with this address, NPL has no sequence number to compare with, so a
/// FIN or RST flag of this segment must not shorten the idle timeout.
#[test]
fn first_segment_to_the_next_pod_does_not_end_its_flow() {
    for flags in [FIN | ACK, RST, RST | ACK] {
        with_mappings(|lab| {
            establish(lab);
            lab.add(Tcp, NODE_PORT, pod(), GENERATION + 1);
            lab.ingress(&tcp(client(), node(), flags, b""));
            let state = lab.flow(flow(Tcp)).unwrap().state;
            assert_eq!((state.generation, state.client_tcp_flags), (GENERATION + 1, 0), "flags {flags:#x}");
        });
    }
}

#[test]
fn half_open_flow_of_a_removed_node_address_is_untracked() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), second_node(), SYN, b""));
        lab.set_addresses(&[node_ip()]);
        is_untracked(lab);
    });
}

/// The half-open cache stores the index of a node address. Another address may get this index after the first address
/// was removed. Replies must then come from the address to which the client has sent.
#[test]
fn datagram_to_a_node_address_with_a_reused_index_is_answered_from_it() {
    with_mappings(|lab| {
        let [second, third] = [second_node_ip(), third_node_ip()].map(|ip| (ip, NODE_PORT).into());
        let answer = udp(pod(), client(), b"from me");
        for _exchange in 0..2 {
            lab.ingress(&udp(client(), second, b"to the Node"));
            assert_eq!(lab.egress(&answer).bytes, from(&answer, second).build());
        }
        sends_syn(lab, second, vec![]);
        lab.set_addresses(&[node_ip()]);
        lab.set_addresses(&[node_ip(), third_node_ip()]);
        is_untracked(lab);
        for _exchange in 0..2 {
            lab.ingress(&udp(client(), third, b"to the Node"));
            assert_eq!(lab.egress(&answer).bytes, from(&answer, third).build());
        }
    });
}

#[test]
fn half_open_flow_of_a_mapping_to_another_pod_is_untracked() {
    with_mappings(|lab| {
        lab.add(Tcp, SECOND_NODE_PORT, pod(), GENERATION);
        lab.ingress(&tcp(client(), node(), SYN, b""));
        lab.add(Tcp, NODE_PORT, (other_pod_ip(), POD_PORT).into(), 7);
        is_untracked(lab);
    });
}

#[test]
fn purge_removes_only_flows_of_removed_endpoints() {
    with_mappings(|lab| {
        establish(lab);
        lab.ingress(&udp(client(), node(), b"one"));
        lab.egress(&udp(pod(), client(), b"two"));
        lab.ingress(&udp(client(), node(), b"three"));
        lab.remove(family(), Tcp, NODE_PORT);
        lab.datapath.purge_flows().unwrap();
        assert_eq!(lab.flow(flow(Tcp)), None);
        assert!(lab.flow(flow(Udp)).is_some());
        assert_eq!(lab.datapath.tables.flow_count().unwrap(), 1);
    });
}
