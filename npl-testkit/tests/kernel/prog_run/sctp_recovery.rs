// SPDX-License-Identifier: Apache-2.0
//! Tests that an SCTP association whose conntrack entry is lost continues with the client's next packet, and that no
//! other packet has this effect: the Pod's packet must answer the client's.

use std::net::SocketAddr;

use npl_common::conntrack::{Phase, mid_stream_key, reply_key};
use npl_common::half_open;
use npl_testkit::packet::sctp_chunks::{
    ABORT, AUTH, COOKIE_ACK, COOKIE_ECHO, DATA, ERROR, FORWARD_TSN, HEARTBEAT, HEARTBEAT_ACK, INIT, INIT_ACK,
    RE_CONFIG, SACK, SHUTDOWN, SHUTDOWN_ACK, SHUTDOWN_COMPLETE,
};
use npl_testkit::packet::{Packet, Transport};

use super::errors::{about_request, too_large};
use super::scene::{
    NODE_PORT, Sctp, client, family, flow, from, node, node_ip, pod, pod_ip, sctp, second_node, to, with_mappings,
};
use crate::lab::{Lab, hash};

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

/// An INIT or INIT ACK with this initiate tag.
fn init(kind: u8, tag: u32) -> Chunk {
    Chunk(kind, [&tag.to_be_bytes()[..], &[0; 12]].concat())
}

/// A SHUTDOWN that acknowledges this TSN.
fn shutdown(tsn: u32) -> Chunk {
    Chunk(SHUTDOWN, tsn.to_be_bytes().to_vec())
}

fn packet(source: SocketAddr, destination: SocketAddr, tag: u32, chunks: &[Chunk]) -> Packet {
    let mut whole = sctp(source, destination, DATA, b"");
    let Transport::Sctp(transport) = &mut whole.transport else { unreachable!("the packet is SCTP") };
    transport.tag = tag;
    transport.chunks.clear();
    for Chunk(kind, content) in chunks {
        transport.add_chunk(*kind, content);
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

/// The word of the half-open cache with this key, and its index.
fn word_of(lab: &mut Lab, key: u64) -> Option<(u32, u64)> {
    let words = lab.half_open_words(flow(Sctp));
    [half_open::handshake_slot(key), half_open::second_handshake_slot(key)]
        .into_iter()
        .map(|index| (index, words[index as usize]))
        .find(|(_, word)| half_open::matches(*word, key))
}

/// Opens a handshake at the first node address, and removes the word that the client's next packet matches, as if a
/// word of another flow had overwritten it.
#[track_caller]
fn handshake_without_reply_key(lab: &mut Lab) {
    asks(lab, node(), 0, &[init(INIT, CLIENT_TAG)]);
    assert_eq!(leaves_from(lab, CLIENT_TAG, &[init(INIT_ACK, POD_TAG)]), Some(node()));
    let (index, _) = word_of(lab, reply_key(hash(flow(Sctp)), POD_TAG)).unwrap();
    lab.set_half_open_word(flow(Sctp), index, 0);
}

/// Asserts that the client's packet with this chunk establishes the flow with the first node address.
#[track_caller]
fn establishes(lab: &mut Lab, chunk: Chunk) {
    assert_eq!(lab.flow(flow(Sctp)), None);
    asks(lab, node(), POD_TAG, &[chunk]);
    let entry = lab.flow(flow(Sctp));
    let fields = entry.map(|it| (it.node_addr, it.state.node_port, it.state.pod_acknowledgement));
    assert_eq!(fields, Some((node_ip(), NODE_PORT, POD_TAG)), "the client's next packet must establish the flow");
}

/// Pairs of a client's packet and a Pod's packet that answers it.
fn answered() -> Vec<(Vec<Chunk>, Vec<Chunk>)> {
    let (asks, answers) = (heartbeat(HEARTBEAT, 1), heartbeat(HEARTBEAT_ACK, 1));
    let before_data = vec![Chunk(AUTH, vec![5; 24]), Chunk(COOKIE_ACK, vec![]), sack(CLIENT_TSN), data(POD_TSN + 1)];
    vec![
        (vec![sack(POD_TSN)], before_data),
        (vec![data(CLIENT_TSN)], vec![sack(CLIENT_TSN), heartbeat(HEARTBEAT_ACK, 1)]),
        (vec![sack(POD_TSN), heartbeat(HEARTBEAT_ACK, 1)], vec![data(POD_TSN + 1)]),
        (vec![shutdown(POD_TSN)], vec![data(POD_TSN + 1)]),
        (vec![data(CLIENT_TSN)], vec![shutdown(CLIENT_TSN)]),
        (vec![Chunk(FORWARD_TSN, CLIENT_TSN.to_be_bytes().to_vec())], vec![sack(CLIENT_TSN)]),
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
            establishes(lab, Chunk(HEARTBEAT_ACK, vec![]));
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

/// A Pod may acknowledge data only after further packets of the client have arrived.
#[test]
fn answer_to_an_earlier_packet_of_the_client_recovers_the_entry() {
    let earlier_numbers_stay = [
        (data(CLIENT_TSN), sack(POD_TSN), sack(CLIENT_TSN)),
        (data(CLIENT_TSN), Chunk(RE_CONFIG, vec![0; 4]), sack(CLIENT_TSN)),
        (sack(POD_TSN), data(CLIENT_TSN), data(POD_TSN + 1)),
        (heartbeat(HEARTBEAT, 1), heartbeat(HEARTBEAT_ACK, 2), heartbeat(HEARTBEAT_ACK, 1)),
    ];
    for (earlier, later, answer) in earlier_numbers_stay {
        with_mappings(|lab| {
            for chunk in [&earlier, &later] {
                asks(lab, node(), POD_TAG, std::slice::from_ref(chunk));
            }
            assert_eq!(leaves_from(lab, CLIENT_TAG, std::slice::from_ref(&answer)), Some(node()), "{answer:?}");
            establishes(lab, data(CLIENT_TSN + 1));
        });
    }
    // The number of a packet with another tag is not kept: the packets of two senders give no common proof.
    with_mappings(|lab| {
        asks(lab, node(), FORGED_TAG, &[data(CLIENT_TSN)]);
        asks(lab, node(), POD_TAG, &[sack(!POD_TSN)]);
        assert_eq!(leaves_from(lab, CLIENT_TAG, &[sack(CLIENT_TSN)]), Some(pod()));
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
        vec![shutdown(!POD_TSN)],
        vec![Chunk(SHUTDOWN_ACK, vec![])],
    ];
    let of_pod = [
        vec![sack(CLIENT_TSN)],
        vec![data(POD_TSN)],
        vec![sack(CLIENT_TSN), data(POD_TSN)],
        vec![heartbeat(HEARTBEAT, 1)],
        vec![heartbeat(HEARTBEAT_ACK, 1)],
        vec![Chunk(COOKIE_ACK, vec![])],
        vec![shutdown(CLIENT_TSN)],
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
            assert_eq!(leaves_from(lab, FORGED_TAG, &[init(INIT_ACK, FORGED_TAG)]), Some(pod()));
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
        // An answer to the refused packet matches no entry.
        assert_eq!(leaves_from(lab, CLIENT_TAG, &[sack(CLIENT_TSN)]), Some(pod()));
        asks(lab, node(), POD_TAG, &[data(CLIENT_TSN)]);
        assert_eq!(leaves_from(lab, CLIENT_TAG, &[sack(CLIENT_TSN)]), Some(node()));
        assert_eq!(lab.flow(flow(Sctp)), None);
    });
}

/// Of the two words of a handshake, only the word that the client's packets match is lost. The Pod's packets still match
/// the other word, and also answer the client's packet.
#[test]
fn handshake_that_lost_its_reply_key_is_completed_by_the_pods_answer() {
    with_mappings(|lab| {
        handshake_without_reply_key(lab);
        asks(lab, node(), POD_TAG, &[Chunk(COOKIE_ECHO, vec![3; 33]), data(CLIENT_TSN)]);
        assert_eq!(leaves_from(lab, CLIENT_TAG, &[Chunk(COOKIE_ACK, vec![])]), Some(node()));
        assert_eq!(leaves_from(lab, CLIENT_TAG, &[sack(CLIENT_TSN)]), Some(node()));
        establishes(lab, data(CLIENT_TSN + 1));
    });
}

/// A packet to another node address, even one whose numbers the Pod answers, does not divert a handshake.
#[test]
fn answer_to_a_packet_on_another_path_does_not_move_a_handshake() {
    with_mappings(|lab| {
        handshake_without_reply_key(lab);
        asks(lab, second_node(), FORGED_TAG, &[data(CLIENT_TSN)]);
        for _packet in 0..2 {
            assert_eq!(leaves_from(lab, CLIENT_TAG, &[sack(CLIENT_TSN)]), Some(node()));
        }
        asks(lab, second_node(), FORGED_TAG, &[data(CLIENT_TSN)]);
        assert_eq!(lab.flow(flow(Sctp)), None, "the forged packet must not establish the flow");
        asks(lab, node(), POD_TAG, &[data(CLIENT_TSN)]);
        assert_eq!(leaves_from(lab, CLIENT_TAG, &[sack(CLIENT_TSN)]), Some(node()));
        establishes(lab, data(CLIENT_TSN + 1));
    });
}

/// Earlier versions wrote the phase "replied" to a mid-stream word of SCTP before they replaced the word.
#[test]
fn mid_stream_word_with_the_phase_replied_does_not_delay_the_recovery() {
    with_mappings(|lab| {
        asks(lab, node(), POD_TAG, &[heartbeat(HEARTBEAT, 1)]);
        let key = mid_stream_key(hash(flow(Sctp)));
        let (index, word) = word_of(lab, key).expect("the packet must open an entry");
        lab.set_half_open_word(flow(Sctp), index, half_open::with_phase(word, Phase::REPLIED));
        asks(lab, node(), POD_TAG, &[heartbeat(HEARTBEAT, 2)]);
        assert_eq!(leaves_from(lab, CLIENT_TAG, &[heartbeat(HEARTBEAT_ACK, 2)]), Some(node()));
        assert_eq!(word_of(lab, key), None);
        establishes(lab, data(CLIENT_TSN));
    });
}

/// A client closes an association whose entry is lost. The SHUTDOWN ACK repeats nothing of the SHUTDOWN, so it leaves
/// untranslated; a Pod that has already ended the association repeats the tag of the client's packet.
#[test]
fn close_after_the_loss_ends_once_the_pod_has_no_association() {
    let cases = [
        (shutdown(POD_TSN), SHUTDOWN_ACK, ABORT, Phase::REFUSED),
        (Chunk(SHUTDOWN_ACK, vec![]), SHUTDOWN_COMPLETE, SHUTDOWN_COMPLETE, Phase::REQUESTED),
    ];
    for (question, unproven, reflecting, phase) in cases {
        with_mappings(|lab| {
            asks(lab, node(), POD_TAG, std::slice::from_ref(&question));
            assert_eq!(leaves_from(lab, CLIENT_TAG, &[Chunk(unproven, vec![])]), Some(pod()), "{question:?}");
            assert_eq!(leaves_from(lab, POD_TAG, &[Chunk(reflecting, vec![])]), Some(node()), "{question:?}");
            let (_, word) = word_of(lab, mid_stream_key(hash(flow(Sctp)))).unwrap();
            assert_eq!(half_open::phase(word), phase, "{question:?}");
            asks(lab, node(), POD_TAG, std::slice::from_ref(&question));
            assert_eq!(lab.flow(flow(Sctp)), None, "{question:?}");
        });
    }
}

/// Until the Pod answers, the tag of the quoted packet shows to which entry an ICMP error belongs.
#[test]
fn icmp_error_about_a_packet_without_an_entry_is_translated_by_the_tag_of_the_packet() {
    with_mappings(|lab| {
        asks(lab, node(), POD_TAG, &[data(CLIENT_TSN)]);
        for (tag, is_translated) in [(FORGED_TAG, false), (0, false), (POD_TAG, true)] {
            let quoted = packet(client(), node(), tag, &[data(CLIENT_TSN)]);
            let (leaves, translated) = about_request(too_large(), pod_ip(), &quoted, 8);
            let expected = if is_translated { &translated } else { &leaves };
            assert_eq!(lab.egress(&leaves).bytes, expected.build(), "{tag:#x} in {}", family());
        }
        assert_eq!(leaves_from(lab, CLIENT_TAG, &[sack(CLIENT_TSN)]), Some(node()), "an error must change no entry");
        // A quoted INIT has the tag 0, and belongs to no entry of a packet with this tag.
        asks(lab, second_node(), 0, &[data(CLIENT_TSN)]);
        let quoted = packet(client(), second_node(), 0, &[init(INIT, FORGED_TAG)]);
        let (leaves, _) = about_request(too_large(), pod_ip(), &quoted, 8);
        assert_eq!(lab.egress(&leaves).bytes, leaves.build());
    });
}
