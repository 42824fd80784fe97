// SPDX-License-Identifier: Apache-2.0
//! The packets that are mutated: all protocols, fragments, options, extension headers, VLAN tags, and ICMP errors.

use std::net::{IpAddr, SocketAddr};

use npl_agent::core::model::Family;
use npl_testkit::packet::sctp_chunks::{ABORT, DATA, HEARTBEAT, INIT, INIT_ACK, SACK, SHUTDOWN};
use npl_testkit::packet::tcp_flags::{ACK, FIN, PSH, RST, SYN};
use npl_testkit::packet::{Checksum, Ip, Packet, Transport};

use super::scene::{L3_NODE_PORT, OTHER_NODE_PORT, RESTRICTED_NODE_PORT, l3_client, l3_pod, restricted_pod};
use crate::prog_run::errors::kinds;
use crate::prog_run::extensions::{DESTINATION_OPTIONS, HOP_BY_HOP, SIX, extended};
use crate::prog_run::fragments::pieces;
use crate::prog_run::scene::{
    CLIENT_ISN, CLIENT_PORT, NODE_PORT, POD_ISN, client_ip, family, node_ip, pod, router_ip, sctp, second_node_ip,
    unused_ip, with_isns,
};

/// The frames of one kind of device: with Ethernet headers, or without link-layer headers.
pub(super) struct Corpus {
    pub(super) requests: Vec<Vec<u8>>,
    pub(super) replies: Vec<Vec<u8>>,
}

/// Numbers that have a meaning in the scene, for mutations of ports.
pub(super) const WORDS: [u16; 10] =
    [NODE_PORT, L3_NODE_PORT, RESTRICTED_NODE_PORT, OTHER_NODE_PORT, 61_050, 61_100, 61_101, 60_999, 8080, CLIENT_PORT];

/// Addresses that have a meaning in the scene, for mutations of addresses.
pub(super) fn addresses() -> Vec<Vec<u8>> {
    let all = [
        client_ip(),
        node_ip(),
        second_node_ip(),
        unused_ip(),
        pod().ip(),
        restricted_pod().ip(),
        l3_client(),
        l3_pod().ip(),
    ];
    all.map(octets).to_vec()
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Returns the frames for devices with Ethernet headers.
pub(super) fn ethernet() -> Corpus {
    let client = SocketAddr::new(client_ip(), CLIENT_PORT);
    let mut requests = Vec::new();
    let mut replies = Vec::new();
    for (node, pod) in [
        (SocketAddr::new(node_ip(), NODE_PORT), pod()),
        (SocketAddr::new(second_node_ip(), NODE_PORT), pod()),
        (SocketAddr::new(node_ip(), RESTRICTED_NODE_PORT), restricted_pod()),
        (SocketAddr::new(node_ip(), OTHER_NODE_PORT), pod()),
    ] {
        requests.extend(sent(client, node, (CLIENT_ISN, POD_ISN)));
        replies.extend(sent(pod, client, (POD_ISN, CLIENT_ISN)));
        requests.extend(errors(router_ip(), &quotes(node, client, (POD_ISN, CLIENT_ISN))));
        for sender in [pod.ip(), router_ip()] {
            replies.extend(errors(sender, &quotes(client, pod, (CLIENT_ISN, POD_ISN))));
        }
    }
    let stranger = SocketAddr::new(router_ip(), CLIENT_PORT);
    for (from, to) in [
        (client, SocketAddr::new(node_ip(), 61_050)),
        (client, SocketAddr::new(node_ip(), 22)),
        (client, SocketAddr::new(unused_ip(), NODE_PORT)),
        (client, pod()),
        (stranger, SocketAddr::new(node_ip(), RESTRICTED_NODE_PORT)),
    ] {
        requests.extend(sent(from, to, (CLIENT_ISN, POD_ISN)));
    }
    for (from, to) in
        [(SocketAddr::new(node_ip(), 61_060), client), (SocketAddr::new(node_ip(), 22), client), (pod(), stranger)]
    {
        replies.extend(sent(from, to, (POD_ISN, CLIENT_ISN)));
    }
    let mut arp = vec![0xff; 6];
    arp.extend([2, 0, 0, 0, 0, 2, 0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]);
    arp.resize(60, 0);
    requests.push(arp);
    Corpus { requests, replies }
}

/// Returns the frames for devices without link-layer headers.
pub(super) fn bare() -> Corpus {
    let client = SocketAddr::new(l3_client(), CLIENT_PORT);
    let node = SocketAddr::new(node_ip(), L3_NODE_PORT);
    let router = l3_client();
    let mut requests = sent(client, node, (CLIENT_ISN, POD_ISN));
    requests.extend(sent(client, SocketAddr::new(node_ip(), 61_050), (CLIENT_ISN, POD_ISN)));
    requests.extend(errors(router, &quotes(node, client, (POD_ISN, CLIENT_ISN))));
    let mut replies = sent(l3_pod(), client, (POD_ISN, CLIENT_ISN));
    replies.extend(errors(l3_pod().ip(), &quotes(client, l3_pod(), (CLIENT_ISN, POD_ISN))));
    for frame in requests.iter_mut().chain(&mut replies) {
        frame.drain(..14);
        if family() == Family::V6 {
            // The kernel reads the first byte as a part of a link-layer address, which must be a multicast address.
            frame[0] = 0x61;
        }
    }
    Corpus { requests, replies }
}

/// Returns packets of a connection whose translated replies an ICMP error may quote, and similar packets.
fn quotes(from: SocketAddr, to: SocketAddr, isns: (u32, u32)) -> Vec<Packet> {
    vec![
        with_isns(Packet::tcp(from, to, ACK, b"a quoted segment"), isns),
        Packet::udp(from, to, b"a quoted datagram"),
        sctp(from, to, DATA, &[9; 24]),
        sctp(from, to, INIT, &[7; 16]),
    ]
}

/// Returns ICMP errors about these packets, with short and long quotes, and an echo request.
fn errors(sender: IpAddr, quoted: &[Packet]) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    for (number, packet) in quoted.iter().enumerate() {
        for (at, bytes) in [8, 12, 18, 20, 1000].into_iter().enumerate() {
            let (kind, code) = kinds()[(number + at) % kinds().len()];
            let error = Packet::icmp_error(sender, kind, code, packet, bytes).to_this_machine();
            frames.push(error.build());
            if at == 3 {
                frames.extend(with_options(&error));
                let echo_type = if family() == Family::V4 { 8 } else { 128 };
                frames.push(Packet::icmp_error(sender, echo_type, 0, packet, bytes).to_this_machine().build());
            }
        }
    }
    frames
}

/// Returns packets from one endpoint to the other.
fn sent(from: SocketAddr, to: SocketAddr, isns: (u32, u32)) -> Vec<Vec<u8>> {
    let long: Vec<u8> = (0..=255).chain(0..200).collect();
    let mut packets = Vec::new();
    for (flags, payload) in [(SYN, &b""[..]), (SYN | ACK, b""), (ACK, b""), (PSH | ACK, &long), (FIN | ACK, b"odd")] {
        packets.push(with_isns(Packet::tcp(from, to, flags, payload), isns));
    }
    packets.push(with_isns(Packet::tcp(from, to, RST, b""), isns));
    for payload in [&b""[..], b"hello", &long] {
        packets.push(Packet::udp(from, to, payload));
    }
    let mut without_checksum = Packet::udp(from, to, b"no checksum");
    *without_checksum.transport.checksum_mut().unwrap() = Checksum::Zero;
    let mut with_wrong_checksum = with_isns(Packet::tcp(from, to, ACK, b"wrong checksum"), isns);
    *with_wrong_checksum.transport.checksum_mut().unwrap() = Checksum::Wrong(0x1234);
    packets.extend([without_checksum, with_wrong_checksum]);
    for (kind, content) in [
        (INIT, &[7; 16][..]),
        (INIT_ACK, &[7; 16]),
        (DATA, &long),
        (HEARTBEAT, &[5; 44]),
        (ABORT, &[]),
        (SHUTDOWN, &[1; 4]),
    ] {
        packets.push(sctp(from, to, kind, content));
    }
    let mut bundled = sctp(from, to, SACK, &[3; 12]);
    if let Transport::Sctp(sctp) = &mut bundled.transport {
        sctp.add_chunk(DATA, &long);
    }
    packets.push(bundled);
    let mut frames: Vec<Vec<u8>> = Vec::new();
    for (number, packet) in packets.into_iter().enumerate() {
        let packet = packet.to_this_machine();
        frames.extend(with_options(&packet));
        let frame = packet.build();
        if frame.len() > 300 {
            let id = u32::try_from(number).unwrap() + 0x4e00;
            let mut fragments = pieces(&packet, id, 160);
            if number % 2 == 1 {
                fragments.reverse();
            }
            frames.extend(fragments);
        }
        if number % 4 == 0 {
            let tagged = [&frame[..12], &[0x81, 0, 0, 100], &frame[12..]].concat();
            frames.push(tagged);
        }
        frames.push(frame);
    }
    frames
}

/// Returns the packet with IPv4 options, or with chains of IPv6 extension headers.
fn with_options(packet: &Packet) -> Vec<Vec<u8>> {
    match &packet.ip {
        Ip::V4(_) => {
            let mut packet = packet.clone();
            packet.ipv4_mut().unwrap().options = vec![1; 7];
            vec![packet.build()]
        }
        Ip::V6(_) => vec![
            extended(packet, &[(DESTINATION_OPTIONS, SIX)]),
            extended(packet, &[(HOP_BY_HOP, SIX), (DESTINATION_OPTIONS, SIX), (DESTINATION_OPTIONS, SIX)]),
        ],
    }
}
