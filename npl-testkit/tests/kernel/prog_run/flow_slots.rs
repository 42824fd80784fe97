// SPDX-License-Identifier: Apache-2.0
//! Slots of the half-open cache: packets of flows that are not established take no established flow's slot.

use std::net::SocketAddr;

use npl_agent::core::model::Protocol;
use npl_common::reason::Reason;
use npl_common::{conntrack::Phase, half_open};
use npl_testkit::packet::Packet;
use npl_testkit::packet::sctp_chunks::DATA;
use npl_testkit::packet::tcp_flags::{ACK, PSH};

use super::scene::{
    NODE_PORT, Sctp, Tcp, Udp, client, establish, flow, from, ip, length, node, pod, sctp, tcp, to, udp, with_mappings,
};
use super::sctp_flows;
use crate::counters::{establishing_request, first_request, reason, reply, request};
use crate::lab::{FlowId, Lab, hash};

/// Flows without an entry that have the established flow's first slot, for each protocol.
const FLOOD: usize = 6;

pub(super) fn packet(protocol: Protocol, from: SocketAddr, to: SocketAddr) -> Packet {
    match protocol {
        Tcp => tcp(from, to, PSH | ACK, b"data"),
        Udp => udp(from, to, b"data"),
        Sctp => sctp(from, to, DATA, b"data"),
    }
}

pub(super) fn mapping(protocol: Protocol) -> &'static str {
    match protocol {
        Tcp => "61000/tcp",
        Udp => "61000/udp",
        Sctp => "61000/sctp",
    }
}

pub(super) fn establish_by(lab: &mut Lab, protocol: Protocol) {
    match protocol {
        Tcp => establish(lab),
        Udp => {
            for _exchange in 0..2 {
                lab.ingress(&packet(Udp, client(), node()));
                lab.egress(&packet(Udp, pod(), client()));
            }
        }
        Sctp => sctp_flows::establish(lab),
    }
    assert_eq!(own_phase(lab, protocol), Some(Phase::ESTABLISHED));
}

fn own_phase(lab: &mut Lab, protocol: Protocol) -> Option<Phase> {
    lab.own_slot(flow(protocol)).map(half_open::phase)
}

/// Forged clients whose flows have the same first slot as `taken`.
fn rivals(protocol: Protocol, taken: FlowId) -> impl Iterator<Item = SocketAddr> {
    let slot = half_open::slot(hash(taken));
    let addresses = (1..=250_u8).map(|host| ip(&format!("198.18.0.{host}"), &format!("2001:db8:0:3::{host}")));
    let endpoints = addresses.flat_map(|addr| (1..=u16::MAX).map(move |port| SocketAddr::new(addr, port)));
    endpoints.filter(move |client| half_open::slot(hash(FlowId { client: *client, pod: pod(), protocol })) == slot)
}

#[test]
fn flood_of_packets_without_a_flow_takes_no_slot_of_an_established_flow() {
    with_mappings(|lab| {
        for established in [Tcp, Udp, Sctp] {
            establish_by(lab, established);
            for flood in [Udp, Sctp, Tcp] {
                for rival in rivals(flood, flow(established)).take(FLOOD) {
                    let forged = packet(flood, rival, node());
                    lab.ingress(&forged).is(&to(&forged, pod()), first_request(mapping(flood), length(&forged)));
                    let phase = own_phase(lab, established);
                    assert_eq!(phase, Some(Phase::ESTABLISHED), "{established:?} after {flood:?} of {rival}");
                    // The forged client may be a real one: its reply is translated.
                    let answer = packet(flood, pod(), rival);
                    lab.egress(&answer).is(&from(&answer, node()), reply(mapping(flood), length(&answer)));
                }
            }
            let (more, answer) = (packet(established, client(), node()), packet(established, pod(), client()));
            lab.ingress(&more).is(&to(&more, pod()), request(mapping(established), length(&more)));
            lab.egress(&answer).is(&from(&answer, node()), reply(mapping(established), length(&answer)));
        }
    });
}

/// Fills both slots of the scene's flow with the words of other established flows.
fn fill_slots(lab: &mut Lab, protocol: Protocol) -> [u64; 2] {
    let own = hash(flow(protocol));
    let others = [!own, !own ^ 1 << 40].map(|hash| half_open::entry(hash, Phase::ESTABLISHED, 0, NODE_PORT));
    for (slot, word) in [half_open::slot(own), half_open::second_slot(own)].into_iter().zip(others) {
        lab.set_word(flow(protocol), slot, word);
    }
    others
}

fn slots(lab: &mut Lab, protocol: Protocol) -> [u64; 2] {
    let own = hash(flow(protocol));
    [half_open::slot(own), half_open::second_slot(own)].map(|slot| lab.word(flow(protocol), slot))
}

/// The flow's entry is in a handshake slot until the flow is established; then it takes the flow slot.
#[test]
fn flow_whose_slots_other_established_flows_have_is_tracked_and_established() {
    with_mappings(|lab| {
        for protocol in [Udp, Sctp] {
            let others = fill_slots(lab, protocol);
            let (question, answer) = (packet(protocol, client(), node()), packet(protocol, pod(), client()));
            let translated = [(to(&question, pod()), length(&question)), (from(&answer, node()), length(&answer))];
            let [(request_to_pod, request_length), (reply_to_client, reply_length)] = &translated;
            lab.ingress(&question).is(request_to_pod, first_request(mapping(protocol), *request_length));
            lab.ingress(&question).is(request_to_pod, request(mapping(protocol), *request_length));
            assert_eq!(slots(lab, protocol), others);
            lab.egress(&answer).is(reply_to_client, reply(mapping(protocol), *reply_length));
            assert_eq!(slots(lab, protocol), others);
            lab.ingress(&question).is(request_to_pod, establishing_request(mapping(protocol), *request_length));
            assert!(lab.flow(flow(protocol)).is_some());
            assert_eq!(own_phase(lab, protocol), Some(Phase::ESTABLISHED));
            lab.egress(&answer).is(reply_to_client, reply(mapping(protocol), *reply_length));
            lab.ingress(&question).is(request_to_pod, request(mapping(protocol), *request_length));
        }
    });
}

/// The sweeper may remove the entry of either other flow before the Pod replies.
#[test]
fn flow_in_a_handshake_slot_is_found_when_its_own_slots_become_free() {
    with_mappings(|lab| {
        for (protocol, freed) in [(Udp, 0), (Udp, 1), (Sctp, 0), (Sctp, 1)] {
            fill_slots(lab, protocol);
            let (question, answer) = (packet(protocol, client(), node()), packet(protocol, pod(), client()));
            let is_first = first_request(mapping(protocol), length(&question));
            lab.ingress(&question).is(&to(&question, pod()), is_first);
            let own = hash(flow(protocol));
            let slots = [half_open::slot(own), half_open::second_slot(own)];
            lab.set_word(flow(protocol), slots[freed], 0);
            lab.egress(&answer).is(&from(&answer, node()), reply(mapping(protocol), length(&answer)));
            for slot in [slots[0], slots[1], half_open::handshake_slot(own)] {
                lab.set_word(flow(protocol), slot, 0);
            }
        }
    });
}

/// A flow that only the flow table has, because other flows have its slots or had them, is not overlooked.
#[test]
fn direct_datagram_takes_over_a_flow_of_the_flow_table_whatever_its_slots_have() {
    with_mappings(|lab| {
        for kept in [[true, true], [true, false], [false, true]] {
            establish_by(lab, Udp);
            fill_slots(lab, Udp);
            let own = hash(flow(Udp));
            for (slot, is_kept) in [half_open::slot(own), half_open::second_slot(own)].into_iter().zip(kept) {
                if !is_kept {
                    lab.set_word(flow(Udp), slot, 0);
                }
            }
            let direct = udp(client(), pod(), b"to you");
            lab.ingress(&direct).is(&direct, reason(Reason::TupleConflict));
            assert_eq!(lab.flow(flow(Udp)), None, "{kept:?}");
            for slot in [half_open::slot(own), half_open::second_slot(own), half_open::handshake_slot(own)] {
                lab.set_word(flow(Udp), slot, 0);
            }
        }
    });
}
