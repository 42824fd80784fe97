// SPDX-License-Identifier: Apache-2.0
//! What the programs remember of flows, step by step: half-open, established, lost, taken over.

use std::net::SocketAddr;

use npl_common::reason::Reason;
use npl_common::{conntrack::Phase, half_open};
use npl_testkit::packet::tcp_flags::{ACK, FIN, PSH, RST, SYN};

use super::scene::{
    GENERATION, NODE_PORT, POD_PORT, SECOND_NODE_PORT, Tcp, Udp, bare, client, establish, family, flow, from,
    is_answered, length, node, node_ip, other_pod_ip, pod, second_node_ip, tcp, third_node_ip, to, udp, with_mappings,
};
use crate::counters::{Change, and, establishing_reply, establishing_request, first_request, reason, reply, request};
use crate::lab::Lab;

/// The Pod's packet leaves as it is, as one that belongs to no flow.
#[track_caller]
fn is_untracked(lab: &mut Lab) {
    let answer = tcp(pod(), client(), ACK, b"");
    lab.egress(&answer).is(&answer, reason(Reason::UntrackedReply));
}

/// The client's packet is translated and changes no more than the packet and byte counters.
#[track_caller]
fn is_asked(lab: &mut Lab, flags: u8) {
    let packet = tcp(client(), node(), flags, b"");
    lab.ingress(&packet).is(&to(&packet, pod()), request("61000/tcp", bare()));
}

#[test]
fn handshake_establishes_the_flow_with_the_clients_second_packet() {
    with_mappings(|lab| {
        let syn = tcp(client(), node(), SYN, b"");
        lab.ingress(&syn).is(&to(&syn, pod()), first_request("61000/tcp", bare()));
        assert_eq!(lab.slot(flow(Tcp)).map(half_open::phase), Some(Phase::REQUESTED));
        is_answered(lab, SYN | ACK);
        assert_eq!(lab.slot(flow(Tcp)).map(half_open::phase), Some(Phase::REPLIED));
        assert_eq!(lab.flow(flow(Tcp)), None, "nothing is in the flow table before the client has answered");
        let ack = tcp(client(), node(), ACK, b"");
        lab.ingress(&ack).is(&to(&ack, pod()), establishing_request("61000/tcp", bare()));
        let entry = lab.flow(flow(Tcp)).unwrap();
        let state = entry.state;
        assert_eq!((entry.node_addr, state.node_port, state.generation), (node_ip(), NODE_PORT, GENERATION));
        assert_eq!((state.client_tcp_flags, state.pod_tcp_flags), (ACK, 0));
        assert!(state.last_seen_ns > 0);
        assert_eq!(lab.attempt(flow(Tcp)), None, "nobody attempts it any more");
        is_answered(lab, ACK | PSH);
        is_asked(lab, ACK);
        assert_eq!(lab.flow(flow(Tcp)).unwrap().state.pod_tcp_flags, ACK | PSH);
    });
}

#[test]
fn established_flow_is_answered_from_the_flow_table_alone() {
    with_mappings(|lab| {
        establish(lab);
        lab.set_slot(flow(Tcp), 0);
        is_answered(lab, ACK);
    });
}

#[test]
fn half_open_flow_is_answered_from_the_cache_alone() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        assert_eq!(lab.flow(flow(Tcp)), None);
        is_answered(lab, SYN | ACK);
    });
}

#[test]
fn flow_that_the_table_lost_is_carried_by_the_cache_and_comes_back() {
    with_mappings(|lab| {
        establish(lab);
        lab.evict(flow(Tcp));
        is_answered(lab, ACK);
        let data = tcp(client(), node(), ACK, b"");
        lab.ingress(&data).is(&to(&data, pod()), establishing_request("61000/tcp", bare()));
        assert!(lab.flow(flow(Tcp)).is_some());
        is_answered(lab, ACK);
    });
}

#[test]
fn flow_that_was_lost_everywhere_comes_back_with_the_clients_next_packet() {
    with_mappings(|lab| {
        establish(lab);
        lab.evict(flow(Tcp));
        lab.set_slot(flow(Tcp), 0);
        is_untracked(lab);
        let data = tcp(client(), node(), ACK, b"");
        lab.ingress(&data).is(&to(&data, pod()), first_request("61000/tcp", bare()));
        is_answered(lab, ACK);
        lab.ingress(&data).is(&to(&data, pod()), establishing_request("61000/tcp", bare()));
        is_answered(lab, ACK);
    });
}

#[test]
fn half_open_flow_whose_slot_another_one_took_comes_back_with_a_retransmission() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        let other = half_open::entry(!crate::lab::hash(flow(Tcp)), Phase::REQUESTED, 0, NODE_PORT);
        lab.set_attempt(flow(Tcp), other);
        is_untracked(lab);
        let syn = tcp(client(), node(), SYN, b"");
        lab.ingress(&syn).is(&to(&syn, pod()), first_request("61000/tcp", bare()));
        is_answered(lab, SYN | ACK);
    });
}

#[test]
fn half_open_flow_leaves_the_slot_to_another_one_that_waits_for_its_reply() {
    with_mappings(|lab| {
        let other = half_open::entry(!crate::lab::hash(flow(Tcp)), Phase::REQUESTED, 0, NODE_PORT);
        lab.set_attempt(flow(Tcp), other);
        let syn = tcp(client(), node(), SYN, b"");
        lab.ingress(&syn).is(&to(&syn, pod()), first_request("61000/tcp", bare()));
        assert_eq!(lab.slot(flow(Tcp)), None, "the other flow still has it");
        is_answered(lab, SYN | ACK);
        let ack = tcp(client(), node(), ACK, b"");
        lab.ingress(&ack).is(&to(&ack, pod()), establishing_request("61000/tcp", bare()));
    });
}

/// A flood overwrites words of attempts, also of those that the Pod has answered.
#[test]
fn connection_whose_attempt_is_lost_before_the_client_confirms_it_is_established_all_the_same() {
    with_mappings(|lab| {
        opens(lab, node(), vec![]);
        is_answered(lab, SYN | ACK);
        lab.set_attempt(flow(Tcp), 0);
        let ack = tcp(client(), node(), ACK, b"");
        lab.ingress(&ack).is(&to(&ack, pod()), first_request("61000/tcp", bare()));
        is_answered(lab, ACK);
        lab.ingress(&ack).is(&to(&ack, pod()), establishing_request("61000/tcp", bare()));
        is_answered(lab, ACK);
    });
}

#[test]
fn established_flow_leaves_the_slot_to_the_half_open_flow_that_took_it() {
    with_mappings(|lab| {
        establish(lab);
        let other = half_open::entry(!crate::lab::hash(flow(Tcp)), Phase::REPLIED, 0, NODE_PORT);
        lab.set_slot(flow(Tcp), other);
        is_asked(lab, ACK);
        is_answered(lab, ACK);
        assert_eq!(lab.slot(flow(Tcp)), None, "the other flow still has it");
        lab.set_slot(flow(Tcp), 0);
        is_asked(lab, ACK);
        assert_eq!(lab.slot(flow(Tcp)).map(half_open::phase), Some(Phase::ESTABLISHED), "an empty one is taken");
    });
}

#[test]
fn refusal_of_a_closed_pod_port_comes_back_and_makes_no_flow() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        for _again in 0..2 {
            is_answered(lab, RST | ACK);
            assert_eq!(lab.slot(flow(Tcp)).map(half_open::phase), Some(Phase::REFUSED));
        }
        opens(lab, node(), vec![]);
        is_answered(lab, RST | ACK);
        assert_eq!(lab.flow(flow(Tcp)), None);
    });
}

/// Whoever forges the client's first packet can forge his second one too, which the Pod refuses.
#[test]
fn connection_that_the_pod_refuses_right_away_leaves_no_flow() {
    with_mappings(|lab| {
        establish(lab);
        assert!(lab.flow(flow(Tcp)).is_some());
        for _again in 0..3 {
            is_answered(lab, RST);
            assert_eq!(lab.flow(flow(Tcp)), None);
            lab.ingress(&tcp(client(), node(), ACK, b""));
        }
        // A connection that the Pod has said something on may have more to say.
        establish(lab);
        is_answered(lab, ACK);
        is_answered(lab, RST);
        assert!(lab.flow(flow(Tcp)).is_some());
    });
}

#[test]
fn client_that_breaks_off_a_handshake_makes_no_flow() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        is_answered(lab, SYN | ACK);
        is_asked(lab, RST);
        assert_eq!(lab.flow(flow(Tcp)), None);
        is_answered(lab, ACK);
    });
}

/// As only others than the client send it.
#[test]
fn reset_ahead_of_the_pods_answer_breaks_nothing_off() {
    with_mappings(|lab| {
        opens(lab, node(), vec![]);
        is_asked(lab, RST);
        is_answered(lab, SYN | ACK);
        let ack = tcp(client(), node(), ACK, b"");
        lab.ingress(&ack).is(&to(&ack, pod()), establishing_request("61000/tcp", bare()));
    });
}

#[test]
fn end_of_a_connection_is_noted_from_both_sides() {
    with_mappings(|lab| {
        establish(lab);
        is_asked(lab, FIN | ACK);
        is_answered(lab, FIN | ACK);
        let entry = lab.flow(flow(Tcp)).unwrap().state;
        assert_eq!((entry.client_tcp_flags & FIN, entry.pod_tcp_flags & FIN), (FIN, FIN));
    });
}

/// The client opens the flow, by one of the Node's addresses.
#[track_caller]
fn opens(lab: &mut Lab, node: SocketAddr, counted: Vec<Change>) {
    let syn = tcp(client(), node, SYN, b"");
    lab.ingress(&syn).is(&to(&syn, pod()), and(counted, first_request("61000/tcp", bare())));
}

#[test]
fn tuple_that_is_opened_again_forgets_the_last_connections_end() {
    with_mappings(|lab| {
        establish(lab);
        is_asked(lab, FIN | ACK);
        is_answered(lab, FIN | ACK);
        opens(lab, node(), vec![]);
        is_answered(lab, SYN | ACK);
        let ack = tcp(client(), node(), ACK, b"");
        lab.ingress(&ack).is(&to(&ack, pod()), establishing_request("61000/tcp", bare()));
        let entry = lab.flow(flow(Tcp)).unwrap().state;
        assert_eq!((entry.client_tcp_flags, entry.pod_tcp_flags), (ACK, 0));
    });
}

#[test]
fn syn_that_the_pod_does_not_accept_takes_nothing_from_the_flow() {
    with_mappings(|lab| {
        for end in [node(), (second_node_ip(), NODE_PORT).into()] {
            establish(lab);
            opens(lab, end, vec![]);
            assert_eq!(lab.slot(flow(Tcp)).map(half_open::phase), Some(Phase::ESTABLISHED));
            // As the Pod tells somebody who seems to open what is open (RFC 5961).
            is_answered(lab, ACK);
            is_asked(lab, ACK);
            is_answered(lab, ACK | PSH);
        }
    });
}

#[test]
fn refusal_of_a_tuple_that_is_opened_by_another_address_comes_from_there() {
    with_mappings(|lab| {
        establish(lab);
        let second = (second_node_ip(), NODE_PORT).into();
        opens(lab, second, vec![]);
        let refusal = tcp(pod(), client(), RST | ACK, b"");
        lab.egress(&refusal).is(&from(&refusal, second), reply("61000/tcp", bare()));
    });
}

#[test]
fn stream_of_datagrams_is_established_by_the_second_reply() {
    with_mappings(|lab| {
        let question = udp(client(), node(), b"subscribe");
        lab.ingress(&question).is(&to(&question, pod()), first_request("61000/udp", length(&question)));
        let news = udp(pod(), client(), b"news");
        let bytes = length(&news);
        lab.egress(&news).is(&from(&news, node()), reply("61000/udp", bytes));
        lab.egress(&news).is(&from(&news, node()), establishing_reply("61000/udp", bytes));
        lab.set_slot(flow(Udp), 0);
        lab.egress(&news).is(&from(&news, node()), reply("61000/udp", bytes));
    });
}

#[test]
fn flow_of_an_earlier_pod_with_the_same_address_is_not_answered() {
    with_mappings(|lab| {
        establish(lab);
        lab.set_slot(flow(Tcp), 0);
        lab.add(Tcp, NODE_PORT, pod(), GENERATION + 1);
        is_untracked(lab);
        opens(lab, node(), vec![]);
        is_answered(lab, SYN | ACK);
        let ack = tcp(client(), node(), ACK, b"");
        lab.ingress(&ack).is(&to(&ack, pod()), establishing_request("61000/tcp", bare()));
        assert_eq!(lab.flow(flow(Tcp)).unwrap().state.generation, GENERATION + 1);
    });
}

#[test]
fn half_open_flow_of_an_address_that_the_node_lost_is_not_answered() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), (second_node_ip(), NODE_PORT).into(), SYN, b""));
        lab.set_addresses(&[node_ip()]);
        is_untracked(lab);
    });
}

/// The half-open cache names an address by its place, which the next one may have.
#[test]
fn datagram_to_an_address_that_took_anothers_place_is_answered_from_there() {
    with_mappings(|lab| {
        let [second, third] = [second_node_ip(), third_node_ip()].map(|ip| (ip, NODE_PORT).into());
        let answer = udp(pod(), client(), b"from me");
        for _exchange in 0..2 {
            lab.ingress(&udp(client(), second, b"to the Node"));
            assert_eq!(lab.egress(&answer).bytes, from(&answer, second).build());
        }
        opens(lab, second, vec![]);
        lab.set_addresses(&[node_ip()]);
        lab.set_addresses(&[node_ip(), third_node_ip()]);
        is_untracked(lab);
        for _exchange in 0..2 {
            lab.ingress(&udp(client(), third, b"to the Node"));
            assert_eq!(lab.egress(&answer).bytes, from(&answer, third).build());
        }
    });
}

#[test]
fn half_open_flow_of_a_mapping_that_leads_elsewhere_now_is_not_answered() {
    with_mappings(|lab| {
        lab.add(Tcp, SECOND_NODE_PORT, pod(), GENERATION);
        lab.ingress(&tcp(client(), node(), SYN, b""));
        lab.add(Tcp, NODE_PORT, (other_pod_ip(), POD_PORT).into(), 7);
        is_untracked(lab);
    });
}

#[test]
fn purge_forgets_the_flows_of_removed_endpoints_only() {
    with_mappings(|lab| {
        establish(lab);
        lab.ingress(&udp(client(), node(), b"one"));
        lab.egress(&udp(pod(), client(), b"two"));
        lab.ingress(&udp(client(), node(), b"three"));
        lab.remove(family(), Tcp, NODE_PORT);
        lab.datapath.purge_flows().unwrap();
        assert_eq!(lab.flow(flow(Tcp)), None);
        assert!(lab.flow(flow(Udp)).is_some());
        assert_eq!(lab.datapath.tables.flow_count().unwrap(), 1);
    });
}
