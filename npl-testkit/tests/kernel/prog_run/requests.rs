// SPDX-License-Identifier: Apache-2.0
//! Tests the destination NAT of requests to node ports.

use npl_agent::core::model::Family;
use npl_testkit::packet::tcp_flags::{ACK, PSH, SYN};
use npl_testkit::packet::{Checksum, Packet, Transport};

use super::scene::{
    NODE_PORT, Tcp, Udp, bare, client, family, length, node, node_ip, other_pod_ip, pod, random_packets, second_node,
    tcp, to, udp, with_mappings, with_mappings_of,
};
use crate::counters::{first_request, request};
use crate::lab::NEXT;

#[test]
fn tcp_request_goes_to_the_pod() {
    with_mappings(|lab| {
        let request = tcp(client(), node(), SYN, b"");
        lab.ingress(&request).is(&to(&request, pod()), first_request("61000/tcp", bare()));
    });
}

#[test]
fn udp_request_goes_to_the_pod() {
    with_mappings(|lab| {
        let request = udp(client(), node(), b"hello");
        lab.ingress(&request).is(&to(&request, pod()), first_request("61000/udp", length(&request)));
    });
}

#[test]
fn retransmitted_syn_opens_no_second_flow() {
    with_mappings(|lab| {
        let syn = tcp(client(), node(), SYN, b"");
        lab.ingress(&syn).is(&to(&syn, pod()), first_request("61000/tcp", bare()));
        lab.ingress(&syn).is(&to(&syn, pod()), request("61000/tcp", bare()));
    });
}

#[test]
fn every_address_of_the_node_leads_to_the_pod() {
    with_mappings(|lab| {
        let request = udp(client(), second_node(), b"hello");
        lab.ingress(&request).is(&to(&request, pod()), first_request("61000/udp", length(&request)));
    });
}

#[test]
fn datagram_without_checksum_keeps_none() {
    with_mappings(|lab| {
        let mut request = udp(client(), node(), b"no checksum");
        *request.transport.checksum_mut().unwrap() = Checksum::Zero;
        lab.ingress(&request).is(&to(&request, pod()), first_request("61000/udp", length(&request)));
    });
}

#[test]
fn udp_checksum_of_zero_is_written_as_all_ones() {
    with_mappings(|lab| {
        let request = udp(client(), node(), &checksum_field(&to(&udp(client(), node(), &[0; 2]), pod())));
        let expected = to(&request, pod());
        assert_eq!(checksum_field(&expected), [0xff, 0xff], "the payload is chosen for this checksum");
        lab.ingress(&request).is(&expected, first_request("61000/udp", length(&request)));
    });
}

#[test]
fn tcp_checksum_of_zero_stays_zero() {
    with_mappings(|lab| {
        let filler = checksum_field(&to(&tcp(client(), node(), SYN, &[0; 2]), pod()));
        let request = tcp(client(), node(), SYN, &filler);
        let expected = to(&request, pod());
        assert_eq!(checksum_field(&expected), [0, 0], "the payload is chosen for this checksum");
        lab.ingress(&request).is(&expected, first_request("61000/tcp", length(&request)));
    });
}

#[test]
fn header_options_of_every_length_are_kept() {
    with_mappings_of(Family::V4, |lab| {
        for words in 1..=10 {
            let mut request = udp(client(), node(), b"options");
            // All options are "no operation", and the builder adds one byte "end of options".
            request.ipv4_mut().unwrap().options = vec![1; words * 4 - 1];
            let outcome = lab.ingress(&request);
            let change = if words == 1 { first_request } else { crate::counters::request };
            outcome.is(&to(&request, pod()), change("61000/udp", length(&request)));
        }
    });
}

#[test]
fn all_other_header_fields_are_kept() {
    with_mappings_of(Family::V4, |lab| {
        let mut request = tcp(client(), node(), PSH | ACK, b"payload");
        let ip = request.ipv4_mut().unwrap();
        (ip.tos, ip.ttl, ip.identification, ip.dont_fragment) = (0xb9, 3, 0xbeef, false);
        let Transport::Tcp(segment) = &mut request.transport else { panic!("the packet is a TCP segment") };
        (segment.window, segment.options) = (17, vec![2, 4, 5, 0xb4, 1, 1, 4, 2]);
        lab.ingress(&request).is(&to(&request, pod()), first_request("61000/tcp", length(&request)));
    });
}

#[test]
fn wrong_transport_checksums_stay_wrong() {
    with_mappings(|lab| {
        for mut request in [tcp(client(), node(), SYN, b"broken"), udp(client(), node(), b"broken")] {
            *request.transport.checksum_mut().unwrap() = Checksum::Wrong(0x1234);
            let outcome = lab.ingress(&request);
            assert_eq!(outcome.action, NEXT);
            let mut arrived = Packet::parse(&outcome.bytes).unwrap();
            let checksum = std::mem::replace(arrived.transport.checksum_mut().unwrap(), Checksum::Wrong(0x1234));
            assert!(matches!(checksum, Checksum::Wrong(_)), "{checksum:?} was corrected by the translation");
            assert_eq!(arrived, to(&request, pod()));
        }
    });
}

/// In about one of 65,535 packets, the correct checksum equals the pseudo-header sum that a CHECKSUM_PARTIAL packet
/// has. Although no other field shows whether such a checksum is complete or partial, the program must update the
/// checksum as a complete one.
#[test]
fn checksum_that_looks_partial_is_updated_as_a_complete_one() {
    with_mappings(|lab| {
        let segment = looks_partial(|payload| tcp(client(), node(), SYN, payload));
        let datagram = looks_partial(|payload| udp(client(), node(), payload));
        for request in [segment, datagram] {
            assert_eq!(lab.ingress(&request).bytes, to(&request, pod()).build(), "{request:?}");
        }
    });
}

#[test]
fn wrong_header_checksum_stays_wrong() {
    with_mappings_of(Family::V4, |lab| {
        let mut request = udp(client(), node(), b"broken");
        request.ipv4_mut().unwrap().checksum = Checksum::Wrong(0x1234);
        let outcome = lab.ingress(&request);
        let mut arrived = Packet::parse(&outcome.bytes).unwrap();
        let checksum = std::mem::replace(&mut arrived.ipv4_mut().unwrap().checksum, Checksum::Wrong(0x1234));
        assert!(matches!(checksum, Checksum::Wrong(_)), "{checksum:?} was corrected by the translation");
        assert_eq!(arrived, to(&request, pod()));
    });
}

#[test]
fn updated_checksums_of_requests_equal_a_full_computation() {
    with_mappings(|lab| {
        for request in random_packets(client(), node(), 400) {
            let outcome = lab.ingress(&request);
            assert_eq!(outcome.bytes, to(&request, pod()).build(), "{request:?}");
        }
    });
}

#[test]
fn first_and_last_port_of_the_range_are_mapped() {
    with_mappings(|lab| {
        for port in [61_000, 61_100] {
            let other = (other_pod_ip(), 53).into();
            lab.add(Udp, port, other, 7);
            let request = udp(client(), (node_ip(), port).into(), b"edge");
            let expected = to(&request, other);
            lab.ingress(&request).is(&expected, first_request(&format!("{port}/udp"), length(&request)));
        }
    });
}

#[test]
fn totals_of_a_family_keep_the_counts_of_removed_mappings() {
    with_mappings(|lab| {
        lab.ingress(&tcp(client(), node(), SYN, b""));
        lab.remove(family(), Tcp, NODE_PORT);
        for of in Family::ALL {
            let packets = lab.datapath.tables.totals(of).unwrap().request_packets;
            assert_eq!(packets, u64::from(of == family()), "{of}");
        }
    });
}

/// Returns a packet whose correct checksum equals the sum of its pseudo-header, as in a CHECKSUM_PARTIAL packet.
pub(super) fn looks_partial(of: impl Fn(&[u8]) -> Packet) -> Packet {
    let mut unfinished = of(&[0; 2]);
    *unfinished.transport.checksum_mut().unwrap() = Checksum::Partial;
    let wanted = checksum_field(&unfinished);
    (0..=u16::MAX).map(|filler| of(&filler.to_be_bytes())).find(|packet| checksum_field(packet) == wanted).unwrap()
}

/// Returns the transport checksum of the built packet.
fn checksum_field(packet: &Packet) -> [u8; 2] {
    let l3 = if family() == Family::V4 { 20 } else { 40 };
    let field = if matches!(packet.transport, Transport::Tcp(_)) { 16 } else { 6 };
    *packet.build()[14 + l3 + field..].first_chunk().unwrap()
}
