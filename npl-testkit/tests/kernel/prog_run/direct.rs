// SPDX-License-Identifier: Apache-2.0
//! A client that talks to a Pod through a mapping and directly by the same port of its own: to the Pod the two are one flow,
//! and its replies are for the way that was taken last.

use npl_common::reason::Reason;
use npl_common::{conntrack::Phase, half_open};
use npl_testkit::packet::tcp_flags::{ACK, FIN, RST, SYN};

use super::scene::{
    NODE_PORT, Tcp, Udp, client, establish, flow, from, is_answered, length, node, pod, tcp, to, udp, with_mappings,
};
use crate::counters::{and, first_request, reason, reply};
use crate::lab::{Lab, TEST_DEVICE, hash};

/// The Pod accepts a connection that nobody has opened through the mapping, and says something on it.
#[track_caller]
fn is_accepted_directly(lab: &mut Lab) {
    let accepted = tcp(pod(), client(), SYN | ACK, b"");
    lab.egress(&accepted).is(&accepted, and(reason(Reason::TupleConflict), reason(Reason::UntrackedReply)));
    assert_eq!((lab.flow(flow(Tcp)), lab.slot(flow(Tcp))), (None, None));
    for flags in [SYN | ACK, ACK, FIN | ACK] {
        let answer = tcp(pod(), client(), flags, b"");
        lab.egress(&answer).is(&answer, reason(Reason::UntrackedReply));
    }
}

#[test]
fn connection_that_the_pod_accepts_directly_leaves_as_it_is() {
    with_mappings(|lab| {
        establish(lab);
        is_answered(lab, ACK);
        is_answered(lab, FIN | ACK);
        is_accepted_directly(lab);
        establish(lab);
        is_answered(lab, ACK);
    });
}

/// Nobody knows how long ago that was.
#[test]
fn connection_after_an_attempt_that_was_broken_off_may_be_direct() {
    with_mappings(|lab| {
        for by_client in [false, true] {
            lab.ingress(&tcp(client(), node(), SYN, b""));
            if by_client {
                is_answered(lab, SYN | ACK);
                lab.ingress(&tcp(client(), node(), RST, b""));
            } else {
                is_answered(lab, RST | ACK);
            }
            is_accepted_directly(lab);
        }
    });
}

/// As balancers do that only ask whether somebody listens: the Pod has said nothing but that it accepts.
#[test]
fn connection_after_one_that_the_client_broke_off_at_once_may_be_direct() {
    with_mappings(|lab| {
        for flags in [RST, RST | ACK] {
            establish(lab);
            lab.ingress(&tcp(client(), node(), flags, b""));
            is_accepted_directly(lab);
        }
    });
}

/// As if the table had lost the connection that was before.
#[test]
fn connection_that_only_the_cache_remembers_does_not_take_a_direct_one() {
    with_mappings(|lab| {
        establish(lab);
        is_answered(lab, ACK);
        lab.evict(flow(Tcp));
        is_accepted_directly(lab);
    });
}

#[test]
fn connection_that_only_the_table_remembers_does_not_take_a_direct_one() {
    with_mappings(|lab| {
        establish(lab);
        is_answered(lab, ACK);
        lab.set_slot(flow(Tcp), half_open::entry(!hash(flow(Tcp)), Phase::ESTABLISHED, 0, NODE_PORT));
        is_accepted_directly(lab);
    });
}

/// The client's packet that establishes a connection may be lost behind us: the Pod accepts it once more, and again.
#[test]
fn answer_that_the_pod_repeats_comes_from_the_node_port() {
    with_mappings(|lab| {
        establish(lab);
        for _again in 0..3 {
            is_answered(lab, SYN | ACK);
        }
        is_answered(lab, ACK);
    });
}

/// Before the kernel's clock says so, as it does every second or so: what the last connection said is none of this one's.
#[test]
fn connection_that_comes_right_after_another_is_heard_by_the_table() {
    with_mappings(|lab| {
        for _connection in 0..20 {
            establish(lab);
            is_answered(lab, ACK);
            assert_eq!(lab.flow(flow(Tcp)).unwrap().state.pod_tcp_flags, ACK);
        }
    });
}

/// Anybody may forge those, and the Pod accepts no connection of one that is open.
#[test]
fn direct_segments_of_the_client_change_nothing() {
    with_mappings(|lab| {
        establish(lab);
        for flags in [SYN, ACK, RST, FIN | ACK] {
            let direct = tcp(client(), pod(), flags, b"");
            lab.ingress(&direct).is(&direct, vec![]);
            is_answered(lab, ACK);
        }
    });
}

/// The client's datagram and the Pod's reply, both as they are.
#[track_caller]
fn is_answered_directly(lab: &mut Lab, is_turn: bool) {
    let (question, answer) = (udp(client(), pod(), b"to you"), udp(pod(), client(), b"from me"));
    lab.ingress(&question).is(&question, if is_turn { reason(Reason::TupleConflict) } else { vec![] });
    lab.egress(&answer).is(&answer, reason(Reason::UntrackedReply));
}

#[test]
fn replies_to_datagrams_take_the_way_that_the_client_took_last() {
    with_mappings(|lab| {
        is_answered_directly(lab, false);
        for established in [false, true, true] {
            let (question, answer) = (udp(client(), node(), b"to the node"), udp(pod(), client(), b"from me"));
            lab.ingress(&question).is(&to(&question, pod()), first_request("61000/udp", length(&question)));
            lab.egress(&answer).is(&from(&answer, node()), reply("61000/udp", length(&answer)));
            if established {
                lab.ingress(&question);
                lab.egress(&answer);
                assert!(lab.flow(flow(Udp)).is_some());
            }
            is_answered_directly(lab, true);
            is_answered_directly(lab, false);
        }
    });
}

#[test]
fn datagram_to_the_pod_turns_a_flow_that_only_the_table_remembers() {
    with_mappings(|lab| {
        for _packet in 0..2 {
            lab.ingress(&udp(client(), node(), b"to the node"));
            lab.egress(&udp(pod(), client(), b"from me"));
        }
        lab.set_slot(flow(Udp), half_open::entry(!hash(flow(Udp)), Phase::ESTABLISHED, 0, NODE_PORT));
        is_answered_directly(lab, true);
    });
}

/// The program that a driver runs has seen what comes by that device, and notes such datagrams itself. What comes by
/// another one it has not.
#[test]
fn datagram_is_noted_once_however_many_programs_its_device_has() {
    const OTHER: u32 = TEST_DEVICE + 1;
    with_mappings(|lab| {
        for (devices, is_turn) in [([OTHER].into(), true), ([TEST_DEVICE, OTHER].into(), false), ([].into(), true)] {
            lab.datapath.write_xdp_devices(&devices).unwrap();
            lab.ingress(&udp(client(), node(), b"to the node"));
            let question = udp(client(), pod(), b"to you");
            lab.ingress(&question).is(&question, if is_turn { reason(Reason::TupleConflict) } else { vec![] });
        }
    });
}
