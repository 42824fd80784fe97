// SPDX-License-Identifier: Apache-2.0
//! What is not ours goes on as it came, and is not even counted.

use npl_testkit::packet::tcp_flags::{ACK, SYN};
use npl_testkit::packet::{Ethernet, Packet, Transport};

use super::scene::{CLIENT, NODE, NODE_PORT, POD, POD_PORT, Tcp, client, for_us, node, pod, tcp, udp, with_mappings};
use crate::lab::{Lab, NEXT, Outcome};
use npl_common::names::{PROG_EGRESS, PROG_INGRESS};

/// Neither program touches or counts the frame.
#[track_caller]
fn passes(lab: &mut Lab, frame: &[u8]) {
    for program in [PROG_INGRESS, PROG_EGRESS] {
        let expected = Outcome { action: NEXT, bytes: frame.to_vec(), changes: vec![] };
        assert_eq!(lab.run(program, frame), expected, "{program}");
    }
}

#[test]
fn tagged_frame_belongs_to_the_vlan_device() {
    with_mappings(|lab| {
        for vlans in [vec![100], vec![100, 200]] {
            let mut request = tcp(client(), node(), SYN, b"");
            request.ethernet.as_mut().unwrap().vlans = vlans;
            passes(lab, &request.build());
        }
    });
}

#[test]
fn frame_for_another_machine_is_not_ours() {
    with_mappings(|lab| {
        let request = tcp(client(), node(), SYN, b"");
        let elsewhere = Packet { ethernet: Some(Ethernet::default()), ..request };
        passes(lab, &elsewhere.build());
    });
}

#[test]
fn port_outside_of_the_range_is_the_hosts() {
    with_mappings(|lab| {
        for port in [22, 60_999, 61_101, 65_535] {
            passes(lab, &tcp(client(), (NODE, port).into(), SYN, b"").build());
            passes(lab, &udp(client(), (NODE, port).into(), b"hello").build());
        }
    });
}

#[test]
fn node_port_of_an_address_that_is_not_the_nodes_is_not_ours() {
    with_mappings(|lab| {
        for addr in ["192.0.2.99", "10.0.0.5", "198.51.100.2"] {
            passes(lab, &tcp(client(), format!("{addr}:{NODE_PORT}").parse().unwrap(), SYN, b"").build());
        }
    });
}

#[test]
fn address_that_the_node_lost_is_not_ours() {
    with_mappings(|lab| {
        lab.set_addresses(&[super::scene::SECOND_NODE]);
        passes(lab, &tcp(client(), node(), SYN, b"").build());
    });
}

#[test]
fn other_protocols_are_not_ours() {
    with_mappings(|lab| {
        let ports: Vec<u8> = [61_000_u16, 61_000].iter().flat_map(|port| port.to_be_bytes()).collect();
        for protocol in [1, 2, 33, 41, 47, 50, 132, 136] {
            let bytes = [ports.clone(), vec![0; 40]].concat();
            let packet = Packet::new(CLIENT.into(), NODE.into(), Transport::Raw { protocol, bytes: bytes.clone() });
            passes(lab, &for_us(packet).build());
            let packet = Packet::new(POD.into(), CLIENT.into(), Transport::Raw { protocol, bytes });
            passes(lab, &for_us(packet).build());
        }
    });
}

#[test]
fn ipv6_is_not_ours_yet() {
    with_mappings(|lab| {
        let from = "[2001:db8:0:2::2]:43210".parse().unwrap();
        let to = "[2001:db8:0:1::10]:61000".parse().unwrap();
        passes(lab, &tcp(from, to, SYN, b"").build());
        passes(lab, &udp(from, to, b"hello").build());
    });
}

#[test]
fn arp_and_unknown_frames_are_not_ours() {
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
fn frame_that_ends_before_its_ports_do_is_not_ours() {
    with_mappings(|lab| {
        let frame = tcp(client(), node(), SYN, b"").build();
        // The kernel's test run takes no IPv4 frame that ends within the IP header.
        for length in 34..38 {
            passes(lab, &frame[..length]);
        }
    });
}

#[test]
fn header_shorter_than_any_is_not_ours() {
    with_mappings(|lab| {
        for words in 0..5 {
            let mut frame = tcp(client(), node(), SYN, b"").build();
            frame[14] = 0x40 | words;
            passes(lab, &frame);
        }
    });
}

#[test]
fn later_fragment_has_no_ports_and_is_not_ours() {
    with_mappings(|lab| {
        for (source, destination) in [(client(), node()), (pod(), client())] {
            let mut fragment = udp(source, destination, b"looks like ports");
            let ip = fragment.ipv4_mut().unwrap();
            (ip.fragment_offset, ip.more_fragments, ip.dont_fragment) = (185, true, false);
            passes(lab, &fragment.build());
            fragment.ipv4_mut().unwrap().more_fragments = false;
            passes(lab, &fragment.build());
        }
    });
}

#[test]
fn direct_request_to_a_pod_is_not_ours() {
    with_mappings(|lab| {
        let direct = tcp(client(), pod(), SYN, b"");
        passes(lab, &direct.build());
    });
}

#[test]
fn packets_that_a_pod_sends_from_another_port_are_not_ours() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        for source in [(POD, POD_PORT + 1), (POD, 43_210)] {
            passes(lab, &tcp(source.into(), client(), SYN, b"").build());
        }
        passes(lab, &udp(("10.0.0.6".parse::<std::net::Ipv4Addr>().unwrap(), POD_PORT).into(), client(), b"").build());
    });
}

#[test]
fn without_a_local_address_no_request_is_ours() {
    crate::lab::with_lab(|lab| {
        lab.add(Tcp, NODE_PORT, "10.0.0.5:8080", 1);
        passes(lab, &tcp(client(), node(), SYN, b"").build());
        passes(lab, &tcp(client(), pod(), ACK, b"").build());
    });
}
