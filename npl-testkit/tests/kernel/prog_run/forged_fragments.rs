// SPDX-License-Identifier: Apache-2.0
//! Tests forged fragments with a client's address. The attacker sees none of the client's packets. No forged fragment
//! that has the identification of a client's datagram arrives between the fragments of this datagram.

use std::net::SocketAddr;

use npl_common::names::{PROG_EGRESS, PROG_INGRESS};
use npl_testkit::packet::Packet;
use npl_testkit::packet::tcp_flags::{ACK, FIN, PSH, SYN};

use super::forged::{FLAGS, FORGED_ISNS, is_direct, is_undisturbed};
use super::fragments::{fragments, pieces};
use super::scene::{
    DIRECT_ISNS, SECOND_NODE_PORT, Tcp, Udp, client, direct_answer, establishes, flow, from, is_reply_translated, node,
    node_ip, other_pod_ip, pod, second_node, tcp, to, udp, with_isns, with_mappings,
};
use super::sweep::expire_flows;
use crate::lab::{Lab, NEXT};

/// The identification of the client's datagrams, and the identifications of forged datagrams.
const ID: u32 = 0x4e51;
const FORGED_IDS: [u32; 2] = [ID, ID + 1];
/// The payload size in bytes of a fragment that is too short for the checksum of a TCP segment.
const TINY: usize = 16;

/// Sends a forged packet twice with each forged identification: in fragments that reach the Pod, and in tiny fragments,
/// of which the first is too short for the checksum of a TCP segment.
#[track_caller]
fn attack(lab: &mut Lab, packet: &Packet) {
    for id in FORGED_IDS {
        let expected = fragments(&to(packet, pod()), id);
        for (frame, expected) in fragments(packet, id).iter().zip(&expected) {
            let outcome = lab.run(PROG_INGRESS, frame);
            assert_eq!((outcome.action, &outcome.bytes), (NEXT, expected));
        }
        for frame in pieces(packet, id, TINY).iter().take(2) {
            assert_eq!(lab.run(PROG_INGRESS, frame).action, NEXT);
        }
    }
}

/// Sends forged segments of all kinds, each in several fragments, to the mapping, to another node address and to the
/// Pod.
#[track_caller]
fn attack_by_segments(lab: &mut Lab) {
    for destination in [node(), second_node(), pod()] {
        for (flags, isns) in FLAGS.into_iter().zip(FORGED_ISNS.into_iter().cycle()) {
            attack(lab, &with_isns(tcp(client(), destination, flags, &[7; 100]), isns));
        }
    }
}

fn datagram(destination: SocketAddr) -> Packet {
    udp(client(), destination, &[7; 150])
}

#[test]
fn fragments_of_forged_segments_do_not_disturb_a_connection() {
    with_mappings(|lab| {
        attack_by_segments(lab);
        lab.ingress(&tcp(client(), node(), SYN, b""));
        attack_by_segments(lab);
        is_reply_translated(lab, SYN | ACK);
        attack_by_segments(lab);
        establishes(lab);
        attack_by_segments(lab);
        is_reply_translated(lab, ACK);
        attack_by_segments(lab);
        is_undisturbed(lab);
    });
}

#[test]
fn fragments_of_forged_segments_do_not_divert_the_replies_of_a_direct_connection() {
    with_mappings(|lab| {
        let syn = with_isns(tcp(client(), pod(), SYN, b""), DIRECT_ISNS);
        lab.ingress(&syn).is(&syn, vec![]);
        for flags in [SYN | ACK, ACK, ACK | PSH, FIN | ACK] {
            attack_by_segments(lab);
            is_direct(lab, &direct_answer(flags));
        }
        assert_eq!((lab.flow(flow(Tcp)), lab.own_slot(flow(Tcp))), (None, None));
    });
}

#[test]
fn fragments_of_forged_datagrams_on_the_clients_own_path_do_not_disturb_its_flow() {
    for server in [node, pod] {
        with_mappings(|lab| {
            let (question, answer) = (udp(client(), server(), b"question"), udp(pod(), client(), b"answer"));
            let is_answered = |lab: &mut Lab| {
                attack(lab, &datagram(server()));
                assert_eq!(lab.egress(&answer).bytes, from(&answer, server()).build());
            };
            attack(lab, &datagram(server()));
            for _exchange in 0..3 {
                assert_eq!(lab.ingress(&question).bytes, to(&question, pod()).build());
                is_answered(lab);
                is_answered(lab);
            }
            expire_flows(lab);
            is_answered(lab);
        });
    }
}

/// Before the client's datagram, the attacker sends fragments with the same identification: to the Pod's own address,
/// to a node port of another Pod, and to ports of the host. The client's fragments must still reach the Pod.
#[test]
fn forged_fragments_ahead_of_a_clients_datagram_do_not_divert_it() {
    with_mappings(|lab| {
        lab.add(Udp, SECOND_NODE_PORT, (other_pod_ip(), 53).into(), 7);
        let forged = [(node_ip(), SECOND_NODE_PORT).into(), (node_ip(), 53).into(), (node_ip(), 61_050).into(), pod()];
        for (packet, server) in [(datagram(node()), pod()), (datagram(second_node()), pod())] {
            let forge = |lab: &mut Lab, id| {
                for destination in forged {
                    for frame in fragments(&to(&packet, destination), id) {
                        assert_eq!(lab.run(PROG_INGRESS, &frame).action, NEXT);
                    }
                }
            };
            forge(lab, ID);
            for (frame, expected) in fragments(&packet, ID).iter().zip(fragments(&to(&packet, server), ID)) {
                assert_eq!(lab.run(PROG_INGRESS, frame).bytes, expected);
                forge(lab, ID + 1);
            }
        }
    });
}

/// Forged request fragments with the identification of a fragmented reply must not change the reply's translation,
/// because requests and replies have separate fragment tracking records.
#[test]
fn forged_fragments_do_not_divert_a_fragmented_reply() {
    with_mappings(|lab| {
        lab.ingress(&udp(client(), node(), b"question"));
        let answer = udp(pod(), client(), &[7; 300]);
        for (frame, expected) in fragments(&answer, ID).iter().zip(fragments(&from(&answer, node()), ID)) {
            assert_eq!(lab.run(PROG_EGRESS, frame).bytes, expected);
            attack(lab, &datagram(node()));
            for forged in fragments(&to(&from(&answer, client()), node()), ID) {
                assert_eq!(lab.run(PROG_INGRESS, &forged).action, NEXT);
            }
        }
    });
}
