// SPDX-License-Identifier: Apache-2.0
//! The programs of devices without link-layer header.
//!
//! The kernel's test run knows Ethernet frames only: it reads the kind of packet at offset 12 and hands over all bytes.
//! An IPv4 header has its source address there. So these packets come from 8.0.0.0/16, which reads as "IPv4", and
//! begin with 0x45, which reads as a multicast address: for this machine too.

use std::net::SocketAddr;

use npl_agent::core::model::Family;
use npl_common::names::{PROG_EGRESS_L3, PROG_INGRESS_L3};
use npl_testkit::packet::sctp_chunks::{INIT, INIT_ACK};
use npl_testkit::packet::tcp_flags::{ACK, SYN};
use npl_testkit::packet::{Checksum, Packet, Transport};

use super::scene::{GENERATION, NODE_PORT, Sctp, Tcp, Udp, from, node, to, with_mappings_of};
use crate::counters::{first_request, reason, reply, request};
use crate::lab::Lab;
use npl_common::reason::Reason;

fn client() -> SocketAddr {
    "8.0.0.2:43210".parse().unwrap()
}

fn pod() -> SocketAddr {
    "8.0.0.5:8080".parse().unwrap()
}

fn with_l3_mappings(test: impl Fn(&mut Lab) + Send + Sync) {
    with_mappings_of(Family::V4, |lab| {
        for protocol in [Tcp, Udp, Sctp] {
            lab.add(protocol, NODE_PORT, pod(), GENERATION);
        }
        test(lab);
    });
}

fn bare(packet: Packet) -> Packet {
    Packet { ethernet: None, ..packet }
}

#[test]
fn request_and_reply_are_translated_without_a_link_layer_header() {
    with_l3_mappings(|lab| {
        let request = bare(Packet::tcp(client(), node(), SYN, b""));
        lab.run(PROG_INGRESS_L3, &request.build()).is(&to(&request, pod()), first_request("61000/tcp", 40));
        let answer = bare(Packet::tcp(pod(), client(), SYN | ACK, b""));
        lab.run(PROG_EGRESS_L3, &answer.build()).is(&from(&answer, node()), reply("61000/tcp", 40));
        // The test run takes no frame that is shorter than an Ethernet and an IPv4 header.
        let request = bare(Packet::udp(client(), node(), b"hello there"));
        lab.run(PROG_INGRESS_L3, &request.build()).is(&to(&request, pod()), first_request("61000/udp", 39));
        let mut answer = bare(Packet::udp(pod(), client(), b"hello yourself"));
        *answer.transport.checksum_mut().unwrap() = Checksum::Zero;
        lab.run(PROG_EGRESS_L3, &answer.build()).is(&from(&answer, node()), reply("61000/udp", 42));
    });
}

#[test]
fn what_is_not_ours_passes_without_a_link_layer_header() {
    with_l3_mappings(|lab| {
        let other_port = bare(Packet::tcp(client(), "192.0.2.10:22".parse().unwrap(), SYN, b""));
        lab.run(PROG_INGRESS_L3, &other_port.build()).is(&other_port, vec![]);
        let unmapped = bare(Packet::tcp(client(), "192.0.2.10:61050".parse().unwrap(), SYN, b""));
        lab.run(PROG_INGRESS_L3, &unmapped.build()).is(&unmapped, reason(Reason::NoMapping));
        let direct = bare(Packet::tcp(pod(), client(), ACK, b""));
        lab.run(PROG_EGRESS_L3, &direct.build()).is(&direct, reason(Reason::UntrackedReply));
    });
}

#[test]
fn unusual_packets_are_translated_without_a_link_layer_header() {
    with_l3_mappings(|lab| {
        lab.run(PROG_INGRESS_L3, &bare(Packet::udp(client(), node(), b"hello there")).build());
        let router = "8.0.0.9".parse().unwrap();
        let about_reply = |server| bare(Packet::icmp_error(router, 3, 4, &Packet::udp(server, client(), b"hello"), 8));
        let (arrives, expected) = (about_reply(node()), about_reply(pod()));
        lab.run(PROG_INGRESS_L3, &arrives.build()).is(&expected, request("61000/udp", 56));
        let about_request = |sender: SocketAddr, server| {
            bare(Packet::icmp_error(sender.ip(), 3, 3, &Packet::udp(client(), server, b"hello"), 8))
        };
        let (leaves, expected) = (about_request(pod(), pod()), about_request(node(), node()));
        lab.run(PROG_EGRESS_L3, &leaves.build()).is(&expected, reply("61000/udp", 56));
        let mut first = bare(Packet::udp(client(), node(), b"the first of several"));
        (first.ipv4_mut().unwrap().more_fragments, first.ipv4_mut().unwrap().dont_fragment) = (true, false);
        lab.run(PROG_INGRESS_L3, &first.build()).is(&to(&first, pod()), request("61000/udp", 48));
        let mut later = bare(Packet::new(
            client().ip(),
            node().ip(),
            Transport::Raw { protocol: 17, bytes: b"what follows it, and more".to_vec() },
        ));
        (later.ipv4_mut().unwrap().fragment_offset, later.ipv4_mut().unwrap().dont_fragment) = (20, false);
        lab.run(PROG_INGRESS_L3, &later.build()).is(&to(&later, pod()), request("61000/udp", 45));
    });
}

#[test]
fn sctp_is_translated_without_a_link_layer_header() {
    with_l3_mappings(|lab| {
        let init = bare(Packet::sctp(client(), node(), INIT, &[7; 16]));
        lab.run(PROG_INGRESS_L3, &init.build()).is(&to(&init, pod()), first_request("61000/sctp", 52));
        let answer = bare(Packet::sctp(pod(), client(), INIT_ACK, &[7; 20]));
        lab.run(PROG_EGRESS_L3, &answer.build()).is(&from(&answer, node()), reply("61000/sctp", 56));
    });
}
