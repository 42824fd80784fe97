// SPDX-License-Identifier: Apache-2.0
//! Tests that packets that match no mapping are passed to the host unchanged and are not counted.

use npl_agent::core::model::Family;
use npl_common::names::{PROG_EGRESS, PROG_INGRESS};
use npl_common::reason::Reason;
use npl_testkit::packet::tcp_flags::{ACK, SYN};
use npl_testkit::packet::{Ethernet, Packet, Transport};

use super::scene::{
    GENERATION, NODE_PORT, POD_PORT, Tcp, bare, client, client_ip, node, node_ip, other_pod_ip, pod, pod_ip,
    second_node_ip, tcp, to, udp, unused_ip, with_family, with_mappings, with_mappings_of,
};
use crate::counters::{first_request, reason};
use crate::lab::{Lab, NEXT, Outcome};

/// Asserts that neither program changes or counts the frame.
#[track_caller]
fn passes(lab: &mut Lab, frame: &[u8]) {
    for program in [PROG_INGRESS, PROG_EGRESS] {
        let expected = Outcome { action: NEXT, bytes: frame.to_vec(), changes: vec![] };
        assert_eq!(lab.run(program, frame), expected, "{program}");
    }
}

#[test]
fn vlan_tagged_frame_is_left_to_the_vlan_device() {
    with_mappings(|lab| {
        for vlans in [vec![100], vec![100, 200]] {
            let mut request = tcp(client(), node(), SYN, b"");
            request.ethernet.as_mut().unwrap().vlans = vlans;
            passes(lab, &request.build());
        }
    });
}

#[test]
fn frame_for_another_host_is_passed_unchanged() {
    with_mappings(|lab| {
        let request = tcp(client(), node(), SYN, b"");
        let elsewhere = Packet { ethernet: Some(Ethernet::default()), ..request };
        passes(lab, &elsewhere.build());
    });
}

#[test]
fn port_outside_of_the_range_is_passed_to_the_host() {
    with_mappings(|lab| {
        for port in [22, 60_999, 61_101, 65_535] {
            passes(lab, &tcp(client(), (node_ip(), port).into(), SYN, b"").build());
            passes(lab, &udp(client(), (node_ip(), port).into(), b"hello").build());
        }
    });
}

#[test]
fn node_port_of_an_address_that_is_not_the_nodes_is_passed_unchanged() {
    with_mappings(|lab| {
        for addr in [unused_ip(), pod_ip(), client_ip()] {
            passes(lab, &tcp(client(), (addr, NODE_PORT).into(), SYN, b"").build());
        }
    });
}

#[test]
fn packet_to_a_removed_node_address_is_passed_unchanged() {
    with_mappings(|lab| {
        lab.set_addresses(&[second_node_ip()]);
        passes(lab, &tcp(client(), node(), SYN, b"").build());
    });
}

#[test]
fn other_protocols_are_passed_unchanged() {
    with_mappings(|lab| {
        let ports: Vec<u8> = [61_000_u16, 61_000].iter().flat_map(|port| port.to_be_bytes()).collect();
        for protocol in [1, 2, 33, 41, 47, 50, 131, 133, 136] {
            let bytes = [ports.clone(), vec![0; 40]].concat();
            let packet = Packet::new(client_ip(), node_ip(), Transport::Raw { protocol, bytes: bytes.clone() });
            passes(lab, &packet.to_this_machine().build());
            let packet = Packet::new(pod_ip(), client_ip(), Transport::Raw { protocol, bytes });
            passes(lab, &packet.to_this_machine().build());
        }
    });
}

#[test]
fn mapping_of_one_family_does_not_affect_the_other() {
    for (family, other) in [(Family::V4, Family::V6), (Family::V6, Family::V4)] {
        with_family(family, |lab| {
            lab.add(Tcp, NODE_PORT, pod(), GENERATION);
            let request = tcp(client(), node(), SYN, b"");
            lab.set_addresses(&[node_ip()]);
            lab.remove(other, Tcp, NODE_PORT);
            lab.ingress(&request).is(&to(&request, pod()), first_request("61000/tcp", bare()));
            lab.remove(family, Tcp, NODE_PORT);
            lab.ingress(&request).is(&request, reason(Reason::NoMapping));
        });
    }
}

#[test]
fn arp_and_unknown_frames_are_passed_unchanged() {
    with_mappings(|lab| {
        for kind in [0x0806_u16, 0x88cc, 0x8847, 0x0026] {
            let mut frame = vec![0; 12];
            frame.extend(kind.to_be_bytes());
            frame.extend(tcp(client(), node(), SYN, b"").build().split_off(14));
            passes(lab, &frame);
        }
    });
}

#[test]
fn frame_that_ends_before_its_ports_is_passed_unchanged() {
    with_mappings(|lab| {
        let frame = tcp(client(), node(), SYN, b"").build();
        // Only frames that end after the IP header are tested, because the kernel's test run accepts no shorter frames.
        let ports = bare() - 20;
        for length in ports..ports + 4 {
            passes(lab, &frame[..length]);
        }
    });
}

#[test]
fn invalid_ip_header_length_is_passed_unchanged() {
    with_mappings_of(Family::V4, |lab| {
        for words in 0..5 {
            let mut frame = tcp(client(), node(), SYN, b"").build();
            frame[14] = 0x40 | words;
            passes(lab, &frame);
        }
    });
}

#[test]
fn direct_request_to_a_pod_is_passed_unchanged() {
    with_mappings(|lab| {
        let direct = tcp(client(), pod(), SYN, b"");
        passes(lab, &direct.build());
    });
}

#[test]
fn packets_from_unmapped_pod_ports_are_passed_unchanged() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        for source in [(pod_ip(), POD_PORT + 1), (pod_ip(), 43_210)] {
            passes(lab, &tcp(source.into(), client(), SYN, b"").build());
        }
        passes(lab, &udp((other_pod_ip(), POD_PORT).into(), client(), b"").build());
    });
}

#[test]
fn requests_are_passed_unchanged_without_a_node_address() {
    for family in Family::ALL {
        with_family(family, |lab| {
            lab.add(Tcp, NODE_PORT, pod(), 1);
            passes(lab, &tcp(client(), node(), SYN, b"").build());
            passes(lab, &tcp(client(), pod(), ACK, b"").build());
        });
    }
}
