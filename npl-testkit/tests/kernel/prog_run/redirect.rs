// SPDX-License-Identifier: Apache-2.0
//! `--forwarding redirect`, packet by packet: what goes the short way is one hop older, and nothing else of it differs.

use std::net::IpAddr;

use aya::maps::{HashMap, MapData};
use npl_agent::core::model::Family;
use npl_common::names::{MAP_NEXT_HOP_V4, MAP_NEXT_HOP_V6, PROG_INGRESS_REDIRECT, PROG_PODS_REDIRECT};
use npl_common::next_hop::{PodAddressV4, PodAddressV6, PodNextHop, kind};
use npl_testkit::packet::tcp_flags::{ACK, SYN};
use npl_testkit::packet::{Ip, Packet};

use super::errors::{about_reply, too_large};
use super::fragments::pieces;
use super::scene::{client, family, length, node, pod, pod_ip, random_packets, tcp, to, udp, with_mappings};
use crate::counters::{first_request, request};
use crate::lab::{Lab, NEXT, open};

/// `TC_ACT_REDIRECT`, which is also `TCX_REDIRECT`.
pub(super) const REDIRECT: i32 = 7;

/// A device that nobody has: where a packet goes is only noted, since none leaves a test run.
const DEVICE: u32 = 1_000_000;
const MTU: u16 = 1500;

/// Of a fragmented datagram: its number, and bytes in each fragment.
const ID: u32 = 0x4e51;
const SIZE: usize = 504;

/// Says that packets to a Pod go by a device, and that its own come by it.
pub(super) fn lead(pod: IpAddr, way: PodNextHop) {
    match pod {
        IpAddr::V4(addr) => {
            let mut map: HashMap<MapData, PodAddressV4, PodNextHop> = open(MAP_NEXT_HOP_V4);
            map.insert(PodAddressV4 { addr: addr.octets() }, way, 0).unwrap();
        }
        IpAddr::V6(addr) => {
            let mut map: HashMap<MapData, PodAddressV6, PodNextHop> = open(MAP_NEXT_HOP_V6);
            map.insert(PodAddressV6 { addr: addr.octets() }, way, 0).unwrap();
        }
    }
}

pub(super) const WAY: PodNextHop = PodNextHop { ifindex: DEVICE, mtu: MTU, kind: kind::PEER };

/// The same after one more hop.
pub(super) fn one_hop_on(packet: &Packet) -> Packet {
    let mut packet = packet.clone();
    match &mut packet.ip {
        Ip::V4(ip) => ip.ttl -= 1,
        Ip::V6(ip) => ip.hop_limit -= 1,
    }
    packet
}

fn with_hops(mut packet: Packet, hops: u8) -> Packet {
    match &mut packet.ip {
        Ip::V4(ip) => ip.ttl = hops,
        Ip::V6(ip) => ip.hop_limit = hops,
    }
    packet
}

#[test]
fn a_request_leaves_for_the_pods_device_one_hop_older() {
    for kind in [kind::PEER, kind::BRIDGE] {
        with_mappings(|lab| {
            lead(pod_ip(), PodNextHop { kind, ..WAY });
            for (packet, mapping) in
                [(tcp(client(), node(), SYN, b""), "61000/tcp"), (udp(client(), node(), b"hello"), "61000/udp")]
            {
                let expected = one_hop_on(&to(&packet, pod()));
                let outcome = lab.run(PROG_INGRESS_REDIRECT, &packet.build());
                assert_eq!((outcome.action, outcome.bytes), (REDIRECT, expected.build()));
                assert_eq!(outcome.changes, first_request(mapping, length(&packet)));
            }
        });
    }
}

/// Where there is no short way, the program is the one of `--forwarding stack`.
#[test]
fn without_a_way_every_packet_is_what_the_stack_gets() {
    with_mappings(|lab| {
        for packet in random_packets(client(), node(), 64) {
            let (direct, stack) = (lab.run(PROG_INGRESS_REDIRECT, &packet.build()), lab.ingress(&packet));
            assert_eq!((direct.action, direct.bytes), (stack.action, stack.bytes));
        }
    });
}

#[test]
fn the_last_hop_and_what_is_too_large_are_left_to_the_stack() {
    with_mappings(|lab| {
        lead(pod_ip(), WAY);
        let last = with_hops(tcp(client(), node(), ACK, b"data"), 1);
        let expected = to(&last, pod()).build();
        let outcome = lab.run(PROG_INGRESS_REDIRECT, &last.build());
        assert_eq!((outcome.action, outcome.bytes), (NEXT, expected));

        let header = if family() == Family::V4 { 20 } else { 40 };
        let fits = udp(client(), node(), &vec![7; usize::from(MTU) - header - 8]);
        assert_eq!(lab.run(PROG_INGRESS_REDIRECT, &fits.build()).action, REDIRECT);
        let too_large = udp(client(), node(), &vec![7; usize::from(MTU) - header - 7]);
        let outcome = lab.run(PROG_INGRESS_REDIRECT, &too_large.build());
        assert_eq!((outcome.action, outcome.bytes), (NEXT, to(&too_large, pod()).build()));
    });
}

#[test]
fn fragments_and_errors_leave_for_the_pods_device_too() {
    with_mappings(|lab| {
        lead(pod_ip(), WAY);
        let packet = udp(client(), node(), &[7; 1000]);
        let translated = one_hop_on(&to(&packet, pod()));
        for (frame, expected) in pieces(&packet, ID, SIZE).iter().zip(pieces(&translated, ID, SIZE)) {
            let outcome = lab.run(PROG_INGRESS_REDIRECT, frame);
            assert_eq!((outcome.action, outcome.bytes), (REDIRECT, expected));
        }
        let (arrives, expected) = about_reply(too_large(), &udp(pod(), client(), b"hello"), 8);
        let outcome = lab.run(PROG_INGRESS_REDIRECT, &arrives.build());
        assert_eq!((outcome.action, outcome.bytes), (REDIRECT, one_hop_on(&expected).build()));
        assert_eq!(outcome.changes, request("61000/udp", length(&arrives)));
    });
}

/// What comes by another device than requests go by is left alone, and so is what is nobody's reply.
#[test]
fn only_replies_that_come_from_the_pods_device_are_touched() {
    with_mappings(|lab: &mut Lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        let reply = tcp(pod(), client(), SYN | ACK, b"");
        let untouched = |lab: &mut Lab| {
            let outcome = lab.run(PROG_PODS_REDIRECT, &reply.build());
            assert_eq!((outcome.action, outcome.bytes, outcome.changes), (NEXT, reply.build(), vec![]));
        };
        untouched(lab);
        lead(pod_ip(), WAY);
        untouched(lab);
    });
}
