// SPDX-License-Identifier: Apache-2.0
//! Tests forged UDP datagrams with a client's address and port. A path is the address and port to which datagrams are
//! sent. UDP has no sequence numbers, so replies follow the path of the last datagram, even if this datagram is forged.
//! A forged datagram on the client's own path changes nothing. The client's next datagram corrects the effect of a
//! forged datagram on another path.

use std::net::SocketAddr;

use npl_common::reason::Reason;
use npl_testkit::packet::Packet;
use npl_testkit::packet::tcp_flags::{ACK, FIN, PSH, SYN};

use super::forged::{is_direct, is_undisturbed};
use super::scene::{
    CLIENT_PORT, DIRECT_ISNS, NODE_PORT, Tcp, Udp, client, client_ip, direct_answer, establish, flow, from,
    is_reply_translated, node, pod, second_node, tcp, to, udp, with_isns, with_mappings,
};
use super::sweep::{expire_flows, expire_words};
use crate::counters::reason;
use crate::lab::{Lab, NEXT};

/// Sends forged datagrams of several lengths to `destination`, and asserts that each reaches the Pod: translated if
/// `destination` is a node port, and unchanged if it is the Pod's own address.
#[track_caller]
pub(super) fn attack(lab: &mut Lab, destination: SocketAddr) {
    for payload in [&b""[..], b"forged", &[7; 1000]] {
        let forged = udp(client(), destination, payload);
        let outcome = lab.ingress(&forged);
        assert_eq!((outcome.action, outcome.bytes), (NEXT, to(&forged, pod()).build()), "to {destination}");
    }
}

/// A client's UDP flow with the Pod, through the mapping or directly.
#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
    client: SocketAddr,
    server: fn() -> SocketAddr,
}

pub(super) const MAPPED: fn() -> SocketAddr = node;
pub(super) const DIRECT: fn() -> SocketAddr = pod;

impl Live {
    pub(super) fn new(server: fn() -> SocketAddr) -> Self {
        Self { client: client(), server }
    }

    /// Whether the client sends to the mapping, and not to the Pod's own address.
    pub(super) fn is_mapped(self) -> bool {
        (self.server)() != pod()
    }

    /// Sends the client's datagram, and asserts that it reaches the Pod.
    #[track_caller]
    pub(super) fn asks(self, lab: &mut Lab) {
        let question = udp(self.client, (self.server)(), b"question");
        assert_eq!(lab.ingress(&question).bytes, to(&question, pod()).build());
    }

    /// Sends the Pod's answer, and asserts that its source becomes the address and port to which the client sends.
    #[track_caller]
    pub(super) fn is_answered(self, lab: &mut Lab) {
        let answer = udp(pod(), self.client, b"answer");
        let outcome = lab.egress(&answer);
        assert_eq!((outcome.action, outcome.bytes), (NEXT, from(&answer, (self.server)()).build()), "{self:?}");
    }
}

#[test]
fn forged_datagrams_on_the_clients_own_path_do_not_disturb_its_flow() {
    for server in [MAPPED, DIRECT] {
        with_mappings(|lab| {
            let (live, target) = (Live::new(server), server());
            attack(lab, target);
            for _exchange in 0..3 {
                live.asks(lab);
                attack(lab, target);
                live.is_answered(lab);
                attack(lab, target);
                live.is_answered(lab);
            }
            let nat = lab.flow(flow(Udp)).map(|entry| (entry.node_addr, entry.state.node_port));
            assert_eq!(nat, (target != pod()).then(|| (node().ip(), NODE_PORT)));
        });
    }
}

/// Forged datagrams to the address and port that the client uses must not change the source of the Pod's datagrams,
/// even if the flow was idle for longer than every timeout and the Pod sends first.
#[test]
fn forged_datagrams_on_the_clients_own_path_do_not_disturb_an_idle_flow() {
    for server in [MAPPED, DIRECT] {
        with_mappings(|lab| {
            let live = Live::new(server);
            for _exchange in 0..2 {
                live.asks(lab);
                live.is_answered(lab);
            }
            expire_flows(lab);
            attack(lab, server());
            live.is_answered(lab);
            expire_flows(lab);
            expire_words(lab);
            attack(lab, server());
            live.is_answered(lab);
        });
    }
}

/// Forged datagrams are sent to each address that the client does not use: the other node addresses and, unless the
/// client uses it, the Pod's own address. After each forged datagram, the client's next datagram must restore the
/// source of the Pod's datagrams.
#[test]
fn clients_next_datagram_restores_its_flow_after_forged_datagrams() {
    for server in [MAPPED, DIRECT] {
        with_mappings(|lab| {
            let live = Live::new(server);
            let others = [node(), second_node(), pod()].into_iter().filter(|other| *other != server());
            for other in others {
                attack(lab, other);
                for _exchange in 0..3 {
                    live.asks(lab);
                    live.is_answered(lab);
                    attack(lab, other);
                    live.asks(lab);
                    live.is_answered(lab);
                    live.is_answered(lab);
                    attack(lab, other);
                }
            }
        });
    }
}

#[test]
fn forged_datagrams_do_not_disturb_flows_of_other_ports_and_protocols() {
    with_mappings(|lab| {
        let attack_all = |lab: &mut Lab| [node(), second_node(), pod()].into_iter().for_each(|it| attack(lab, it));
        let port = |port| (client_ip(), port).into();
        let mapped = Live { client: port(CLIENT_PORT + 1), server: MAPPED };
        let direct = Live { client: port(CLIENT_PORT + 2), server: DIRECT };
        attack_all(lab);
        establish(lab);
        for _exchange in 0..3 {
            mapped.asks(lab);
            direct.asks(lab);
            attack_all(lab);
            for _answer in 0..2 {
                mapped.is_answered(lab);
                direct.is_answered(lab);
                is_reply_translated(lab, ACK);
            }
            is_undisturbed(lab);
        }
    });
    with_mappings(|lab| {
        let syn: Packet = with_isns(tcp(client(), pod(), SYN, b""), DIRECT_ISNS);
        lab.ingress(&syn).is(&syn, vec![]);
        for flags in [SYN | ACK, ACK, ACK | PSH, FIN | ACK] {
            attack(lab, node());
            is_direct(lab, &direct_answer(flags));
        }
        assert_eq!((lab.flow(flow(Tcp)), lab.own_slot(flow(Tcp))), (None, None));
    });
}

/// A forged datagram to the Pod's own address must not create an entry: the Pod's datagrams to this client leave
/// untranslated before and after the forged datagram.
#[test]
fn forged_datagram_to_a_pod_leaves_no_entry() {
    with_mappings(|lab| {
        let answer = udp(pod(), client(), b"first words of the Pod");
        lab.egress(&answer).is(&answer, reason(Reason::UntrackedReply));
        attack(lab, pod());
        lab.egress(&answer).is(&answer, reason(Reason::UntrackedReply));
        assert_eq!((lab.flow(flow(Udp)), lab.slot(flow(Udp))), (None, None));
    });
}
