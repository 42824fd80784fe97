// SPDX-License-Identifier: Apache-2.0
//! Tests the programs for devices without a link-layer header.
//!
//! The kernel's test run supports Ethernet frames only: it reads the ethertype at offset 12 and passes all bytes to the
//! program. At that offset, an IP header contains a part of the source address. The packets therefore come from
//! 8.0.0.0/16 and from IPv6 addresses whose third group is 86dd, which read as the ethertypes of IPv4 and IPv6. The
//! first byte is 0x45 or, with the traffic class of these tests, 0x61. The kernel reads this byte as the start of a
//! multicast link-layer address, and accepts the frame.

use std::net::SocketAddr;

use npl_common::names::{PROG_EGRESS_L3, PROG_INGRESS_L3};
use npl_common::reason::Reason;
use npl_testkit::packet::sctp_chunks::{INIT, INIT_ACK};
use npl_testkit::packet::tcp_flags::{ACK, SYN};
use npl_testkit::packet::{Checksum, Ip, Packet};

use super::errors::too_large;
use super::fragments::{L3, pieces};
use super::scene::{
    CLIENT_ISN, CLIENT_PORT, GENERATION, NODE_PORT, POD_ISN, POD_PORT, Sctp, Tcp, Udp, becomes, from, ip, length, node,
    node_ip, sctp, tcp, to, with_isns, with_mappings,
};
use crate::counters::{establishing_reply, first_request, reason, reply, request};
use crate::lab::Lab;

/// The identification of a datagram's fragments.
const ID: u32 = 0x4e52;
/// The maximum payload size of a fragment in bytes.
const SIZE: usize = 40;

fn client() -> SocketAddr {
    (ip("8.0.0.2", "2001:db8:86dd::2"), CLIENT_PORT).into()
}

fn pod() -> SocketAddr {
    (ip("8.0.0.5", "fd00:0:86dd::5"), POD_PORT).into()
}

/// Returns a port of the Node.
fn node_at(port: u16) -> SocketAddr {
    (node_ip(), port).into()
}

fn with_l3_mappings(test: impl Fn(&mut Lab) + Send + Sync) {
    with_mappings(|lab| {
        for protocol in [Tcp, Udp, Sctp] {
            lab.add(protocol, NODE_PORT, pod(), GENERATION);
        }
        test(lab);
    });
}

fn without_ethernet(mut packet: Packet) -> Packet {
    packet.ethernet = None;
    if let Ip::V6(header) = &mut packet.ip {
        header.traffic_class = 0x10;
    }
    packet
}

#[test]
fn request_and_reply_are_translated_without_a_link_layer_header() {
    with_l3_mappings(|lab| {
        let request = without_ethernet(tcp(client(), node(), SYN, b""));
        let counted = first_request("61000/tcp", length(&request));
        lab.run(PROG_INGRESS_L3, &request.build()).is(&to(&request, pod()), counted);
        let answer = with_isns(without_ethernet(tcp(pod(), client(), SYN | ACK, b"")), (POD_ISN, CLIENT_ISN));
        lab.run(PROG_EGRESS_L3, &answer.build()).is(&from(&answer, node()), reply("61000/tcp", length(&answer)));
        // The payload is long enough for the test run, which accepts no frame that is shorter than an Ethernet and an
        // IPv4 header.
        let request = without_ethernet(Packet::udp(client(), node(), b"hello there"));
        let counted = first_request("61000/udp", length(&request));
        lab.run(PROG_INGRESS_L3, &request.build()).is(&to(&request, pod()), counted);
        let mut answer = without_ethernet(Packet::udp(pod(), client(), b"hello yourself"));
        lab.run(PROG_EGRESS_L3, &answer.build()).is(&from(&answer, node()), reply("61000/udp", length(&answer)));
        *answer.transport.checksum_mut().unwrap() = Checksum::Zero;
        let counted = establishing_reply("61000/udp", length(&answer));
        lab.run(PROG_EGRESS_L3, &answer.build()).is(&from(&answer, node()), counted);
    });
}

#[test]
fn unmapped_packets_are_passed_without_a_link_layer_header() {
    with_l3_mappings(|lab| {
        let other_port = without_ethernet(Packet::tcp(client(), node_at(22), SYN, b""));
        lab.run(PROG_INGRESS_L3, &other_port.build()).is(&other_port, vec![]);
        let unmapped = without_ethernet(Packet::tcp(client(), node_at(61_050), SYN, b""));
        lab.run(PROG_INGRESS_L3, &unmapped.build()).is(&unmapped, reason(Reason::NoMapping));
        let direct = without_ethernet(Packet::tcp(pod(), client(), ACK, b""));
        lab.run(PROG_EGRESS_L3, &direct.build()).is(&direct, reason(Reason::UntrackedReply));
    });
}

#[test]
fn errors_are_translated_without_a_link_layer_header() {
    with_l3_mappings(|lab| {
        lab.run(PROG_INGRESS_L3, &without_ethernet(Packet::udp(client(), node(), b"hello there")).build());
        lab.run(PROG_EGRESS_L3, &without_ethernet(Packet::udp(pod(), client(), b"hello yourself")).build());
        let (kind, code) = too_large();
        let about = |sender, quoted: &Packet| without_ethernet(Packet::icmp_error(sender, kind, code, quoted, 8));
        let router = ip("8.0.0.9", "2001:db8:86dd::9");
        let about_reply = |server| about(router, &Packet::udp(server, client(), b"hello"));
        let (arrives, expected) = (about_reply(node()), about_reply(pod()));
        lab.run(PROG_INGRESS_L3, &arrives.build()).is(&expected, request("61000/udp", length(&arrives)));
        let about_request = |server: SocketAddr| about(server.ip(), &Packet::udp(client(), server, b"hello"));
        let (leaves, expected) = (about_request(pod()), about_request(node()));
        lab.run(PROG_EGRESS_L3, &leaves.build()).is(&expected, reply("61000/udp", length(&leaves)));
    });
}

#[test]
fn fragments_are_translated_without_a_link_layer_header() {
    with_l3_mappings(|lab| {
        let payload = [7; 100];
        let pieces_without_ethernet = |packet: Packet| -> Vec<Vec<u8>> {
            let framed = without_ethernet(packet).to_this_machine();
            pieces(&framed, ID, SIZE).into_iter().map(|frame| frame[L3..].to_vec()).collect()
        };
        let [arrive, expected] =
            [node(), pod()].map(|server| pieces_without_ethernet(Packet::udp(client(), server, &payload)));
        assert!(arrive.len() > 2);
        for (number, (frame, expected)) in arrive.iter().zip(expected).enumerate() {
            let change = if number == 0 { first_request } else { request };
            becomes(lab, PROG_INGRESS_L3, frame, expected, change("61000/udp", frame.len()));
        }
        let [leave, expected] =
            [pod(), node()].map(|server| pieces_without_ethernet(Packet::udp(server, client(), &payload)));
        for (frame, expected) in leave.iter().zip(expected) {
            becomes(lab, PROG_EGRESS_L3, frame, expected, reply("61000/udp", frame.len()));
        }
    });
}

#[test]
fn sctp_is_translated_without_a_link_layer_header() {
    with_l3_mappings(|lab| {
        let init = without_ethernet(sctp(client(), node(), INIT, &[7; 16]));
        let counted = first_request("61000/sctp", length(&init));
        lab.run(PROG_INGRESS_L3, &init.build()).is(&to(&init, pod()), counted);
        let answer = without_ethernet(sctp(pod(), client(), INIT_ACK, &[7; 20]));
        lab.run(PROG_EGRESS_L3, &answer.build()).is(&from(&answer, node()), reply("61000/sctp", length(&answer)));
    });
}
