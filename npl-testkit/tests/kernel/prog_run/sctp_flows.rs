// SPDX-License-Identifier: Apache-2.0
//! Tests connection tracking of SCTP associations, and ICMP errors about SCTP packets.

use npl_agent::core::model::Family;
use npl_common::names::{PROG_EGRESS, PROG_INGRESS};
use npl_common::reason::Reason;
use npl_common::{conntrack::Phase, half_open};
use npl_testkit::packet::sctp_chunks::{ABORT, COOKIE_ACK, COOKIE_ECHO, DATA, INIT, INIT_ACK, SHUTDOWN, SHUTDOWN_ACK};
use npl_testkit::packet::tcp_flags::{FIN, RST};
use npl_testkit::packet::{Crc, Packet, Transport};

use super::errors::{about_reply, about_request, too_large};
use super::fragments::fragments;
use super::scene::{
    NODE_PORT, Sctp, client, family, flow, from, length, node, node_ip, pod, pod_ip, sctp, second_node, to,
    with_mappings, with_mappings_of,
};
use crate::counters::{Change, and, establishing_request, first_request, reason, reply, request};
use crate::lab::{FlowEntry, Lab};

/// The client's verification tag in a second association.
const SECOND_TAG: u32 = 0x7b01_0203;

#[track_caller]
fn request_passes(lab: &mut Lab, kind: u8, changes: fn(&str, usize) -> Vec<Change>) {
    let packet = sctp(client(), node(), kind, b"");
    lab.ingress(&packet).is(&to(&packet, pod()), changes("61000/sctp", length(&packet)));
}

#[track_caller]
fn reply_passes(lab: &mut Lab, kind: u8) {
    let packet = sctp(pod(), client(), kind, b"");
    lab.egress(&packet).is(&from(&packet, node()), reply("61000/sctp", length(&packet)));
}

pub(super) fn establish(lab: &mut Lab) {
    request_passes(lab, INIT, first_request);
    reply_passes(lab, INIT_ACK);
    request_passes(lab, COOKIE_ECHO, establishing_request);
    reply_passes(lab, COOKIE_ACK);
}

fn entry(lab: &Lab) -> FlowEntry {
    lab.flow(flow(Sctp)).unwrap()
}

#[test]
fn association_is_established_by_the_clients_second_packet() {
    with_mappings(|lab| {
        request_passes(lab, INIT, first_request);
        assert_eq!(lab.slot(flow(Sctp)).map(half_open::phase), Some(Phase::REQUESTED));
        reply_passes(lab, INIT_ACK);
        assert_eq!(lab.flow(flow(Sctp)), None, "the flow table must have no entry before the handshake is complete");
        request_passes(lab, COOKIE_ECHO, establishing_request);
        assert_eq!((entry(lab).node_addr, entry(lab).state.node_port), (node_ip(), NODE_PORT));
        reply_passes(lab, COOKIE_ACK);
        lab.set_slot(flow(Sctp), 0);
        reply_passes(lab, DATA);
        request_passes(lab, DATA, request);
    });
}

/// An attacker with a forged source address can repeat an INIT and provoke replies, but must not be able to create an
/// entry in the flow table.
#[test]
fn repeated_init_establishes_no_association() {
    with_mappings(|lab| {
        request_passes(lab, INIT, first_request);
        for _ in 0..3 {
            reply_passes(lab, INIT_ACK);
            request_passes(lab, INIT, request);
        }
        assert_eq!(lab.flow(flow(Sctp)), None);
    });
}

#[test]
fn refusal_by_a_closed_pod_port_reaches_the_client_and_leaves_no_flow() {
    with_mappings(|lab| {
        request_passes(lab, INIT, first_request);
        reply_passes(lab, ABORT);
        request_passes(lab, INIT, first_request);
        reply_passes(lab, ABORT);
        assert_eq!(lab.flow(flow(Sctp)), None);
    });
}

#[test]
fn shutdown_and_abort_of_both_sides_are_recorded() {
    with_mappings(|lab| {
        establish(lab);
        reply_passes(lab, SHUTDOWN);
        request_passes(lab, SHUTDOWN_ACK, request);
        assert_eq!((entry(lab).state.client_tcp_flags & FIN, entry(lab).state.pod_tcp_flags & FIN), (FIN, FIN));
        reply_passes(lab, ABORT);
        assert_eq!(entry(lab).state.pod_tcp_flags & RST, RST);
    });
}

#[test]
fn shutdown_of_an_evicted_association_is_no_tuple_conflict() {
    with_mappings(|lab| {
        establish(lab);
        lab.evict(flow(Sctp));
        request_passes(lab, SHUTDOWN, request);
        reply_passes(lab, SHUTDOWN_ACK);
    });
}

#[test]
fn tuple_conflict_gives_the_replies_to_the_newer_association() {
    with_mappings(|lab| {
        establish(lab);
        let second = second_node();
        let packet = sctp(client(), second, DATA, b"");
        let changes = and(reason(Reason::TupleConflict), request("61000/sctp", length(&packet)));
        lab.ingress(&packet).is(&to(&packet, pod()), changes);
        reply_passes(lab, DATA);
        // The INIT belongs to another association, so it has another tag.
        let mut init = sctp(client(), second, INIT, b"");
        let Transport::Sctp(transport) = &mut init.transport else { unreachable!("the packet is SCTP") };
        transport.chunks[4..8].copy_from_slice(&SECOND_TAG.to_be_bytes());
        lab.ingress(&init).is(&to(&init, pod()), first_request("61000/sctp", length(&init)));
        let mut answer = sctp(pod(), client(), INIT_ACK, b"");
        let Transport::Sctp(transport) = &mut answer.transport else { unreachable!("the packet is SCTP") };
        transport.tag = SECOND_TAG;
        let changes = and(reason(Reason::TupleConflict), reply("61000/sctp", length(&answer)));
        lab.egress(&answer).is(&from(&answer, second), changes);
    });
}

#[test]
fn purge_removes_associations_of_a_removed_endpoint() {
    with_mappings(|lab| {
        establish(lab);
        lab.remove(family(), Sctp, NODE_PORT);
        lab.datapath.purge_flows().unwrap();
        assert_eq!(lab.flow(flow(Sctp)), None);
    });
}

/// Quoted bytes of the transport header and payload: the minimum of RFC 792, enough for a checksum, more, and the whole
/// packet.
const QUOTED: [usize; 4] = [8, 12, 18, 128];

#[test]
fn icmp_error_about_an_association_is_translated_in_both_directions() {
    with_mappings(|lab| {
        establish(lab);
        for bytes in QUOTED {
            let (arrives, expected) = about_reply(too_large(), &sctp(pod(), client(), DATA, &[7; 100]), bytes);
            lab.ingress(&arrives).is(&expected, request("61000/sctp", length(&arrives)));
            let (leaves, expected) =
                about_request(too_large(), pod_ip(), &sctp(client(), node(), DATA, &[9; 101]), bytes);
            lab.egress(&leaves).is(&expected, reply("61000/sctp", length(&leaves)));
        }
    });
}

#[test]
fn quoted_crc_that_is_left_to_hardware_stays_zero() {
    with_mappings(|lab| {
        establish(lab);
        let mut answer = sctp(pod(), client(), DATA, &[7; 100]);
        let Transport::Sctp(transport) = &mut answer.transport else { unreachable!("the packet is SCTP") };
        transport.checksum = Crc::Zero;
        let (arrives, expected) = about_reply(too_large(), &answer, 12);
        lab.ingress(&arrives).is(&expected, request("61000/sctp", length(&arrives)));
    });
}

/// A quoted first fragment does not contain the length of the whole packet, so the program can translate its ports, but
/// cannot update its CRC.
#[test]
fn quoted_first_fragment_keeps_its_crc() {
    with_mappings_of(Family::V4, |lab| {
        establish(lab);
        let quote = |packet: &Packet| {
            let fragment = fragments(packet, 1).swap_remove(0);
            let sent = Packet::parse(&fragment).unwrap();
            let (mut arrives, _) = about_reply(too_large(), &sent, 12);
            let Transport::Icmp(icmp) = &mut arrives.transport else { unreachable!("the packet is an ICMP error") };
            icmp.payload = fragment[14..][..32].to_vec();
            arrives
        };
        let answer = sctp(pod(), client(), DATA, &[7; 200]);
        let (arrives, mut expected) = (quote(&from(&answer, node())), quote(&answer));
        expected.set_destination(pod());
        let Transport::Icmp(arrived) = &arrives.transport else { unreachable!("the packet is an ICMP error") };
        let Transport::Icmp(icmp) = &mut expected.transport else { unreachable!("the packet is an ICMP error") };
        icmp.payload[28..].copy_from_slice(&arrived.payload[28..]);
        lab.run(PROG_INGRESS, &arrives.build()).is(&expected, request("61000/sctp", length(&arrives)));
    });
}

#[test]
fn icmp_error_about_a_direct_association_is_passed_unchanged() {
    with_mappings(|lab| {
        let (leaves, _) = about_request(too_large(), pod_ip(), &sctp(client(), node(), DATA, b"direct"), 12);
        lab.run(PROG_EGRESS, &leaves.build()).is(&leaves, reason(Reason::UntrackedReply));
    });
}
