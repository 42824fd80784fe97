// SPDX-License-Identifier: Apache-2.0
//! Tests two SCTP associations with one flow tuple, and forged packets with a client's address. The attacker is
//! off-path, that is, sees none of the client's packets, and knows no verification tag.

use std::net::SocketAddr;

use npl_common::conntrack::{SCTP_NS, State, established_timeout_ns};
use npl_common::mapping::protocol;
use npl_common::reason::Reason;
use npl_testkit::packet::sctp_chunks::{ABORT, COOKIE_ACK, COOKIE_ECHO, DATA, INIT, INIT_ACK, SHUTDOWN, SHUTDOWN_ACK};
use npl_testkit::packet::tcp_flags::{FIN, RST};
use npl_testkit::packet::{Packet, Transport};

use super::errors::{about_request, too_large};
use super::scene::{Sctp, client, flow, from, length, node, pod, pod_ip, sctp, second_node, to, with_mappings};
use crate::counters::{establishing_request, first_request, reason, reply, request};
use crate::lab::{FlowEntry, Lab, NEXT};

/// The verification tags of an association: of the client's packets, and of the Pod's packets.
type Tags = (u32, u32);

const MAPPED: Tags = (0x1a2b_3c4d, 0x5e6f_7081);
const DIRECT: Tags = (0x2468_ace0, 0x1357_9bdf);
const FORGED: u32 = 0x0bad_cafe;

/// Returns a packet with this verification tag and, for an INIT or INIT ACK, this initiate tag.
fn tagged(from: SocketAddr, to: SocketAddr, kind: u8, (tag, initiate): (u32, u32)) -> Packet {
    let mut packet = sctp(from, to, kind, b"");
    let Transport::Sctp(transport) = &mut packet.transport else { unreachable!("the packet is SCTP") };
    transport.tag = tag;
    if matches!(kind, INIT | INIT_ACK) {
        transport.chunks[4..8].copy_from_slice(&initiate.to_be_bytes());
    }
    packet
}

fn of_client(to: SocketAddr, kind: u8, (client_tag, pod_tag): Tags) -> Packet {
    if kind == INIT { tagged(client(), to, kind, (0, pod_tag)) } else { tagged(client(), to, kind, (client_tag, 0)) }
}

fn of_pod(kind: u8, (client_tag, pod_tag): Tags) -> Packet {
    tagged(pod(), client(), kind, (pod_tag, client_tag))
}

#[track_caller]
fn is_reply_translated(lab: &mut Lab, kind: u8, tags: Tags) {
    let packet = of_pod(kind, tags);
    lab.egress(&packet).is(&from(&packet, node()), reply("61000/sctp", length(&packet)));
}

#[track_caller]
fn is_reply_passed(lab: &mut Lab, kind: u8, tags: Tags) {
    let packet = of_pod(kind, tags);
    lab.egress(&packet).is(&packet, reason(Reason::UntrackedReply));
}

#[track_caller]
fn establish(lab: &mut Lab, tags: Tags) {
    let init = of_client(node(), INIT, tags);
    lab.ingress(&init).is(&to(&init, pod()), first_request("61000/sctp", length(&init)));
    is_reply_translated(lab, INIT_ACK, tags);
    let echo = of_client(node(), COOKIE_ECHO, tags);
    lab.ingress(&echo).is(&to(&echo, pod()), establishing_request("61000/sctp", length(&echo)));
    is_reply_translated(lab, COOKIE_ACK, tags);
}

fn entry(lab: &Lab) -> FlowEntry {
    lab.flow(flow(Sctp)).unwrap()
}

fn timeout(entry: &FlowEntry) -> u64 {
    let state = State::established(entry.state.client_tcp_flags, entry.state.pod_tcp_flags);
    established_timeout_ns(state, protocol::SCTP, false)
}

/// Asserts that the mapped association still has its entry and its timeout.
#[track_caller]
fn is_undisturbed(lab: &mut Lab) {
    let packet = of_client(node(), DATA, MAPPED);
    lab.ingress(&packet).is(&to(&packet, pod()), request("61000/sctp", length(&packet)));
    is_reply_translated(lab, DATA, MAPPED);
    assert_eq!(entry(lab).node_addr, node().ip());
    assert_eq!(timeout(&entry(lab)), SCTP_NS);
}

#[test]
fn forged_packets_to_the_mapping_do_not_end_an_association() {
    with_mappings(|lab| {
        establish(lab, MAPPED);
        for (node, kind) in
            [node(), second_node()].into_iter().flat_map(|node| (0..=SHUTDOWN_ACK + 6).map(move |kind| (node, kind)))
        {
            let forged = tagged(client(), node, kind, (FORGED, FORGED));
            let outcome = lab.ingress(&forged);
            assert_eq!((outcome.action, outcome.bytes), (NEXT, to(&forged, pod()).build()), "chunk {kind}");
            is_undisturbed(lab);
        }
    });
}

/// A Pod answers every INIT, even a forged one that was sent to the Pod's own address. The answer must not end the
/// mapped association.
#[test]
fn answer_to_a_forged_init_does_not_end_an_association() {
    with_mappings(|lab| {
        establish(lab, MAPPED);
        for _ in 0..2 {
            is_reply_passed(lab, INIT_ACK, (FORGED, FORGED ^ 1));
            is_undisturbed(lab);
        }
    });
}

#[test]
fn direct_association_has_its_own_replies_beside_a_mapped_one() {
    with_mappings(|lab| {
        establish(lab, MAPPED);
        for kind in [INIT_ACK, COOKIE_ACK, DATA, SHUTDOWN, SHUTDOWN_ACK, ABORT, DATA] {
            is_reply_passed(lab, kind, DIRECT);
        }
        is_undisturbed(lab);
    });
}

#[test]
fn client_that_restarts_its_association_gets_the_replies() {
    with_mappings(|lab| {
        establish(lab, MAPPED);
        establish(lab, DIRECT);
        is_reply_translated(lab, DATA, DIRECT);
        is_reply_passed(lab, DATA, MAPPED);
    });
}

/// A side that does not know the association sends an ABORT with the tag that it received (chunk flag T). This ABORT
/// must count as one of the association.
#[test]
fn abort_with_the_reflected_tag_belongs_to_the_association() {
    with_mappings(|lab| {
        establish(lab, MAPPED);
        let (client_tag, pod_tag) = MAPPED;
        is_reply_translated(lab, ABORT, (pod_tag, client_tag));
        assert_eq!(entry(lab).state.pod_tcp_flags & RST, RST);
        let abort = of_client(node(), ABORT, (pod_tag, client_tag));
        lab.ingress(&abort).is(&to(&abort, pod()), request("61000/sctp", length(&abort)));
        assert_eq!(entry(lab).state.client_tcp_flags & RST, RST);
    });
}

#[test]
fn client_ends_its_association_with_its_tag() {
    with_mappings(|lab| {
        establish(lab, MAPPED);
        let shutdown = of_client(node(), SHUTDOWN, MAPPED);
        lab.ingress(&shutdown).is(&to(&shutdown, pod()), request("61000/sctp", length(&shutdown)));
        assert_eq!(entry(lab).state.client_tcp_flags & FIN, FIN);
    });
}

#[test]
fn icmp_error_about_a_request_is_looked_up_by_its_tag() {
    with_mappings(|lab| {
        establish(lab, MAPPED);
        let (leaves, expected) = about_request(too_large(), pod_ip(), &of_client(node(), DATA, MAPPED), 12);
        lab.egress(&leaves).is(&expected, reply("61000/sctp", length(&leaves)));
        let (leaves, _) = about_request(too_large(), pod_ip(), &of_client(node(), DATA, DIRECT), 12);
        lab.egress(&leaves).is(&leaves, reason(Reason::UntrackedReply));
    });
}
