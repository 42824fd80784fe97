// SPDX-License-Identifier: Apache-2.0
//! Tests a client that reaches a Pod from one client port both through a mapping and directly. Both connections have
//! the same flow tuple. Replies belong to the connection that the Pod has accepted last.

use std::collections::BTreeMap;

use npl_agent::core::model::{Family, Frontend, NodePort};
use npl_common::reason::Reason;
use npl_common::{conntrack::Phase, half_open};
use npl_testkit::packet::tcp_flags::{ACK, FIN, RST, SYN};

use super::scene::{
    GENERATION, NODE_PORT, Tcp, Udp, client, direct_answer, establish, family, flow, from, is_reply_translated, length,
    node, pod, tcp, to, udp, with_family, with_mappings,
};
use crate::counters::{Change, and, first_request, reason, reply};
use crate::lab::{Lab, TEST_DEVICE, hash, mapping};

/// Makes the Pod accept a direct connection and send data on it, and asserts that the Pod's packets leave unchanged.
#[track_caller]
fn pod_accepts_directly(lab: &mut Lab, changes: Vec<Change>) {
    let accepted = direct_answer(SYN | ACK);
    lab.egress(&accepted).is(&accepted, and(changes, reason(Reason::UntrackedReply)));
    assert_eq!((lab.flow(flow(Tcp)), lab.own_slot(flow(Tcp))), (None, None));
    for flags in [SYN | ACK, ACK, FIN | ACK] {
        let answer = direct_answer(flags);
        lab.egress(&answer).is(&answer, reason(Reason::UntrackedReply));
    }
}

#[test]
fn replies_of_an_accepted_direct_connection_are_not_translated() {
    with_mappings(|lab| {
        establish(lab);
        is_reply_translated(lab, ACK);
        is_reply_translated(lab, FIN | ACK);
        pod_accepts_directly(lab, reason(Reason::TupleConflict));
        establish(lab);
        is_reply_translated(lab, ACK);
    });
}

/// The half-open entry of an aborted handshake stays until the agent clears it as expired, and contains no timestamp.
/// The programs therefore cannot determine when the handshake was aborted, so they must treat every later direct
/// connection in the same way: pass its packets untranslated, and count no tuple conflict.
#[test]
fn direct_connection_after_an_aborted_handshake_is_no_conflict_and_not_translated() {
    with_mappings(|lab| {
        for by_client in [false, true] {
            lab.ingress(&tcp(client(), node(), SYN, b""));
            if by_client {
                is_reply_translated(lab, SYN | ACK);
                lab.ingress(&tcp(client(), node(), RST, b""));
            } else {
                is_reply_translated(lab, RST | ACK);
            }
            // The handshake's entry stays, because the direct connection has other sequence numbers.
            pod_accepts_directly(lab, vec![]);
            assert_eq!(lab.handshake(flow(Tcp)).map(half_open::phase), Some(Phase::REFUSED));
        }
    });
}

/// A load balancer's TCP health check ends with a RST before the Pod has sent more than its SYN-ACK. A direct
/// connection that follows must not be translated.
#[test]
fn direct_connection_after_a_client_reset_is_not_translated() {
    with_mappings(|lab| {
        for flags in [RST, RST | ACK] {
            establish(lab);
            lab.ingress(&tcp(client(), node(), flags, b""));
            pod_accepts_directly(lab, reason(Reason::TupleConflict));
        }
    });
}

/// The entry of the mapped connection is removed from the flow table, as if it had been evicted, but its copy stays in
/// the half-open cache. A later direct connection must nevertheless not be translated.
#[test]
fn entry_of_the_half_open_cache_alone_does_not_divert_a_direct_connection() {
    with_mappings(|lab| {
        establish(lab);
        is_reply_translated(lab, ACK);
        lab.evict(flow(Tcp));
        pod_accepts_directly(lab, reason(Reason::TupleConflict));
    });
}

#[test]
fn entry_of_the_flow_table_alone_does_not_divert_a_direct_connection() {
    with_mappings(|lab| {
        establish(lab);
        is_reply_translated(lab, ACK);
        lab.set_slot(flow(Tcp), half_open::entry(!hash(flow(Tcp)), Phase::ESTABLISHED, 0, NODE_PORT));
        pod_accepts_directly(lab, reason(Reason::TupleConflict));
    });
}

/// The Pod retransmits its SYN-ACK if the client's ACK is lost between the Node and the Pod. The retransmission must be
/// translated too.
#[test]
fn retransmitted_syn_ack_comes_from_the_node_port() {
    with_mappings(|lab| {
        establish(lab);
        for _again in 0..3 {
            is_reply_translated(lab, SYN | ACK);
        }
        is_reply_translated(lab, ACK);
    });
}

/// Packets refresh a flow table entry at most once in 256 jiffies (0.25 s to 2.6 s). If a new connection with the same
/// flow tuple starts before the next refresh, its entry must start without the TCP flags of the previous connection,
/// and must record the TCP flags of the new connection.
#[test]
fn flags_of_an_immediately_following_connection_are_recorded() {
    with_mappings(|lab| {
        for _connection in 0..20 {
            establish(lab);
            is_reply_translated(lab, ACK);
            assert_eq!(lab.flow(flow(Tcp)).unwrap().state.pod_tcp_flags, ACK);
        }
    });
}

/// An attacker can forge a client's direct segments, so these segments must not change the state of the mapped
/// connection.
#[test]
fn direct_segments_of_the_client_do_not_change_the_mapped_connection() {
    with_mappings(|lab| {
        establish(lab);
        for flags in [SYN, ACK, RST, FIN | ACK] {
            let direct = tcp(client(), pod(), flags, b"");
            lab.ingress(&direct).is(&direct, vec![]);
            is_reply_translated(lab, ACK);
        }
    });
}

/// Sends a direct datagram and the Pod's reply to it, and asserts that both are passed unchanged.
#[track_caller]
fn direct_datagram_is_answered(lab: &mut Lab, is_conflict: bool) {
    let (question, answer) = (udp(client(), pod(), b"to you"), udp(pod(), client(), b"from me"));
    lab.ingress(&question).is(&question, if is_conflict { reason(Reason::TupleConflict) } else { vec![] });
    lab.egress(&answer).is(&answer, reason(Reason::UntrackedReply));
}

#[test]
fn udp_replies_follow_the_newest_of_mapped_and_direct_request() {
    with_mappings(|lab| {
        direct_datagram_is_answered(lab, false);
        for established in [false, true, true] {
            let (question, answer) = (udp(client(), node(), b"to the node"), udp(pod(), client(), b"from me"));
            lab.ingress(&question).is(&to(&question, pod()), first_request("61000/udp", length(&question)));
            lab.egress(&answer).is(&from(&answer, node()), reply("61000/udp", length(&answer)));
            if established {
                lab.ingress(&question);
                lab.egress(&answer);
                assert!(lab.flow(flow(Udp)).is_some());
            }
            direct_datagram_is_answered(lab, true);
            direct_datagram_is_answered(lab, false);
        }
    });
}

#[test]
fn direct_datagram_takes_over_a_flow_that_only_the_flow_table_has() {
    with_mappings(|lab| {
        for _packet in 0..2 {
            lab.ingress(&udp(client(), node(), b"to the node"));
            lab.egress(&udp(pod(), client(), b"from me"));
        }
        lab.set_slot(flow(Udp), half_open::entry(!hash(flow(Udp)), Phase::ESTABLISHED, 0, NODE_PORT));
        direct_datagram_is_answered(lab, true);
    });
}

/// The XDP program handles direct datagrams that arrive on a device to which it is attached, and TC does not handle
/// these datagrams again. TC handles the datagrams from other devices.
#[test]
fn direct_datagram_is_recorded_once_on_a_device_with_xdp_and_tc() {
    const OTHER: u32 = TEST_DEVICE + 1;
    with_mappings(|lab| {
        for (devices, is_conflict) in [([OTHER].into(), true), ([TEST_DEVICE, OTHER].into(), false), ([].into(), true)]
        {
            lab.datapath.write_pre_tc_devices(&devices).unwrap();
            lab.ingress(&udp(client(), node(), b"to the node"));
            let question = udp(client(), pod(), b"to you");
            lab.ingress(&question).is(&question, if is_conflict { reason(Reason::TupleConflict) } else { vec![] });
        }
    });
}

fn skips_direct_datagrams(lab: &Lab) -> bool {
    lab.datapath.tables.config().unwrap().has_no_udp_mappings()
}

/// Without UDP mappings, the programs make no look-up for a datagram to a Pod.
#[test]
fn direct_datagrams_are_looked_up_exactly_while_a_udp_mapping_exists() {
    with_mappings(|lab| {
        lab.ingress(&udp(client(), node(), b"to the node"));
        assert!(!skips_direct_datagrams(lab));
        lab.remove(family(), Udp, NODE_PORT);
        assert!(skips_direct_datagrams(lab), "the other mappings are for TCP and SCTP");
        let direct = udp(client(), pod(), b"to you");
        lab.ingress(&direct).is(&direct, vec![]);
        // The entry of the flow is still in the half-open cache: without the flag, the look-up finds the entry.
        lab.datapath.configure("61000-61100".parse().unwrap(), || 0).unwrap();
        lab.ingress(&direct).is(&direct, reason(Reason::TupleConflict));
        let (first, backend) = mapping(Udp, NODE_PORT, pod(), GENERATION + 1);
        let second = Frontend { node_port: NodePort(NODE_PORT + 1), ..first };
        let together = BTreeMap::from([(first, backend), (second, backend)]);
        assert_eq!(lab.datapath.upsert_mappings(&together).len(), 0);
        for frontend in [second, first] {
            assert!(!skips_direct_datagrams(lab));
            lab.ingress(&udp(client(), node(), b"to the node"));
            direct_datagram_is_answered(lab, true);
            lab.datapath.remove_mapping(frontend).unwrap();
        }
        assert!(skips_direct_datagrams(lab));
    });
}

/// The mappings in the maps may be those of an agent that does not know the flag.
#[test]
fn a_started_agent_has_direct_datagrams_looked_up_until_it_has_read_the_mappings() {
    with_family(Family::V4, |lab| {
        lab.datapath.mappings().unwrap();
        assert!(skips_direct_datagrams(lab));
        lab.datapath.configure("61000-61100".parse().unwrap(), || 0).unwrap();
        assert!(!skips_direct_datagrams(lab));
        lab.datapath.mappings().unwrap();
        assert!(skips_direct_datagrams(lab));
    });
}
