// SPDX-License-Identifier: Apache-2.0
//! Tests the reverse NAT of Pods' replies.

use npl_agent::core::model::Family;
use npl_testkit::packet::Checksum;
use npl_testkit::packet::tcp_flags::{ACK, PSH, SYN};

use super::scene::{
    GENERATION, NODE_PORT, SECOND_NODE_PORT, Tcp, Udp, bare, client, establish, family, flow, from, length, node, pod,
    random_packets, second_node, tcp, udp, with_mappings, with_mappings_of,
};
use crate::counters::reply;
use crate::lab::Lab;

/// Opens a TCP flow and a UDP flow.
fn open(lab: &mut Lab) {
    lab.ingress(&tcp(client(), node(), SYN, b""));
    lab.ingress(&udp(client(), node(), b"hello"));
}

#[test]
fn tcp_reply_comes_from_the_node() {
    with_mappings(|lab| {
        open(lab);
        let answer = tcp(pod(), client(), SYN | ACK, b"");
        lab.egress(&answer).is(&from(&answer, node()), reply("61000/tcp", bare()));
    });
}

#[test]
fn udp_reply_comes_from_the_node() {
    with_mappings(|lab| {
        open(lab);
        let answer = udp(pod(), client(), b"hello yourself");
        lab.egress(&answer).is(&from(&answer, node()), reply("61000/udp", length(&answer)));
    });
}

#[test]
fn reply_comes_from_the_clients_nat_address() {
    with_mappings(|lab| {
        let second = second_node();
        lab.ingress(&tcp(client(), second, SYN, b""));
        let answer = tcp(pod(), client(), SYN | ACK, b"");
        lab.egress(&answer).is(&from(&answer, second), reply("61000/tcp", bare()));
    });
}

#[test]
fn reply_without_udp_checksum_keeps_none() {
    with_mappings(|lab| {
        open(lab);
        let mut answer = udp(pod(), client(), b"no checksum");
        *answer.transport.checksum_mut().unwrap() = Checksum::Zero;
        lab.egress(&answer).is(&from(&answer, node()), reply("61000/udp", length(&answer)));
    });
}

#[test]
fn reply_keeps_ip_options_and_all_other_header_fields() {
    with_mappings_of(Family::V4, |lab| {
        open(lab);
        let mut answer = tcp(pod(), client(), SYN | ACK, b"");
        let ip = answer.ipv4_mut().unwrap();
        (ip.tos, ip.ttl, ip.identification) = (0x28, 63, 0);
        ip.options = vec![1; 39];
        lab.egress(&answer).is(&from(&answer, node()), reply("61000/tcp", length(&answer)));
    });
}

#[test]
fn reply_of_a_removed_mapping_is_passed_unchanged() {
    with_mappings(|lab| {
        open(lab);
        lab.remove(family(), Tcp, NODE_PORT);
        let answer = tcp(pod(), client(), SYN | ACK, b"");
        lab.egress(&answer).is(&answer, vec![]);
    });
}

#[test]
fn established_flow_survives_the_removal_of_one_of_two_mappings_of_a_pod_port() {
    with_mappings(|lab| {
        lab.add(Tcp, SECOND_NODE_PORT, pod(), GENERATION);
        lab.ingress(&tcp(client(), node(), SYN, b""));
        lab.egress(&tcp(pod(), client(), SYN | ACK, b""));
        lab.ingress(&tcp(client(), node(), ACK, b""));
        assert!(lab.flow(flow(Tcp)).is_some());
        lab.remove(family(), Tcp, NODE_PORT);
        let answer = tcp(pod(), client(), PSH | ACK, b"more");
        lab.egress(&answer).is(&from(&answer, node()), reply("61001/tcp", length(&answer)));
    });
}

#[test]
fn updated_checksums_of_replies_equal_a_full_computation() {
    with_mappings(|lab| {
        open(lab);
        establish(lab);
        lab.egress(&udp(pod(), client(), b"first"));
        assert!(lab.slot(flow(Udp)).is_some());
        for answer in random_packets(pod(), client(), 400) {
            let outcome = lab.egress(&answer);
            assert_eq!(outcome.bytes, from(&answer, node()).build(), "{answer:?}");
        }
    });
}
