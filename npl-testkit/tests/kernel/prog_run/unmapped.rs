// SPDX-License-Identifier: Apache-2.0
//! Tests the recording of unmapped traffic. A node port to which clients still send must not be assigned to another Pod
//! immediately.

use std::net::SocketAddr;
use std::time::Duration;

use npl_agent::core::model::{Frontend, NodePort, Protocol};
use npl_common::names::PROG_INGRESS;
use npl_common::unmapped::LIFETIME;
use npl_testkit::packet::sctp_chunks::INIT;
use npl_testkit::packet::tcp_flags::{RST, SYN};

use super::fragments::fragments;
use super::scene::{
    NODE_PORT, Sctp, Tcp, Udp, client, family, node, node_ip, pod, sctp, second_node_ip, tcp, udp, with_mappings,
};
use crate::lab::Lab;

/// A node port without a mapping.
const FREE_PORT: u16 = 61_050;

fn frontend(node_port: u16, protocol: Protocol) -> Frontend {
    Frontend { family: family(), node_port: NodePort(node_port), protocol }
}

fn time_until_quiet(lab: &Lab, node_port: u16) -> Option<Duration> {
    lab.datapath.time_until_quiet(frontend(node_port, Udp)).unwrap()
}

/// Asserts that an unmapped packet to this port, or the removal of the port's mapping, was recorded recently.
fn assert_recent_traffic(lab: &Lab, node_port: u16) {
    let wait = time_until_quiet(lab, node_port).unwrap();
    let longest = Duration::from_secs(1 + LIFETIME);
    assert!(wait <= longest && wait > longest / 2, "{wait:?}");
}

#[test]
fn unmapped_datagram_is_recorded_for_each_address_and_for_fragments() {
    with_mappings(|lab| {
        let to = |node_port: u16| -> SocketAddr { (node_ip(), node_port).into() };
        assert_eq!(time_until_quiet(lab, FREE_PORT), None);
        lab.ingress(&udp(client(), to(FREE_PORT), b"hello"));
        assert_recent_traffic(lab, FREE_PORT);
        lab.ingress(&udp(client(), (second_node_ip(), FREE_PORT + 1).into(), b"hello"));
        assert_recent_traffic(lab, FREE_PORT + 1);
        let first = fragments(&udp(client(), to(FREE_PORT + 2), &[7; 3000]), 5).remove(0);
        lab.run(PROG_INGRESS, &first);
        assert_recent_traffic(lab, FREE_PORT + 2);
        assert_eq!(
            time_until_quiet(lab, FREE_PORT + 3),
            None,
            "no datagram was sent to the next port, but one is recorded"
        );
    });
}

/// Unmapped packets of each protocol are recorded, because a load balancer may probe a removed member over TCP.
#[test]
fn unmapped_packet_of_each_protocol_is_recorded() {
    with_mappings(|lab| {
        let to = |node_port: u16| -> SocketAddr { (node_ip(), node_port).into() };
        let packets = [
            tcp(client(), to(FREE_PORT), SYN, b""),
            tcp(client(), to(FREE_PORT + 1), RST, b""),
            sctp(client(), to(FREE_PORT + 2), INIT, &[7; 16]),
            udp(client(), to(FREE_PORT + 3), b"hello"),
        ];
        for (port, packet) in (FREE_PORT..).zip(&packets) {
            assert_eq!(time_until_quiet(lab, port), None);
            lab.ingress(packet);
            assert_recent_traffic(lab, port);
        }
    });
}

#[test]
fn only_traffic_to_an_unmapped_node_port_is_recorded() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        lab.ingress(&udp(client(), node(), b"hello"));
        lab.ingress(&udp(client(), (node_ip(), 53).into(), b"not of the range"));
        lab.ingress(&udp(client(), (pod().ip(), FREE_PORT + 1).into(), b"not for the Node"));
        for port in [NODE_PORT, 53, FREE_PORT + 1] {
            assert_eq!(time_until_quiet(lab, port), None, "{port}");
        }
    });
}

/// The record of a mapping's removal must survive the agent: the load balancer of a removed TCP member may send its
/// next request after the agent has restarted.
#[test]
fn removal_of_a_mapping_of_each_protocol_is_recorded_for_the_next_agent() {
    for protocol in [Tcp, Udp, Sctp] {
        with_mappings(|lab| {
            let range = "61000-61100".parse().unwrap();
            assert_eq!(time_until_quiet(lab, NODE_PORT), None, "{protocol}");
            assert_eq!(lab.datapath.unmapped_ages(range).unwrap().get(&NodePort(NODE_PORT)), None, "{protocol}");
            lab.remove(family(), protocol, NODE_PORT);
            assert_recent_traffic(lab, NODE_PORT);
            let ages = lab.datapath.unmapped_ages(range).unwrap();
            let age = ages[&NodePort(NODE_PORT)];
            assert!(age < Duration::from_secs(LIFETIME / 2), "{protocol}: {age:?}");
            assert_eq!(ages.len(), 1, "{protocol}: {ages:?}");
        });
    }
}
