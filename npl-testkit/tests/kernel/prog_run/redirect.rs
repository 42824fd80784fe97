// SPDX-License-Identifier: Apache-2.0
//! Tests `--forwarding redirect` packet by packet: the TTL or hop limit of a redirected packet is decremented, and the
//! packet is otherwise translated as in stack mode.

use std::net::IpAddr;
use std::os::fd::AsFd as _;

use aya::maps::{HashMap, MapData};
use npl_agent::core::model::Family;
use npl_common::names::{MAP_NEXT_HOP_V4, MAP_NEXT_HOP_V6, MAP_UPLINK, PROG_INGRESS_REDIRECT, PROG_PODS_REDIRECT};
use npl_common::next_hop::{PodAddressV4, PodAddressV6, PodNextHop, UPLINK, kind};
use npl_testkit::packet::tcp_flags::{ACK, SYN};
use npl_testkit::packet::{Ip, Packet};
use npl_testkit::run::Run;
use npl_testkit::test_run::{SkbContext, run_frame};
use npl_testkit::topology::{Options, Topology};

use super::errors::{about_reply, too_large};
use super::extensions::{DESTINATION_OPTIONS, SIX, extended};
use super::fragments::pieces;
use super::scene::{client, family, from, length, node, pod, pod_ip, random_packets, tcp, to, udp, with_mappings};
use crate::counters::{first_request, request};
use crate::lab::{Lab, NEXT, TEST_DEVICE, open};

/// The verdict `TC_ACT_REDIRECT`, which equals `TCX_REDIRECT`.
pub(crate) const REDIRECT: i32 = 7;

/// The index of a device that does not exist. A test run only returns the verdict of a redirect, and sends no packet.
const DEVICE: u32 = 1_000_000;
const MTU: u16 = 1500;

/// The identification of a datagram's fragments, and the payload bytes of each fragment.
const ID: u32 = 0x4e51;
const SIZE: usize = 504;

/// Sets the next hop of a Pod: the device to which the Pod's packets are redirected, and on which packets of the Pod
/// arrive.
pub(crate) fn set_next_hop(pod: IpAddr, next_hop: PodNextHop) {
    match pod {
        IpAddr::V4(addr) => {
            let mut map: HashMap<MapData, PodAddressV4, PodNextHop> = open(MAP_NEXT_HOP_V4);
            map.insert(PodAddressV4 { addr: addr.octets() }, next_hop, 0).unwrap();
        }
        IpAddr::V6(addr) => {
            let mut map: HashMap<MapData, PodAddressV6, PodNextHop> = open(MAP_NEXT_HOP_V6);
            map.insert(PodAddressV6 { addr: addr.octets() }, next_hop, 0).unwrap();
        }
    }
}

pub(super) const NEXT_HOP: PodNextHop = PodNextHop { ifindex: DEVICE, mtu: MTU, kind: kind::PEER };

/// Returns the packet after one hop: its TTL or hop limit is decremented.
pub(super) fn after_one_hop(packet: &Packet) -> Packet {
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
fn request_is_redirected_to_the_pods_device_with_decremented_ttl() {
    for kind in [kind::PEER, kind::BRIDGE] {
        with_mappings(|lab| {
            set_next_hop(pod_ip(), PodNextHop { kind, ..NEXT_HOP });
            for (packet, mapping) in
                [(tcp(client(), node(), SYN, b""), "61000/tcp"), (udp(client(), node(), b"hello"), "61000/udp")]
            {
                let expected = after_one_hop(&to(&packet, pod()));
                let outcome = lab.run(PROG_INGRESS_REDIRECT, &packet.build());
                assert_eq!((outcome.action, outcome.bytes), (REDIRECT, expected.build()));
                assert_eq!(outcome.changes, first_request(mapping, length(&packet)));
            }
        });
    }
}

/// Without a next hop, the program does the same as in `--forwarding stack`.
#[test]
fn packet_without_a_next_hop_is_passed_to_the_stack() {
    with_mappings(|lab| {
        for packet in random_packets(client(), node(), 64) {
            let (redirect, stack) = (lab.run(PROG_INGRESS_REDIRECT, &packet.build()), lab.ingress(&packet));
            assert_eq!((redirect.action, redirect.bytes), (stack.action, stack.bytes));
        }
    });
}

#[test]
fn packets_with_expired_ttl_or_beyond_the_mtu_are_passed_to_the_stack() {
    with_mappings(|lab| {
        set_next_hop(pod_ip(), NEXT_HOP);
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

/// Runs the ingress program on a GSO packet with segments of `gso_size` bytes, and returns the verdict.
fn verdict_on_gso(lab: &mut Lab, frame: &[u8], gso_size: usize) -> i32 {
    let fd = lab.program(PROG_INGRESS_REDIRECT).fd().unwrap().as_fd().try_clone_to_owned().unwrap();
    let gso_size = u32::try_from(gso_size).unwrap();
    let mut skb = SkbContext::default();
    (skb.gso_size, skb.gso_segs) = (gso_size, 2);
    run_frame(fd.as_fd(), frame, Some(&mut skb), 0, &mut [0; 4096]).unwrap().action
}

/// A Pod or a virtual machine may choose the length of the segments, even a length that is longer than any packet. The
/// segments must never exceed the MTU, because a network card may fail on such segments.
#[test]
fn gso_packets_with_segments_beyond_the_mtu_are_passed_to_the_stack() {
    with_mappings(|lab| {
        set_next_hop(pod_ip(), NEXT_HOP);
        let packet = tcp(client(), node(), ACK, &[7; 2000]);
        let mut with_options = packet.clone();
        let options = match with_options.ipv4_mut() {
            Some(header) => {
                header.options = vec![1; 8];
                with_options.build()
            }
            None => extended(&packet, &[(DESTINATION_OPTIONS, SIX)]),
        };
        let header = if family() == Family::V4 { 40 } else { 60 };
        for (frame, header) in [(packet.build(), header), (options, header + 8)] {
            let fits = usize::from(MTU) - header;
            let verdicts = [fits, fits + 1, 65_535 - header, 65_536 - header, 65_534]
                .map(|gso_size| verdict_on_gso(lab, &frame, gso_size));
            assert_eq!(verdicts, [REDIRECT, NEXT, NEXT, NEXT, NEXT]);
        }
    });
}

#[test]
fn fragments_and_icmp_errors_are_redirected_to_the_pods_device() {
    with_mappings(|lab| {
        set_next_hop(pod_ip(), NEXT_HOP);
        let packet = udp(client(), node(), &[7; 1000]);
        let translated = after_one_hop(&to(&packet, pod()));
        for (frame, expected) in pieces(&packet, ID, SIZE).iter().zip(pieces(&translated, ID, SIZE)) {
            let outcome = lab.run(PROG_INGRESS_REDIRECT, frame);
            assert_eq!((outcome.action, outcome.bytes), (REDIRECT, expected));
        }
        lab.egress(&udp(pod(), client(), b"hello"));
        let (arrives, expected) = about_reply(too_large(), &udp(pod(), client(), b"hello"), 8);
        let outcome = lab.run(PROG_INGRESS_REDIRECT, &arrives.build());
        assert_eq!((outcome.action, outcome.bytes), (REDIRECT, after_one_hop(&expected).build()));
        assert_eq!(outcome.changes, request("61000/udp", length(&arrives)));
    });
}

/// Runs `test` in the namespace of a Node that has a route to the client through an uplink, for each family. Without
/// such a route, the programs would pass every reply to the stack, whichever device the reply arrives on.
pub(super) fn with_route_to_client(test: impl Fn(&mut Lab) + Send + Sync) {
    let run = Run::start().unwrap();
    let topology = Topology::new(&run, "", Options::default()).unwrap();
    let uplink = topology.client().uplink.ifindex().unwrap();
    let with_uplink = |lab: &mut Lab| {
        let mut uplinks: HashMap<MapData, u32, u32> = open(MAP_UPLINK);
        uplinks.insert(uplink, UPLINK, 0).unwrap();
        test(lab);
    };
    topology.node().run(|| with_mappings(with_uplink)).unwrap();
}

/// The next hop of a Pod whose packets arrive on the device of test runs.
pub(super) const TESTED_NEXT_HOP: PodNextHop = PodNextHop { ifindex: TEST_DEVICE, ..NEXT_HOP };

/// Packets that arrive from another device than the Pod's next hop do not count as replies of the Pod, and are passed
/// unchanged.
#[test]
fn only_replies_from_the_pods_device_are_translated() {
    with_route_to_client(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        let reply = tcp(pod(), client(), SYN | ACK, b"");
        let untouched = |lab: &mut Lab| {
            let outcome = lab.run(PROG_PODS_REDIRECT, &reply.build());
            assert_eq!((outcome.action, outcome.bytes, outcome.changes), (NEXT, reply.build(), vec![]));
        };
        untouched(lab);
        set_next_hop(pod_ip(), NEXT_HOP);
        untouched(lab);
        set_next_hop(pod_ip(), TESTED_NEXT_HOP);
        let outcome = lab.run(PROG_PODS_REDIRECT, &reply.build());
        let expected = after_one_hop(&from(&reply, node())).build();
        assert_eq!((outcome.action, outcome.bytes), (REDIRECT, expected), "the Pod's own device");
    });
}
