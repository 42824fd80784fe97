// SPDX-License-Identifier: Apache-2.0
//! Tests that an SCTP association whose conntrack entry is lost continues with the client's next packet, and that no
//! other packet has this effect: the Pod's packet must answer the client's.

use std::net::SocketAddr;

use npl_testkit::packet::sctp_chunks::{
    ABORT, COOKIE_ACK, COOKIE_ECHO, DATA, ERROR, HEARTBEAT, HEARTBEAT_ACK, INIT, INIT_ACK, SACK, SHUTDOWN,
    SHUTDOWN_ACK, SHUTDOWN_COMPLETE,
};
use npl_testkit::packet::{Packet, Transport};

use super::scene::{
    NODE_PORT, Sctp, client, family, flow, from, node, node_ip, pod, sctp, second_node, to, with_mappings,
};
use crate::lab::Lab;

/// The verification tags of the packets to the Pod, of the packets to the client, and of a forged packet.
const POD_TAG: u32 = 0x1a01_0203;
const CLIENT_TAG: u32 = 0x7c01_0203;
const FORGED_TAG: u32 = 0x3e01_0203;
/// The client's and the Pod's transmission sequence numbers, which differ in their high bits.
const CLIENT_TSN: u32 = 0x2000_0000;
const POD_TSN: u32 = 0x9000_0000;
/// Offset of the random number in a HEARTBEAT of Linux, and length of this HEARTBEAT without the chunk header.
const RANDOM: usize = 40;
const HEARTBEAT_LENGTH: usize = 56;

/// One chunk: its type and its content.
#[derive(Clone, Debug)]
struct Chunk(u8, Vec<u8>);

fn data(tsn: u32) -> Chunk {
    Chunk(DATA, [&tsn.to_be_bytes()[..], &[0; 8], b"data"].concat())
}

fn sack(tsn: u32) -> Chunk {
    Chunk(SACK, [&tsn.to_be_bytes()[..], &[0; 8]].concat())
}

fn heartbeat(kind: u8, random: u8) -> Chunk {
    let mut content = vec![7; HEARTBEAT_LENGTH];
    content[..4].copy_from_slice(&[0, 1, 0, 56]);
    content[RANDOM] = random;
    Chunk(kind, content)
}

fn packet(source: SocketAddr, destination: SocketAddr, tag: u32, chunks: &[Chunk]) -> Packet {
    let mut whole = sctp(source, destination, DATA, b"");
    let Transport::Sctp(transport) = &mut whole.transport else { unreachable!("the packet is SCTP") };
    transport.tag = tag;
    transport.chunks.clear();
    for Chunk(kind, content) in chunks {
        let Transport::Sctp(one) = sctp(source, destination, *kind, content).transport else {
            unreachable!("as above")
        };
        transport.chunks.extend(one.chunks);
    }
    whole
}

#[track_caller]
fn asks(lab: &mut Lab, destination: SocketAddr, tag: u32, chunks: &[Chunk]) {
    let packet = packet(client(), destination, tag, chunks);
    assert_eq!(lab.ingress(&packet).bytes, to(&packet, pod()).build());
}

/// The source of the Pod's packet after the program.
fn leaves_from(lab: &mut Lab, tag: u32, chunks: &[Chunk]) -> Option<SocketAddr> {
    let packet = packet(pod(), client(), tag, chunks);
    let bytes = lab.egress(&packet).bytes;
    [pod(), node(), second_node()].into_iter().find(|source| bytes == from(&packet, *source).build())
}

/// Pairs of a client's packet and a Pod's packet that answers it.
fn answered() -> Vec<(Vec<Chunk>, Vec<Chunk>)> {
    let (asks, answers) = (heartbeat(HEARTBEAT, 1), heartbeat(HEARTBEAT_ACK, 1));
    vec![
        (vec![data(CLIENT_TSN)], vec![sack(CLIENT_TSN)]),
        (vec![data(CLIENT_TSN)], vec![sack(CLIENT_TSN - 9), data(POD_TSN)]),
        (vec![data(CLIENT_TSN), data(CLIENT_TSN + 1)], vec![sack(CLIENT_TSN + 1)]),
        (vec![sack(POD_TSN)], vec![data(POD_TSN + 1)]),
        (vec![sack(POD_TSN), data(CLIENT_TSN)], vec![sack(CLIENT_TSN)]),
        (vec![sack(POD_TSN), data(CLIENT_TSN)], vec![data(POD_TSN + 1)]),
        (vec![sack(POD_TSN), data(CLIENT_TSN)], vec![sack(CLIENT_TSN), data(POD_TSN + 1)]),
        (vec![Chunk(COOKIE_ECHO, vec![3; 33]), data(CLIENT_TSN)], vec![Chunk(COOKIE_ACK, vec![]), sack(CLIENT_TSN)]),
        (vec![asks], vec![answers]),
    ]
}

#[test]
fn lost_entry_is_recovered_by_the_pods_answer_to_the_clients_packet() {
    for (question, answer) in answered() {
        with_mappings(|lab| {
            asks(lab, node(), POD_TAG, &question);
            assert_eq!(leaves_from(lab, CLIENT_TAG, &answer), Some(node()), "in {}", family());
            // From now on, the tags prove that a packet belongs to the association, whatever its chunks are.
            let later = [heartbeat(HEARTBEAT, 2), Chunk(ERROR, vec![]), data(POD_TSN + 2)];
            for chunk in &later {
                assert_eq!(leaves_from(lab, CLIENT_TAG, std::slice::from_ref(chunk)), Some(node()));
            }
            // Forged packets change nothing: their tag is not the association's.
            for destination in [second_node(), node()] {
                asks(lab, destination, FORGED_TAG, &[data(CLIENT_TSN)]);
                assert_eq!(leaves_from(lab, CLIENT_TAG, &[data(POD_TSN + 2)]), Some(node()));
            }
            assert_eq!(lab.flow(flow(Sctp)), None);
            asks(lab, node(), POD_TAG, &[Chunk(HEARTBEAT_ACK, vec![])]);
            let entry = lab.flow(flow(Sctp)).expect("the client's next packet must establish the flow again");
            assert_eq!((entry.node_addr, entry.state.node_port), (node_ip(), NODE_PORT));
            assert_eq!(entry.state.pod_acknowledgement, POD_TAG);
            assert_eq!(leaves_from(lab, CLIENT_TAG, &[data(POD_TSN + 3)]), Some(node()));
        });
    }
}

/// A client with several addresses sends HEARTBEATs from each of them. The client's last packet determines the answer.
#[test]
fn newer_packet_of_the_client_replaces_the_numbers_of_an_older_one() {
    with_mappings(|lab| {
        asks(lab, second_node(), FORGED_TAG, &[data(7)]);
        for random in 1..4 {
            asks(lab, node(), POD_TAG, &[heartbeat(HEARTBEAT, random)]);
        }
        assert_eq!(leaves_from(lab, CLIENT_TAG, &[heartbeat(HEARTBEAT_ACK, 2)]), Some(pod()));
        assert_eq!(leaves_from(lab, CLIENT_TAG, &[heartbeat(HEARTBEAT_ACK, 3)]), Some(node()));
    });
}

/// The client and the Pod have a direct association. A forged packet with any numbers but those of the association must
/// not divert the Pod's packets, also if it is repeated.
#[test]
fn forged_numbers_do_not_divert_a_direct_association() {
    let forged = [
        vec![data(!CLIENT_TSN)],
        vec![data(0)],
        vec![data(POD_TSN)],
        vec![sack(!POD_TSN)],
        vec![sack(0)],
        vec![sack(CLIENT_TSN)],
        vec![sack(!POD_TSN), data(!CLIENT_TSN)],
        vec![heartbeat(HEARTBEAT, 9)],
        vec![heartbeat(HEARTBEAT_ACK, 9)],
        vec![Chunk(COOKIE_ECHO, vec![3; 33])],
        vec![Chunk(SHUTDOWN, POD_TSN.to_be_bytes().to_vec())],
        vec![Chunk(SHUTDOWN_ACK, vec![])],
    ];
    let of_pod = [
        vec![sack(CLIENT_TSN)],
        vec![data(POD_TSN)],
        vec![sack(CLIENT_TSN), data(POD_TSN)],
        vec![heartbeat(HEARTBEAT, 1)],
        vec![heartbeat(HEARTBEAT_ACK, 1)],
        vec![Chunk(COOKIE_ACK, vec![])],
        vec![Chunk(SHUTDOWN, CLIENT_TSN.to_be_bytes().to_vec())],
        vec![Chunk(SHUTDOWN_ACK, vec![])],
        vec![Chunk(SHUTDOWN_COMPLETE, vec![])],
        vec![Chunk(ERROR, vec![])],
        vec![Chunk(ABORT, vec![])],
    ];
    with_mappings(|lab| {
        for question in &forged {
            for answer in &of_pod {
                for destination in [node(), second_node(), node()] {
                    asks(lab, destination, FORGED_TAG, question);
                    let source = leaves_from(lab, CLIENT_TAG, answer);
                    assert_eq!(source, Some(pod()), "forged {question:?}, then {answer:?} in {}", family());
                }
            }
        }
        assert_eq!((lab.flow(flow(Sctp)), lab.own_slot(flow(Sctp))), (None, None));
    });
}

/// A Pod answers an INIT in every state, with the initiate tag of the INIT. If an attacker forges an INIT to the Pod and
/// a packet to a mapping with the same tag, the INIT ACK must not count as the answer to the packet.
#[test]
fn init_ack_to_a_forged_init_proves_no_forged_packet() {
    with_mappings(|lab| {
        for kind in [DATA, HEARTBEAT, COOKIE_ECHO] {
            asks(lab, second_node(), FORGED_TAG, &[Chunk(kind, FORGED_TAG.to_be_bytes().to_vec())]);
            let init_ack = Chunk(INIT_ACK, [&FORGED_TAG.to_be_bytes()[..], &[0; 12]].concat());
            assert_eq!(leaves_from(lab, FORGED_TAG, &[init_ack]), Some(pod()));
            asks(lab, second_node(), FORGED_TAG, &[data(CLIENT_TSN)]);
            assert_eq!(leaves_from(lab, CLIENT_TAG, &[data(POD_TSN)]), Some(pod()));
        }
        assert_eq!(lab.flow(flow(Sctp)), None);
    });
}

/// A Pod that has no association answers each packet with an ABORT, which repeats the tag of the packet.
#[test]
fn abort_by_a_pod_without_the_association_reaches_the_client() {
    with_mappings(|lab| {
        asks(lab, node(), POD_TAG, &[data(CLIENT_TSN)]);
        let abort = [Chunk(ABORT, vec![])];
        assert_eq!(leaves_from(lab, CLIENT_TAG, &abort), Some(pod()));
        assert_eq!(leaves_from(lab, POD_TAG, &abort), Some(node()));
        asks(lab, node(), CLIENT_TAG, &[Chunk(INIT, vec![0; 16])]);
        assert_eq!(lab.flow(flow(Sctp)), None);
    });
}
