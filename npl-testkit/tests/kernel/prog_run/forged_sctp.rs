// SPDX-License-Identifier: Apache-2.0
//! Tests forged SCTP packets with a client's address. The attacker knows none of the association's tags.

use std::net::SocketAddr;
use std::sync::Mutex;

use npl_common::conntrack;
use npl_common::flow::FlowState;
use npl_common::mapping::protocol;
use npl_common::reason::Reason;
use npl_testkit::packet::sctp_chunks::{
    ABORT, COOKIE_ACK, COOKIE_ECHO, DATA, ERROR, HEARTBEAT, INIT, INIT_ACK, SACK, SHUTDOWN, SHUTDOWN_ACK,
    SHUTDOWN_COMPLETE,
};
use npl_testkit::packet::{Packet, SCTP_TAG, Transport};

use super::scene::{NODE_PORT, Sctp, client, family, flow, from, node, pod, sctp, second_node, to, with_mappings};
use super::sweep::{expire_flows, expire_words};
use crate::counters::reason;
use crate::lab::{Lab, NEXT};

const KINDS: [u8; 12] = [
    INIT,
    INIT_ACK,
    COOKIE_ECHO,
    COOKIE_ACK,
    DATA,
    SACK,
    HEARTBEAT,
    ERROR,
    SHUTDOWN,
    SHUTDOWN_ACK,
    SHUTDOWN_COMPLETE,
    ABORT,
];
/// Chunk types that create no entry in the flow table without a complete handshake.
const HANDSHAKE_KINDS: [u8; 2] = [INIT, ABORT];
const FORGED_TAG: u32 = SCTP_TAG ^ 1 << 31;
/// The bytes of the client's, the Pod's and forged transmission sequence numbers and heartbeats.
const CLIENT_BYTE: u8 = 0x20;
const POD_BYTE: u8 = 0x90;
const FORGED_BYTE: u8 = 0xf1;

/// The content of a chunk: a TSN or a random heartbeat that consists of the byte `own`, or an acknowledged TSN that
/// consists of the byte `other`.
fn content(kind: u8, own: u8, other: u8) -> Vec<u8> {
    match kind {
        DATA | HEARTBEAT => vec![own; 16],
        SACK => vec![other; 12],
        SHUTDOWN => vec![other; 4],
        _ => vec![],
    }
}

/// Sends forged packets with these chunk types to `destination`, and asserts that they reach the Pod.
#[track_caller]
fn attack(lab: &mut Lab, destination: SocketAddr, kinds: &[u8]) {
    for kind in kinds {
        let mut forged = sctp(client(), destination, *kind, &content(*kind, FORGED_BYTE, FORGED_BYTE));
        let Transport::Sctp(packet) = &mut forged.transport else { unreachable!("the packet is SCTP") };
        if matches!(*kind, INIT | INIT_ACK) {
            packet.chunks[4..8].copy_from_slice(&FORGED_TAG.to_be_bytes());
        }
        if *kind != INIT {
            packet.tag = FORGED_TAG;
        }
        let outcome = lab.ingress(&forged);
        assert_eq!((outcome.action, outcome.bytes), (NEXT, to(&forged, pod()).build()), "{kind}");
    }
}

/// The idle timeout of the association's entry.
fn timeout_ns(lab: &Lab) -> u64 {
    let FlowState { client_tcp_flags, pod_tcp_flags, .. } = lab.flow(flow(Sctp)).unwrap().state;
    let state = conntrack::State::established(client_tcp_flags, pod_tcp_flags);
    conntrack::established_timeout_ns(state, protocol::SCTP, false)
}

#[track_caller]
fn asks(lab: &mut Lab, server: SocketAddr, kind: u8) {
    let packet = sctp(client(), server, kind, &content(kind, CLIENT_BYTE, POD_BYTE));
    assert_eq!(lab.ingress(&packet).bytes, to(&packet, pod()).build());
}

fn answer(kind: u8) -> Packet {
    sctp(pod(), client(), kind, &content(kind, POD_BYTE, CLIENT_BYTE))
}

#[track_caller]
fn is_answered(lab: &mut Lab, kind: u8) {
    assert_eq!(lab.egress(&answer(kind)).bytes, from(&answer(kind), node()).build(), "{kind}");
}

#[test]
fn forged_inits_and_aborts_during_a_handshake_do_not_disturb_the_association() {
    with_mappings(|lab| {
        let attack_both =
            |lab: &mut Lab| [node(), second_node()].into_iter().for_each(|it| attack(lab, it, &HANDSHAKE_KINDS));
        attack_both(lab);
        for (kind, of_pod) in [(INIT, INIT_ACK), (COOKIE_ECHO, COOKIE_ACK)] {
            asks(lab, node(), kind);
            attack_both(lab);
            is_answered(lab, of_pod);
            attack_both(lab);
        }
        asks(lab, node(), DATA);
        attack(lab, second_node(), &HANDSHAKE_KINDS);
        is_answered(lab, DATA);
        assert!(lab.flow(flow(Sctp)).is_some());
    });
}

/// A forged ABORT, SHUTDOWN or SHUTDOWN ACK must not shorten the idle timeout of the association's entry.
#[test]
fn forged_packets_do_not_disturb_an_established_association() {
    with_mappings(|lab| {
        for (kind, of_pod) in [(INIT, INIT_ACK), (COOKIE_ECHO, COOKIE_ACK)] {
            asks(lab, node(), kind);
            is_answered(lab, of_pod);
        }
        for _exchange in 0..3 {
            for destination in [node(), second_node()] {
                attack(lab, destination, &KINDS);
            }
            is_answered(lab, DATA);
            asks(lab, node(), DATA);
        }
        let entry = lab.flow(flow(Sctp)).unwrap();
        assert_eq!((entry.node_addr, entry.state.node_port), (node().ip(), NODE_PORT));
        assert_eq!(timeout_ns(lab), conntrack::SCTP_NS);
        asks(lab, node(), SHUTDOWN);
        assert_eq!(timeout_ns(lab), conntrack::HALF_CLOSED_NS, "the client's SHUTDOWN must count");
        asks(lab, node(), ABORT);
        assert_eq!(timeout_ns(lab), conntrack::CLOSED_NS, "the client's ABORT must count");
    });
}

/// The Pod discards packets with a wrong tag, and the program changes no state for packets to the Pod's own address.
#[test]
fn forged_packets_to_the_pod_do_not_disturb_an_association() {
    with_mappings(|lab| {
        for (kind, of_pod) in [(INIT, INIT_ACK), (COOKIE_ECHO, COOKIE_ACK), (DATA, DATA)] {
            attack(lab, pod(), &KINDS);
            asks(lab, node(), kind);
            attack(lab, pod(), &KINDS);
            is_answered(lab, of_pod);
        }
    });
}

#[test]
fn forged_inits_and_aborts_do_not_divert_the_replies_of_a_direct_association() {
    with_mappings(|lab| {
        for (kind, of_pod) in [(INIT, INIT_ACK), (COOKIE_ECHO, COOKIE_ACK), (DATA, DATA)] {
            asks(lab, pod(), kind);
            for node in [node(), second_node()] {
                attack(lab, node, &HANDSHAKE_KINDS);
            }
            lab.egress(&answer(of_pod)).is(&answer(of_pod), reason(Reason::UntrackedReply));
        }
        assert_eq!((lab.flow(flow(Sctp)), lab.slot(flow(Sctp))), (None, None));
    });
}

/// Opens an association, while forged packets with one chunk type arrive at `destination` before and after each step of
/// the handshake and of the first exchange. The error is the first difference from an undisturbed association.
fn harm_to_a_handshake(lab: &mut Lab, destination: SocketAddr, kind: u8) -> Result<(), String> {
    attack(lab, destination, &[kind]);
    for (of_client, of_pod) in [(INIT, INIT_ACK), (COOKIE_ECHO, COOKIE_ACK), (DATA, DATA)] {
        asks(lab, node(), of_client);
        attack(lab, destination, &[kind]);
        answers_from(lab, of_pod, node())?;
        attack(lab, destination, &[kind]);
    }
    asks(lab, node(), DATA);
    answers_from(lab, DATA, node())?;
    is_open(lab)
}

/// Does the same as [`harm_to_a_handshake`] for an idle association: its entry has timed out, and the Pod sends first.
fn harm_to_an_idle_association(lab: &mut Lab, destination: SocketAddr, kind: u8) -> Result<(), String> {
    for (of_client, of_pod) in [(INIT, INIT_ACK), (COOKIE_ECHO, COOKIE_ACK), (DATA, DATA)] {
        asks(lab, node(), of_client);
        answers_from(lab, of_pod, node())?;
    }
    expire_flows(lab);
    for of_pod in [HEARTBEAT, DATA] {
        attack(lab, destination, &[kind]);
        answers_from(lab, of_pod, node())?;
    }
    asks(lab, node(), DATA);
    answers_from(lab, DATA, node())?;
    is_open(lab)
}

/// Does the same as [`harm_to_an_idle_association`] for an association of which the half-open cache has no word either.
/// The Pod's packets then leave untranslated until the Pod has answered the client's next packet.
fn harm_to_a_forgotten_association(lab: &mut Lab, destination: SocketAddr, kind: u8) -> Result<(), String> {
    for (of_client, of_pod) in [(INIT, INIT_ACK), (COOKIE_ECHO, COOKIE_ACK), (DATA, DATA)] {
        asks(lab, node(), of_client);
        answers_from(lab, of_pod, node())?;
    }
    expire_flows(lab);
    expire_words(lab);
    for of_pod in [HEARTBEAT, DATA] {
        attack(lab, destination, &[kind]);
        answers_from(lab, of_pod, pod())?;
    }
    asks(lab, node(), DATA);
    answers_from(lab, SACK, node())?;
    attack(lab, destination, &[kind]);
    asks(lab, node(), DATA);
    answers_from(lab, DATA, node())?;
    is_open(lab)
}

fn answers_from(lab: &mut Lab, kind: u8, source: SocketAddr) -> Result<(), String> {
    let is_right = lab.egress(&answer(kind)).bytes == from(&answer(kind), source).build();
    if is_right { Ok(()) } else { Err(format!("the Pod's chunk {kind} does not leave from {source}")) }
}

/// Returns an error unless the flow table has an entry of an open association with the client's NAT address.
fn is_open(lab: &Lab) -> Result<(), String> {
    let entry = lab.flow(flow(Sctp)).ok_or("the flow table has no entry")?;
    if (entry.node_addr, entry.state.node_port) != (node().ip(), NODE_PORT) {
        return Err(format!("the NAT address is {}:{}", entry.node_addr, entry.state.node_port));
    }
    let timeout = timeout_ns(lab);
    if timeout == conntrack::SCTP_NS { Ok(()) } else { Err(format!("the idle timeout is {timeout} ns")) }
}

/// Runs `test` with each type of chunk in each family, and asserts that no type does harm.
#[track_caller]
fn no_type_does_harm(test: impl Fn(&mut Lab, u8) -> Result<(), String> + Send + Sync) {
    let harm = Mutex::new(Vec::new());
    for kind in KINDS {
        with_mappings(|lab| {
            if let Err(error) = test(lab, kind) {
                harm.lock().unwrap().push(format!("forged chunk {kind} in {}: {error}", family()));
            }
        });
    }
    let harm = harm.into_inner().unwrap();
    assert!(harm.is_empty(), "{harm:#?}");
}

#[test]
fn forged_packets_to_the_pod_do_not_disturb_a_handshake() {
    no_type_does_harm(|lab, kind| harm_to_a_handshake(lab, pod(), kind));
}

#[test]
fn forged_packets_to_the_pod_do_not_disturb_an_idle_association() {
    no_type_does_harm(|lab, kind| harm_to_an_idle_association(lab, pod(), kind));
}

#[test]
fn forged_packets_on_the_clients_own_path_do_not_disturb_a_handshake() {
    no_type_does_harm(|lab, kind| harm_to_a_handshake(lab, node(), kind));
}

#[test]
fn forged_packets_to_another_node_address_do_not_disturb_a_handshake() {
    no_type_does_harm(|lab, kind| harm_to_a_handshake(lab, second_node(), kind));
}

#[test]
fn forged_packets_on_the_clients_own_path_do_not_disturb_an_idle_association() {
    no_type_does_harm(|lab, kind| harm_to_an_idle_association(lab, node(), kind));
}

#[test]
fn forged_packets_to_another_node_address_do_not_disturb_an_idle_association() {
    no_type_does_harm(|lab, kind| harm_to_an_idle_association(lab, second_node(), kind));
}

#[test]
fn forged_packets_do_not_disturb_the_recovery_of_a_forgotten_association() {
    for destination in [node, second_node, pod] {
        no_type_does_harm(|lab, kind| harm_to_a_forgotten_association(lab, destination(), kind));
    }
}

#[test]
fn forged_packets_of_all_types_do_not_divert_the_replies_of_a_direct_association() {
    for destination in [node, second_node] {
        no_type_does_harm(|lab, kind| {
            for (of_client, of_pod) in [(INIT, INIT_ACK), (COOKIE_ECHO, COOKIE_ACK), (DATA, DATA)] {
                asks(lab, pod(), of_client);
                attack(lab, destination(), &[kind]);
                answers_from(lab, of_pod, pod())?;
            }
            Ok(())
        });
    }
}
