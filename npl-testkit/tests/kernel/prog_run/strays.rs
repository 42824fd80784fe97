// SPDX-License-Identifier: Apache-2.0
//! Datagrams to node ports that lead nowhere: who gets the port next must not be taken for who had it.

use std::net::SocketAddr;
use std::time::Duration;

use npl_agent::core::model::{Frontend, NodePort, Protocol};
use npl_common::names::PROG_INGRESS;
use npl_common::unmapped::LIFETIME;
use npl_testkit::packet::tcp_flags::SYN;

use super::fragments::fragments;
use super::scene::{
    NODE_PORT, Sctp, Tcp, Udp, client, family, node, node_ip, pod, second_node_ip, tcp, udp, with_mappings,
};
use crate::lab::Lab;

/// One that leads nowhere.
const FREE_PORT: u16 = 61_050;

fn frontend(node_port: u16, protocol: Protocol) -> Frontend {
    Frontend { family: family(), node_port: NodePort(node_port), protocol }
}

fn time_until_quiet(lab: &Lab, node_port: u16) -> Option<Duration> {
    lab.datapath.time_until_quiet(frontend(node_port, Udp)).unwrap()
}

/// Somebody has sent a moment ago.
fn assert_is_sent_to(lab: &Lab, node_port: u16) {
    let wait = time_until_quiet(lab, node_port).unwrap();
    let longest = Duration::from_secs(1 + LIFETIME);
    assert!(wait <= longest && wait > longest / 2, "{wait:?}");
}

#[test]
fn datagram_to_a_port_that_leads_nowhere_is_noted_by_each_way_that_it_may_come() {
    with_mappings(|lab| {
        let to = |node_port: u16| -> SocketAddr { (node_ip(), node_port).into() };
        assert_eq!(time_until_quiet(lab, FREE_PORT), None);
        lab.ingress(&udp(client(), to(FREE_PORT), b"anybody there?"));
        assert_is_sent_to(lab, FREE_PORT);
        lab.ingress(&udp(client(), (second_node_ip(), FREE_PORT + 1).into(), b"anybody there?"));
        assert_is_sent_to(lab, FREE_PORT + 1);
        let first = fragments(&udp(client(), to(FREE_PORT + 2), &[7; 3000]), 5).remove(0);
        lab.run(PROG_INGRESS, &first);
        assert_is_sent_to(lab, FREE_PORT + 2);
        assert_eq!(time_until_quiet(lab, FREE_PORT + 3), None, "nobody has sent to the next one");
    });
}

#[test]
fn what_notices_by_itself_who_answers_is_not_noted_nor_is_what_a_mapping_takes() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), (node_ip(), FREE_PORT).into(), SYN, b""));
        lab.ingress(&udp(client(), node(), b"hello"));
        lab.ingress(&udp(client(), (node_ip(), 53).into(), b"not of the range"));
        lab.ingress(&udp(client(), (pod().ip(), FREE_PORT + 1).into(), b"not for the Node"));
        for port in [FREE_PORT, NODE_PORT, 53, FREE_PORT + 1] {
            assert_eq!(time_until_quiet(lab, port), None, "{port}");
        }
    });
}

#[test]
fn a_mapping_that_goes_leaves_a_port_that_may_be_sent_to() {
    with_mappings(|lab| {
        for protocol in [Tcp, Sctp] {
            lab.remove(family(), protocol, NODE_PORT);
            assert_eq!(time_until_quiet(lab, NODE_PORT), None, "{protocol}");
        }
        lab.remove(family(), Udp, NODE_PORT);
        assert_is_sent_to(lab, NODE_PORT);
    });
}
