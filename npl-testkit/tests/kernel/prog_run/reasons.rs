// SPDX-License-Identifier: Apache-2.0
//! Tests reason counters. The name of each test contains the name of its reason.

use npl_common::reason::Reason;
use npl_testkit::packet::tcp_flags::{ACK, SYN};
use npl_testkit::packet::{Packet, Transport};

use super::scene::{
    NODE_PORT, Udp, bare, client, client_ip, establish, family, flow, from, length, node, node_ip, pod, pod_ip,
    second_node, tcp, to, udp, with_mappings,
};
use crate::counters::{and, establishing_request, first_request, reason, reply, request};

#[test]
fn no_mapping_is_counted_for_an_unmapped_port_of_the_range() {
    with_mappings(|lab| {
        for packet in
            [tcp(client(), (node_ip(), 61_050).into(), SYN, b""), udp(client(), (node_ip(), 61_050).into(), b"hello")]
        {
            lab.ingress(&packet).is(&packet, reason(Reason::NoMapping));
        }
        // A port that is mapped for TCP is unmapped for UDP.
        lab.remove(family(), Udp, NODE_PORT);
        let packet = udp(client(), node(), b"hello");
        lab.ingress(&packet).is(&packet, reason(Reason::NoMapping));
    });
}

#[test]
fn truncated_transport_header_is_counted_in_both_directions() {
    with_mappings(|lab| {
        for (protocol, whole) in [(6, 20), (17, 8)] {
            for bytes in 4..whole {
                let part = |source: u16, destination: u16| {
                    let mut part = [source.to_be_bytes(), destination.to_be_bytes()].concat();
                    part.resize(bytes, 0);
                    Transport::Raw { protocol, bytes: part }
                };
                let request = Packet::new(client_ip(), node_ip(), part(43_210, 61_000));
                lab.ingress(&request.clone().to_this_machine())
                    .is(&request.to_this_machine(), reason(Reason::Truncated));
                let answer = Packet::new(pod_ip(), client_ip(), part(8080, 43_210));
                lab.egress(&answer.clone().to_this_machine()).is(&answer.to_this_machine(), reason(Reason::Truncated));
            }
        }
    });
}

#[test]
fn untracked_reply_is_counted_for_a_direct_connection() {
    with_mappings(|lab| {
        for packet in [tcp(pod(), client(), SYN | ACK, b""), udp(pod(), client(), b"hello")] {
            lab.egress(&packet).is(&packet, reason(Reason::UntrackedReply));
        }
    });
}

#[test]
fn tuple_conflict_gives_the_replies_to_the_newer_tcp_connection() {
    with_mappings(|lab| {
        establish(lab);
        let second = second_node();
        let segment = tcp(client(), second, ACK, b"");
        let changes = and(reason(Reason::TupleConflict), request("61000/tcp", bare()));
        lab.ingress(&segment).is(&to(&segment, pod()), changes);
        let answer = tcp(pod(), client(), ACK, b"");
        lab.egress(&answer).is(&from(&answer, node()), reply("61000/tcp", bare()));
        let syn = tcp(client(), second, SYN, b"");
        lab.ingress(&syn).is(&to(&syn, pod()), first_request("61000/tcp", bare()));
        let answer = tcp(pod(), client(), SYN | ACK, b"");
        let changes = and(reason(Reason::TupleConflict), reply("61000/tcp", bare()));
        lab.egress(&answer).is(&from(&answer, second), changes);
        let ack = tcp(client(), second, ACK, b"");
        lab.ingress(&ack).is(&to(&ack, pod()), establishing_request("61000/tcp", bare()));
        let answer = tcp(pod(), client(), ACK, b"");
        lab.egress(&answer).is(&from(&answer, second), reply("61000/tcp", bare()));
    });
}

#[test]
fn tuple_conflict_gives_the_reply_to_the_newest_udp_request() {
    with_mappings(|lab| {
        let second = second_node();
        lab.ingress(&udp(client(), node(), b"one"));
        lab.egress(&udp(pod(), client(), b"two"));
        lab.ingress(&udp(client(), node(), b"three"));
        assert!(lab.flow(flow(Udp)).is_some(), "the flow must be established");
        for nat_address in [second, node(), second, node()] {
            let datagram = udp(client(), nat_address, b"question");
            let changes = and(reason(Reason::TupleConflict), request("61000/udp", length(&datagram)));
            lab.ingress(&datagram).is(&to(&datagram, pod()), changes);
            let answer = udp(pod(), client(), b"answer");
            lab.egress(&answer).is(&from(&answer, nat_address), reply("61000/udp", length(&answer)));
        }
    });
}

#[test]
fn flow_table_full_keeps_the_flow_in_the_half_open_cache() {
    with_mappings(|lab| {
        lab.replace_flow_tables_by_full_ones();
        let syn = tcp(client(), node(), SYN, b"");
        lab.ingress(&syn).is(&to(&syn, pod()), first_request("61000/tcp", bare()));
        for _ in 0..3 {
            let answer = tcp(pod(), client(), SYN | ACK, b"");
            lab.egress(&answer).is(&from(&answer, node()), reply("61000/tcp", bare()));
            let data = tcp(client(), node(), ACK, b"data");
            let changes = and(reason(Reason::FlowTableFull), request("61000/tcp", bare() + 4));
            lab.ingress(&data).is(&to(&data, pod()), changes);
        }
    });
}
