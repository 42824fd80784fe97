// SPDX-License-Identifier: Apache-2.0
//! Tests connections of the Node whose source port is in the node port range, for example because the Node masquerades
//! a connection. The packets of these connections are passed to the host.

use std::collections::HashMap;
use std::net::SocketAddr;

use npl_agent::core::model::Protocol;
use npl_common::host_connection::{LIFETIME, STREAM, STREAM_LIFETIME};
use npl_common::names::PROG_EGRESS;
use npl_common::reason::Reason;
use npl_common::{conntrack::Phase, half_open};
use npl_testkit::packet::Packet;
use npl_testkit::packet::sctp_chunks::{ABORT, COOKIE_ECHO, DATA, INIT, INIT_ACK};
use npl_testkit::packet::tcp_flags::{ACK, FIN, PSH, RST, SYN};

use super::errors::{about_reply, too_large};
use super::fragments::pieces;
use super::scene::{
    DIRECT_ISNS, NODE_PORT, Sctp, Tcp, Udp, becomes, client, client_ip, establish, flow, from, is_reply_translated,
    length, node, other_pod_ip, pod, router, sctp, tcp, to, udp, with_isns, with_mappings,
};
use super::sctp_flows;
use crate::counters::{establishing_request, first_request, reason, request};
use crate::lab::{FlowId, Lab, hash};

/// Runs the egress program on a packet that the Node sends from a node port, and asserts that the packet leaves
/// unchanged.
#[track_caller]
fn leaves(lab: &mut Lab, packet: &Packet) {
    lab.egress(packet).is(packet, vec![]);
}

#[test]
fn packets_of_a_host_connections_peer_are_passed_to_the_host() {
    with_mappings(|lab| {
        leaves(lab, &tcp(node(), client(), SYN, b""));
        for flags in [SYN | ACK, ACK, PSH | ACK, FIN | ACK, RST] {
            let answer = tcp(client(), node(), flags, b"");
            lab.ingress(&answer).is(&answer, reason(Reason::HostConnection));
        }
        leaves(lab, &udp(node(), client(), b"question"));
        let answer = udp(client(), node(), b"answer");
        lab.ingress(&answer).is(&answer, reason(Reason::HostConnection));
        assert_eq!((lab.slot(flow(Tcp)), lab.slot(flow(Udp))), (None, None));
    });
}

/// A program that runs after NPL's, such as Cilium's, masquerades a Pod's connection. That program keeps the source
/// port, and uses the Node's primary address. NPL must record such a connection as a host connection, so that replies
/// are passed to the host.
#[test]
fn connection_that_is_masqueraded_behind_npls_program_is_a_host_connection() {
    with_mappings(|lab| {
        let pods_own: SocketAddr = (other_pod_ip(), NODE_PORT).into();
        for (sent, received) in [
            (tcp(pods_own, client(), SYN, b""), tcp(client(), node(), SYN | ACK, b"")),
            (tcp(pods_own, client(), ACK, b""), tcp(client(), node(), PSH | ACK, b"more")),
            (udp(pods_own, client(), b"question"), udp(client(), node(), b"answer")),
        ] {
            leaves(lab, &sent);
            lab.ingress(&received).is(&received, reason(Reason::HostConnection));
        }
        let of_another_server = udp(router(), node(), b"hello");
        lab.ingress(&of_another_server)
            .is(&to(&of_another_server, pod()), first_request("61000/udp", length(&of_another_server)));
    });
}

/// If no later program masquerades, a Pod's packet from a port of the port range is no packet of a host connection. The
/// Pod could otherwise forge a record for the client of another Pod.
#[test]
fn packet_of_a_pod_is_no_host_connection_if_no_later_program_masquerades() {
    with_mappings(|lab| {
        let pods_own: SocketAddr = (other_pod_ip(), NODE_PORT).into();
        lab.datapath.tables.set_final_sources(true).unwrap();
        leaves(lab, &udp(pods_own, client(), b"forged"));
        let request = udp(client(), node(), b"hello");
        lab.ingress(&request).is(&to(&request, pod()), first_request("61000/udp", length(&request)));
        // A masqueraded packet has a node address as source, and is recorded in any case.
        leaves(lab, &udp(node(), router(), b"question"));
        let answer = udp(router(), node(), b"answer");
        lab.ingress(&answer).is(&answer, reason(Reason::HostConnection));
    });
}

/// Rules of other software, such as Antrea's, translate a connection that a Pod accepts before the port has a mapping.
/// Kernel conntrack continues to translate the connection, so NPL must not.
#[test]
fn connection_that_was_accepted_before_the_mapping_is_a_host_connection() {
    with_mappings(|lab| {
        let unmapped: SocketAddr = (node().ip(), NODE_PORT + 1).into();
        leaves(lab, &tcp(unmapped, client(), SYN | ACK, b""));
        lab.add(Tcp, unmapped.port(), (other_pod_ip(), 8080).into(), 7);
        for flags in [ACK, PSH | ACK, FIN | ACK] {
            let next = tcp(client(), unmapped, flags, b"");
            lab.ingress(&next).is(&next, reason(Reason::HostConnection));
        }
        // A new connection of the same client is translated.
        let syn = tcp(client(), unmapped, SYN, b"");
        assert_eq!(lab.ingress(&syn).bytes, to(&syn, (other_pod_ip(), 8080).into()).build());
    });
}

/// The mapping is written between the client's SYN, which rules of other software have translated, and the Pod's
/// SYN-ACK. Kernel conntrack continues to translate the connection, so NPL must not.
#[test]
fn connection_whose_syn_arrived_before_the_mapping_is_a_host_connection() {
    with_mappings(|lab| {
        let unmapped: SocketAddr = (node().ip(), NODE_PORT + 1).into();
        let other_pod: SocketAddr = (other_pod_ip(), 8080).into();
        for protocol in [Tcp, Sctp] {
            let packet = |from, to, tcp_flags, chunk| match protocol {
                Tcp => tcp(from, to, tcp_flags, b""),
                Udp | Sctp => sctp(from, to, chunk, b""),
            };
            let syn = packet(client(), unmapped, SYN, INIT);
            assert_eq!(lab.ingress(&syn).bytes, syn.build());
            lab.add(protocol, unmapped.port(), other_pod, 7);
            // A forged SYN opens another handshake, whose acknowledgement number differs.
            if protocol == Tcp {
                lab.ingress(&with_isns(tcp(client(), unmapped, SYN, b""), DIRECT_ISNS));
            }
            leaves(lab, &from(&packet(other_pod, client(), SYN | ACK, INIT_ACK), unmapped));
            for (flags, chunk) in [(ACK, COOKIE_ECHO), (PSH | ACK, DATA)] {
                let next = packet(client(), unmapped, flags, chunk);
                lab.ingress(&next).is(&next, reason(Reason::HostConnection));
            }
        }
    });
}

/// The record of a UDP flow expires shortly before the flow's entry in kernel conntrack. Without this entry, the host
/// has no translation for the flow's datagrams. Kernel conntrack classifies a flow that has lasted for more than 2 s as
/// a stream, which has a longer timeout.
#[test]
fn record_of_a_udp_flow_expires_and_that_of_a_stream_expires_later() {
    with_mappings(|lab| {
        let id = FlowId { client: client(), pod: node(), protocol: Udp };
        let (sent, answer) = (udp(node(), client(), b"question"), udp(client(), node(), b"answer"));
        let is_of_host = |lab: &mut Lab| lab.ingress(&answer).bytes == answer.build();
        leaves(lab, &sent);
        lab.age_host_connection(id, LIFETIME - 8);
        assert!(is_of_host(lab), "the flow's entry in kernel conntrack still exists");
        leaves(lab, &sent);
        lab.age_host_connection(id, STREAM_LIFETIME - 8);
        assert!(is_of_host(lab), "the flow is a stream");
        lab.age_host_connection(id, 9);
        leaves(lab, &sent);
        lab.age_host_connection(id, LIFETIME + 1);
        assert!(!is_of_host(lab), "the flow is a new flow, because its last record had expired");
    });
}

/// The remote host of a masqueraded flow sends datagrams for more than 2 s, so the flow is a stream, although the Node
/// has sent only the first datagram.
#[test]
fn answers_make_a_udp_flow_of_the_host_a_stream() {
    with_mappings(|lab| {
        let id = FlowId { client: client(), pod: node(), protocol: Udp };
        let answer = udp(client(), node(), b"answer");
        let is_of_host = |lab: &mut Lab| lab.ingress(&answer).bytes == answer.build();
        leaves(lab, &udp(node(), client(), b"question"));
        lab.age_host_connection(id, STREAM);
        assert!(is_of_host(lab));
        lab.age_host_connection(id, STREAM_LIFETIME - 8);
        assert!(is_of_host(lab), "the flow is a stream");
        lab.age_host_connection(id, 9);
        assert!(!is_of_host(lab), "an answer must not renew the record");
    });
}

/// NPL must keep the records of two host connections that share a slot. Without the record of a masqueraded connection,
/// replies of this connection would reach an unrelated Pod, which resets the connection.
#[test]
fn packets_of_host_connections_that_share_a_slot_are_passed_to_the_host() {
    with_mappings(|lab| {
        let mut ports_by_slot = HashMap::new();
        let peers = (1..=u16::MAX).find_map(|port| {
            let peer: SocketAddr = (client_ip(), port).into();
            let slot = npl_common::host_connection::slot(hash(FlowId { client: peer, pod: node(), protocol: Tcp }));
            ports_by_slot.insert(slot, peer).map(|other| [other, peer])
        });
        let peers = peers.unwrap();
        for peer in peers {
            leaves(lab, &tcp(node(), peer, SYN, b""));
        }
        for peer in peers {
            let answer = tcp(peer, node(), SYN | ACK, b"");
            lab.ingress(&answer).is(&answer, reason(Reason::HostConnection));
        }
    });
}

#[test]
fn icmp_errors_about_packets_of_a_host_connection_are_passed_to_the_host() {
    with_mappings(|lab| {
        for sent in [tcp(node(), client(), PSH | ACK, b"question"), udp(node(), client(), b"question")] {
            leaves(lab, &sent);
            let (error, _) = about_reply(too_large(), &sent, 64);
            lab.ingress(&error).is(&error, reason(Reason::UntrackedError));
        }
    });
}

/// A client may open a connection from an address and port to which the host has connected before. The client's SYN
/// must be translated, because a SYN is never a reply to the host.
#[test]
fn client_connection_is_translated_despite_an_earlier_host_connection() {
    with_mappings(|lab| {
        leaves(lab, &tcp(node(), client(), SYN, b""));
        establish(lab);
        is_reply_translated(lab, ACK);
        let more = tcp(client(), node(), PSH | ACK, b"more");
        lab.ingress(&more).is(&to(&more, pod()), request("61000/tcp", length(&more)));
    });
}

fn packet(protocol: Protocol, from: SocketAddr, to: SocketAddr) -> Packet {
    match protocol {
        Tcp => tcp(from, to, PSH | ACK, b"data"),
        Udp => udp(from, to, b"data"),
        Sctp => sctp(from, to, DATA, b"data"),
    }
}

fn mapping(protocol: Protocol) -> &'static str {
    match protocol {
        Tcp => "61000/tcp",
        Udp => "61000/udp",
        Sctp => "61000/sctp",
    }
}

fn establish_by(lab: &mut Lab, protocol: Protocol) {
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
    assert_eq!(lab.own_slot(flow(protocol)).map(half_open::phase), Some(Phase::ESTABLISHED));
}

/// A Pod with `CAP_NET_RAW` sends packets to another Pod's client, from the Node's address and the other Pod's node
/// port. The client's established flow must not be diverted.
#[test]
fn forged_host_connection_diverts_no_established_flow() {
    for lost in ["nothing", "flow slot", "flow table"] {
        with_mappings(|lab| {
            for protocol in [Tcp, Udp, Sctp] {
                establish_by(lab, protocol);
                match lost {
                    "flow slot" => lab.set_slot(flow(protocol), 0),
                    "flow table" => lab.evict(flow(protocol)),
                    _ => (),
                }
                leaves(lab, &packet(protocol, node(), client()));
                let more = packet(protocol, client(), node());
                let counted = request(mapping(protocol), length(&more));
                lab.ingress(&more).is(&to(&more, pod()), counted);
            }
        });
    }
}

/// A forged record of a host connection must not divert new TCP connections and SCTP associations: these begin with a
/// handshake packet, which is never a reply to the host.
#[test]
fn forged_host_connection_diverts_no_new_connection() {
    with_mappings(|lab| {
        for protocol in [Tcp, Sctp] {
            leaves(lab, &packet(protocol, node(), client()));
            establish_by(lab, protocol);
        }
    });
}

#[test]
fn icmp_error_about_a_client_connection_is_translated_despite_a_host_connection() {
    with_mappings(|lab| {
        leaves(lab, &tcp(node(), client(), SYN, b""));
        let (arrives, expected) = about_reply(too_large(), &tcp(pod(), client(), SYN | ACK, b""), 64);
        let is_sent_to_pod =
            |lab: &mut Lab| lab.ingress(&arrives).is(&expected, request("61000/tcp", length(&arrives)));
        lab.ingress(&arrives).is(&arrives, reason(Reason::UntrackedError));
        lab.ingress(&tcp(client(), node(), SYN, b""));
        is_reply_translated(lab, SYN | ACK);
        is_sent_to_pod(lab);
        establish(lab);
        is_sent_to_pod(lab);
        lab.set_slot(flow(Tcp), 0);
        is_sent_to_pod(lab);
    });
}

/// A RST or ABORT of the host must create no host connection entry. The host rejects a client before the port is
/// mapped, and the same client may connect again after the port is mapped.
#[test]
fn refusals_by_the_host_create_no_host_connection() {
    with_mappings(|lab| {
        for flags in [RST, RST | ACK] {
            leaves(lab, &tcp(node(), client(), flags, b""));
        }
        leaves(lab, &sctp(node(), client(), ABORT, b""));
        let more = tcp(client(), node(), PSH | ACK, b"more");
        lab.ingress(&more).is(&to(&more, pod()), first_request("61000/tcp", length(&more)));
        let more = sctp(client(), node(), DATA, b"more");
        lab.ingress(&more).is(&to(&more, pod()), first_request("61000/sctp", length(&more)));
    });
}

/// Masqueraded packets and redirected replies leave from a node port, so the egress program does not translate their
/// first fragment. The program must record that the first fragment is not translated. Otherwise, the program would save
/// the later fragments as early fragments.
#[test]
fn fragments_that_leave_from_a_node_port_are_not_saved() {
    with_mappings(|lab| {
        for (number, packet) in (1..).zip([udp(node(), client(), &[7; 1000]), tcp(node(), client(), ACK, &[7; 1000])]) {
            for frame in pieces(&packet, number, 504) {
                becomes(lab, PROG_EGRESS, &frame, frame.clone(), vec![]);
            }
        }
    });
}

/// The egress program also handles replies that are already translated: redirected replies, and replies that a program
/// on an upper device, such as a VLAN device, has translated. The program must not record these replies as host
/// connections.
#[test]
fn translated_replies_create_no_host_connection() {
    with_mappings(|lab| {
        let (question, answer) = (udp(client(), node(), b"question"), udp(pod(), client(), b"answer"));
        for changes in [first_request, establishing_request, request] {
            lab.ingress(&question).is(&to(&question, pod()), changes("61000/udp", length(&question)));
            lab.egress(&answer);
            leaves(lab, &from(&answer, node()));
        }
        // The flow's slot of the half-open cache is cleared, so only the flow table has an entry of the flow.
        lab.set_slot(flow(Udp), 0);
        leaves(lab, &from(&answer, node()));
        lab.evict(flow(Udp));
        lab.set_slot(flow(Udp), 0);
        lab.ingress(&question).is(&to(&question, pod()), first_request("61000/udp", length(&question)));
    });
}

/// A program on an upper device, such as a VLAN device, has translated the SYN-ACK. The egress program must not record
/// the SYN-ACK as a packet of a host connection. With such a record, the ingress program would pass the client's
/// packets to the host as soon as other flows overwrite the handshake's entries in the half-open cache.
#[test]
fn translated_syn_ack_creates_no_host_connection() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        is_reply_translated(lab, SYN | ACK);
        leaves(lab, &from(&tcp(pod(), client(), SYN | ACK, b""), node()));
        lab.forget_handshake(flow(Tcp));
        let more = tcp(client(), node(), PSH | ACK, b"more");
        assert_eq!(lab.ingress(&more).bytes, to(&more, pod()).build());
    });
}

/// The connection is established, so NPL has removed the handshake's entries. Then, the Pod repeats its SYN-ACK.
#[test]
fn repeated_syn_ack_creates_no_host_connection() {
    with_mappings(|lab| {
        establish(lab);
        leaves(lab, &from(&tcp(pod(), client(), SYN | ACK, b""), node()));
        lab.evict(flow(Tcp));
        lab.set_slot(flow(Tcp), 0);
        let more = tcp(client(), node(), PSH | ACK, b"more");
        assert_eq!(lab.ingress(&more).bytes, to(&more, pod()).build());
    });
}
