// SPDX-License-Identifier: Apache-2.0
//! Tests the effects of forged UDP datagrams on another path than the client's. A path is the destination of the
//! client's datagrams: a node address and node port, or the Pod's own address.

use std::net::SocketAddr;

use npl_common::conntrack::Phase;
use npl_common::half_open;
use npl_common::names::{PROG_INGRESS, PROG_INGRESS_OFFLOAD, PROG_INGRESS_REDIRECT};
use npl_testkit::packet::{Ip, Packet};

use super::forged_datagrams::{DIRECT, Live, MAPPED, attack};
use super::redirect::{NEXT_HOP, set_next_hop};
use super::scene::{
    GENERATION, NODE_PORT, POD_PORT, SECOND_NODE_PORT, Udp, client, flow, from, node, node_ip, other_pod_ip, pod,
    pod_ip, router_ip, second_node, to, udp, with_mappings,
};
use crate::lab::{DROP, FlowEntry, Lab, NEXT};

/// The programs that translate requests, one for each forwarding mode.
const MODES: [&str; 3] = [PROG_INGRESS, PROG_INGRESS_REDIRECT, PROG_INGRESS_OFFLOAD];

/// Another node port of the same Pod port.
fn second_port() -> SocketAddr {
    (node_ip(), SECOND_NODE_PORT).into()
}

/// Runs `test` for a mapped and for a direct flow, each with every other address by which a client reaches the same Pod
/// port.
fn with_two_paths(test: impl Fn(&mut Lab, Live, SocketAddr) + Send + Sync) {
    for server in [MAPPED, DIRECT] {
        for other in [node, second_node, second_port, pod] {
            with_mappings(|lab| {
                lab.add(Udp, SECOND_NODE_PORT, pod(), GENERATION);
                if other() != server() {
                    test(lab, Live::new(server), other());
                }
            });
        }
    }
}

/// Asserts that the Pod's datagrams leave from `source`.
#[track_caller]
fn replies_leave_from(lab: &mut Lab, source: SocketAddr) {
    for payload in [&b"one"[..], b"two", b"three"] {
        let answer = udp(pod(), client(), payload);
        let outcome = lab.egress(&answer);
        assert_eq!((outcome.action, outcome.bytes), (NEXT, from(&answer, source).build()), "{source}");
    }
}

/// Returns the entries of the client's UDP flow in the flow table and in the half-open cache.
fn stored(lab: &mut Lab) -> (Option<FlowEntry>, Option<u64>) {
    (lab.flow(flow(Udp)), lab.slot(flow(Udp)))
}

/// Opens the client's flow through the mapping, and establishes it.
fn establish_mapped(lab: &mut Lab) -> Live {
    let live = Live::new(MAPPED);
    for _exchange in 0..2 {
        live.asks(lab);
        live.is_answered(lab);
    }
    let (entry, word) = stored(lab);
    assert_eq!(entry.map(|entry| entry.node_addr), Some(node_ip()));
    assert_eq!(word.map(half_open::phase), Some(Phase::ESTABLISHED));
    live
}

/// Replies follow the client's path even if the forged datagrams came first and have established the flow. The attacker
/// repeats the forged datagrams before each question: if replies stayed on the first path of a flow as long as
/// datagrams arrive on this path, the client would get no answer at all.
#[test]
fn flow_that_forged_datagrams_established_first_does_not_hold_the_clients_replies() {
    with_two_paths(|lab, live, other| {
        for _exchange in 0..2 {
            attack(lab, other);
            replies_leave_from(lab, other);
        }
        let entry = lab.flow(flow(Udp)).map(|entry| (entry.node_addr, entry.state.node_port));
        assert_eq!(entry, (other != pod()).then(|| (other.ip(), other.port())));
        for _exchange in 0..3 {
            attack(lab, other);
            live.asks(lab);
            live.is_answered(lab);
            live.is_answered(lab);
        }
    });
}

/// One forged datagram in the client's name is sent to another address or port by which clients reach the same Pod
/// port. In every phase of the client's flow and in every forwarding mode, the Pod's datagrams then leave from this
/// address and port, until the client's next datagram. The forged datagram opens no second flow.
#[test]
fn one_forged_datagram_on_another_path_diverts_replies_until_the_clients_next_datagram() {
    for program in MODES {
        for packets_before in 0..4 {
            with_two_paths(|lab, live, other| {
                for packet in 0..packets_before {
                    if packet % 2 == 0 { live.asks(lab) } else { live.is_answered(lab) }
                }
                let flows = lab.datapath.tables.flow_count().unwrap();
                let forged = udp(client(), other, b"forged");
                assert_eq!(lab.run(program, &forged.build()).bytes, to(&forged, pod()).build());
                assert!(lab.datapath.tables.flow_count().unwrap() <= flows, "the datagram must insert no entry");
                replies_leave_from(lab, other);
                assert!(lab.flow(flow(Udp)).is_none_or(|entry| entry.state.generation == GENERATION));
                live.asks(lab);
                replies_leave_from(lab, if live.is_mapped() { node() } else { pod() });
            });
        }
    }
}

/// On the client's own path, connection tracking ignores the link and the route by which a datagram arrives: another
/// router (source MAC address), another distance (TTL), another traffic class.
#[test]
fn forged_datagram_from_another_router_changes_nothing_on_the_clients_own_path() {
    fn elsewhere(mut packet: Packet) -> Packet {
        packet.ethernet.as_mut().unwrap().source = [0x02, 0, 0, 0, 0, 0x66];
        match &mut packet.ip {
            Ip::V4(ip) => (ip.ttl, ip.tos) = (9, 0xb8),
            Ip::V6(ip) => (ip.hop_limit, ip.traffic_class) = (9, 0xb8),
        }
        packet
    }
    for program in MODES {
        with_mappings(|lab| {
            set_next_hop(pod_ip(), NEXT_HOP);
            let live = establish_mapped(lab);
            let before = stored(lab);
            lab.run(program, &elsewhere(udp(client(), node(), b"forged")).build());
            assert_eq!(stored(lab), before);
            live.is_answered(lab);
        });
    }
}

/// A forged datagram that no mapping of the client's Pod port translates has no effect on the client's flow.
#[test]
fn forged_datagrams_that_do_not_reach_the_pod_change_no_flow() {
    with_mappings(|lab| {
        lab.add_restricted(Udp, SECOND_NODE_PORT, pod(), GENERATION, &router_ip().to_string());
        lab.add(Udp, SECOND_NODE_PORT + 1, (other_pod_ip(), POD_PORT).into(), GENERATION + 1);
        let live = establish_mapped(lab);
        let before = stored(lab);
        for program in MODES {
            let refused = udp(client(), second_port(), b"forged");
            assert_eq!(lab.run(program, &refused.build()).action, DROP, "the allow-list must drop the datagram");
            for port in [SECOND_NODE_PORT + 1, SECOND_NODE_PORT + 2] {
                let forged = udp(client(), (node_ip(), port).into(), b"to another Pod, or without a mapping");
                assert_eq!(lab.run(program, &forged.build()).action, NEXT);
            }
        }
        assert_eq!(stored(lab), before);
        live.is_answered(lab);
    });
}

/// When the address belongs to another Pod, a forged datagram on another path must not restore the generation of the
/// previous Pod in the flow's entry. The client's next datagram then again determines the source of replies.
#[test]
fn forged_datagram_does_not_bring_back_the_flow_of_a_previous_pod() {
    with_mappings(|lab| {
        let live = establish_mapped(lab);
        lab.add(Udp, NODE_PORT, pod(), GENERATION + 1);
        attack(lab, second_node());
        let generation = |lab: &Lab| lab.flow(flow(Udp)).map(|entry| entry.state.generation);
        assert_eq!(generation(lab), Some(GENERATION + 1));
        live.asks(lab);
        live.is_answered(lab);
        assert_eq!(generation(lab), Some(GENERATION + 1));
    });
}
