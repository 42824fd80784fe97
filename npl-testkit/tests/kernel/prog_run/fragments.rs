// SPDX-License-Identifier: Apache-2.0
//! Tests fragmented datagrams, in which only the first fragment has ports.

use std::collections::BTreeSet;

use aya::maps::{MapData, PerCpuArray, PerCpuValues};
use npl_common::fragment::is_of;
use npl_common::fragment_buffer::{FRAGMENTS, SavedFrame};
use npl_common::names::{MAP_FRAGMENT_BUFFER, PROG_EGRESS, PROG_INGRESS, PROG_PODS_REDIRECT};
use npl_common::next_hop::PodNextHop;
use npl_common::reason::Reason;
use npl_testkit::packet::tcp_flags::{ACK, PSH};
use npl_testkit::packet::{Ip, Packet, ones_complement_sum};

use super::errors::{about_reply, about_request, too_large};
use super::extensions::{FRAGMENT, extended};
use super::redirect::{NEXT_HOP, set_next_hop};
use super::scene::{
    CLIENT_ISN, CLIENT_PORT, NODE_PORT, POD_ISN, SECOND_NODE_PORT, Tcp, Udp, becomes, client, client_ip, establish,
    family, from, node, node_ip, other_pod_ip, pod, pod_ip, second_node, second_node_ip, tcp, to, udp, unused_ip,
    with_isns, with_mappings,
};
use crate::counters::{Change, first_request, reason, reply, request};
use crate::lab::{Lab, TEST_DEVICE, open as open_map};
use crate::sys::stay_on_this_processor;

/// The identification of a datagram's fragments.
const ID: u32 = 0x4e51;
/// The maximum payload size of a fragment in bytes.
const SIZE: usize = 64;

/// Offset of the IP header in a frame, and lengths of IP headers without options.
pub(crate) const L3: usize = 14;
pub(crate) const V4_HEADER: usize = 20;
pub(crate) const V6_HEADER: usize = 40;

/// Returns one fragment of a packet: `size` bytes of payload from `offset` on.
fn fragment(packet: &Packet, id: u32, offset: usize, size: usize) -> Vec<u8> {
    if is_v4(packet) { fragment_v4(packet, id, offset, size) } else { fragment_v6(packet, id, offset, size) }
}

fn fragment_v4(packet: &Packet, id: u32, offset: usize, size: usize) -> Vec<u8> {
    let mut frame = packet.build();
    let mut payload = frame.split_off(L3 + V4_HEADER);
    let has_more = offset + size < payload.len();
    payload = payload[offset..].iter().copied().take(size).collect();
    let [.., high, low] = id.to_be_bytes();
    let units = u16::try_from(offset / 8).unwrap() | u16::from(has_more) << 13;
    let length = u16::try_from(V4_HEADER + payload.len()).unwrap();
    frame[L3 + 2..L3 + 4].copy_from_slice(&length.to_be_bytes());
    frame[L3 + 4..L3 + 6].copy_from_slice(&[high, low]);
    frame[L3 + 6..L3 + 8].copy_from_slice(&units.to_be_bytes());
    frame[L3 + 10..L3 + 12].fill(0);
    let check = !ones_complement_sum(&frame[L3..]);
    frame[L3 + 10..L3 + 12].copy_from_slice(&check.to_be_bytes());
    [frame, payload].concat()
}

fn fragment_v6(packet: &Packet, id: u32, offset: usize, size: usize) -> Vec<u8> {
    let payload = packet.build().len() - L3 - V6_HEADER;
    let units = u16::try_from(offset).unwrap() | u16::from(offset + size < payload);
    let mut frame = extended(packet, &[(FRAGMENT, &[units.to_be_bytes().as_slice(), &id.to_be_bytes()].concat())]);
    frame.drain(L3 + V6_HEADER + 8..L3 + V6_HEADER + 8 + offset);
    frame.truncate(L3 + V6_HEADER + 8 + size.min(payload - offset));
    let length = u16::try_from(frame.len() - L3 - V6_HEADER).unwrap();
    frame[L3 + 4..L3 + 6].copy_from_slice(&length.to_be_bytes());
    frame
}

fn is_v4(packet: &Packet) -> bool {
    matches!(packet.ip, Ip::V4(_))
}

/// Returns all fragments of a packet, in order.
pub(crate) fn fragments(packet: &Packet, id: u32) -> Vec<Vec<u8>> {
    pieces(packet, id, SIZE)
}

/// Returns all fragments of a packet, in order, with at most `size` bytes of payload each.
pub(crate) fn pieces(packet: &Packet, id: u32, size: usize) -> Vec<Vec<u8>> {
    let header = if is_v4(packet) { V4_HEADER } else { V6_HEADER };
    let payload = packet.build().len() - L3 - header;
    (0..payload).step_by(size).map(|offset| fragment(packet, id, offset, size)).collect()
}

/// Returns a UDP datagram and a TCP segment, each with the name of its mapping. Both are so long that `fragments`
/// splits them into five fragments, and the last fragment is shorter than `SIZE`.
fn requests() -> [(Packet, &'static str); 2] {
    let payload: Vec<u8> = (0..=255).chain(0..40).collect();
    [(udp(client(), node(), &payload), "61000/udp"), (tcp(client(), node(), PSH | ACK, &payload), "61000/tcp")]
}

/// The packets of `requests`, sent from the Pod to the client.
fn replies() -> [(Packet, &'static str); 2] {
    let isns = (POD_ISN, CLIENT_ISN);
    requests().map(|(packet, mapping)| (with_isns(from(&to(&packet, client()), pod()), isns), mapping))
}

#[track_caller]
fn passes(lab: &mut Lab, program: &'static str, frame: &[u8], changes: Vec<Change>) {
    becomes(lab, program, frame, frame.to_vec(), changes);
}

/// Opens a TCP flow and a UDP flow.
fn open(lab: &mut Lab) {
    establish(lab);
    lab.ingress(&udp(client(), node(), b"hello"));
}

#[test]
fn fragments_of_a_request_go_to_the_pod() {
    with_mappings(|lab| {
        for (packet, mapping) in requests() {
            let (frames, expected) = (fragments(&packet, ID), fragments(&to(&packet, pod()), ID));
            assert!(frames.len() > 4);
            for (number, (frame, expected)) in frames.iter().zip(expected).enumerate() {
                let change = if number == 0 { first_request } else { request };
                becomes(lab, PROG_INGRESS, frame, expected, change(mapping, frame.len()));
            }
        }
    });
}

#[test]
fn fragments_of_a_reply_come_from_the_node() {
    with_mappings(|lab| {
        open(lab);
        for (packet, mapping) in replies() {
            let (frames, expected) = (fragments(&packet, ID), fragments(&from(&packet, node()), ID));
            for (frame, expected) in frames.iter().zip(expected) {
                becomes(lab, PROG_EGRESS, frame, expected, reply(mapping, frame.len()));
            }
        }
    });
}

#[test]
fn fragments_of_a_reply_come_from_the_clients_nat_address() {
    with_mappings(|lab| {
        let second = second_node();
        lab.ingress(&udp(client(), second, b"hello"));
        lab.egress(&udp(pod(), client(), b"hello yourself"));
        lab.ingress(&udp(client(), second, b"establish the flow"));
        let [(packet, mapping), _] = replies();
        let (frames, expected) = (fragments(&packet, ID), fragments(&from(&packet, second), ID));
        for (frame, expected) in frames.iter().zip(expected) {
            becomes(lab, PROG_EGRESS, frame, expected, reply(mapping, frame.len()));
        }
    });
}

#[test]
fn later_fragments_are_translated_in_any_order_duplicated_and_overlapping() {
    with_mappings(|lab| {
        let [(packet, mapping), _] = requests();
        let translated = to(&packet, pod());
        lab.run(PROG_INGRESS, &fragment(&packet, ID, 0, SIZE));
        for (offset, size) in [(256, 64), (128, 64), (128, 64), (64, 64), (96, 128), (8, 64), (192, 8)] {
            let frame = fragment(&packet, ID, offset, size);
            let changes = request(mapping, frame.len());
            becomes(lab, PROG_INGRESS, &frame, fragment(&translated, ID, offset, size), changes);
        }
    });
}

#[test]
fn early_fragment_is_passed_unchanged_and_counted() {
    with_mappings(|lab| {
        let [(packet, mapping), _] = requests();
        let later = fragment(&packet, ID, SIZE, SIZE);
        passes(lab, PROG_INGRESS, &later, reason(Reason::EarlyFragment));
        lab.run(PROG_INGRESS, &fragment(&packet, ID, 0, SIZE));
        let translated = fragment(&to(&packet, pod()), ID, SIZE, SIZE);
        becomes(lab, PROG_INGRESS, &later, translated, request(mapping, later.len()));
    });
}

/// The program writes each saved copy into the first fragment's skb, and re-injects a clone of this skb at egress.
/// Afterwards, the program must restore the first fragment's bytes.
#[test]
fn first_fragment_of_a_reply_is_unchanged_by_reinjected_copies() {
    stay_on_this_processor();
    with_mappings(|lab| {
        open(lab);
        for ((packet, mapping), id) in replies().into_iter().zip(ID..) {
            let (frames, translated) = (fragments(&packet, id), fragments(&from(&packet, node()), id));
            for early in frames[1..].iter().rev() {
                passes(lab, PROG_EGRESS, early, reason(Reason::EarlyFragment));
            }
            for (frame, translated) in frames.iter().zip(translated) {
                becomes(lab, PROG_EGRESS, frame, translated, reply(mapping, frame.len()));
            }
        }
    });
}

/// The program writes each saved copy into the first fragment's skb, and re-injects a clone of this skb at ingress.
/// Afterwards, the program must restore the first fragment's bytes.
#[test]
fn first_fragment_is_unchanged_by_reinjected_copies() {
    stay_on_this_processor();
    with_mappings(|lab| {
        // Each datagram has its own identification, because IPv6 does not distinguish identifications by protocol.
        for ((packet, mapping), id) in requests().into_iter().zip(ID..) {
            let frames = fragments(&packet, id);
            for early in frames[1..].iter().rev() {
                passes(lab, PROG_INGRESS, early, reason(Reason::EarlyFragment));
            }
            let translated = fragments(&to(&packet, pod()), id);
            let changes = first_request(mapping, frames[0].len());
            becomes(lab, PROG_INGRESS, &frames[0], translated[0].clone(), changes);
            for (frame, translated) in frames.iter().zip(translated).skip(1) {
                becomes(lab, PROG_INGRESS, frame, translated, request(mapping, frame.len()));
            }
        }
    });
}

#[test]
fn fragments_of_different_datagrams_are_not_confused() {
    with_mappings(|lab| {
        let other_pod = (other_pod_ip(), 53).into();
        lab.add(Udp, SECOND_NODE_PORT, other_pod, 7);
        let [(packet, _), _] = requests();
        let other_port = to(&packet, (node_ip(), SECOND_NODE_PORT).into());
        let other_client = from(&packet, (unused_ip(), CLIENT_PORT).into());
        let other_address = to(&packet, (second_node_ip(), SECOND_NODE_PORT).into());
        let datagrams = [
            (&packet, ID, pod()),
            (&other_port, ID + 1, other_pod),
            (&other_client, ID, pod()),
            (&other_address, ID, other_pod),
        ];
        for (datagram, id, _) in datagrams {
            lab.run(PROG_INGRESS, &fragment(datagram, id, 0, SIZE));
        }
        for (datagram, id, server) in datagrams {
            let outcome = lab.run(PROG_INGRESS, &fragment(datagram, id, SIZE, SIZE));
            assert_eq!(outcome.bytes, fragment(&to(datagram, server), id, SIZE, SIZE));
        }
    });
}

#[test]
fn reused_identification_belongs_to_the_newer_datagram() {
    with_mappings(|lab| {
        let other_pod = (other_pod_ip(), 53).into();
        lab.add(Udp, SECOND_NODE_PORT, other_pod, 7);
        let [(packet, mapping), _] = requests();
        let again = to(&packet, (node_ip(), SECOND_NODE_PORT).into());
        let to_host = to(&packet, (node_ip(), 53).into());
        let later = fragment(&packet, ID, SIZE, SIZE);
        lab.run(PROG_INGRESS, &fragment(&packet, ID, 0, SIZE));
        becomes(
            lab,
            PROG_INGRESS,
            &later,
            fragment(&to(&packet, pod()), ID, SIZE, SIZE),
            request(mapping, later.len()),
        );
        lab.run(PROG_INGRESS, &fragment(&again, ID, 0, SIZE));
        let translated = fragment(&to(&packet, other_pod), ID, SIZE, SIZE);
        becomes(lab, PROG_INGRESS, &later, translated, request("61001/udp", later.len()));
        passes(lab, PROG_INGRESS, &fragment(&to_host, ID, 0, SIZE), vec![]);
        passes(lab, PROG_INGRESS, &later, vec![]);
    });
}

#[test]
fn reused_identification_of_a_reply_belongs_to_the_newer_datagram() {
    with_mappings(|lab| {
        open(lab);
        let [(packet, _), _] = replies();
        let later = fragment(&packet, ID, SIZE, SIZE);
        lab.run(PROG_EGRESS, &fragment(&packet, ID, 0, SIZE));
        let direct = to(&packet, (client_ip(), CLIENT_PORT + 1).into());
        passes(lab, PROG_EGRESS, &fragment(&direct, ID, 0, SIZE), reason(Reason::UntrackedReply));
        passes(lab, PROG_EGRESS, &later, vec![]);
    });
}

#[test]
fn fragment_tracking_record_times_out() {
    with_mappings(|lab| {
        let [(packet, mapping), _] = requests();
        let later = fragment(&packet, ID, SIZE, SIZE);
        lab.run(PROG_INGRESS, &fragment(&packet, ID, 0, SIZE));
        lab.age_fragment_records(family(), 20);
        let translated = fragment(&to(&packet, pod()), ID, SIZE, SIZE);
        becomes(lab, PROG_INGRESS, &later, translated, request(mapping, later.len()));
        lab.age_fragment_records(family(), 20);
        passes(lab, PROG_INGRESS, &later, reason(Reason::EarlyFragment));
    });
}

#[test]
fn datagram_to_the_host_does_not_overwrite_a_mapped_datagrams_record() {
    with_mappings(|lab| {
        let first = |packet: &Packet| fragment(packet, ID, 0, SIZE);
        let [(packet, _), _] = requests();
        let to_host = to(&packet, (second_node_ip(), 53).into());
        lab.run(PROG_INGRESS, &first(&packet));
        let (slot_of_mapping, of_mapping) = lab.fragment_records(family())[0];
        lab.set_fragment_record(family(), slot_of_mapping, 0);
        lab.run(PROG_INGRESS, &first(&to_host));
        let (slot, host_record) = lab.fragment_records(family())[0];
        // The record of the mapped datagram is written to the slot of the datagram to the host, as if both datagrams
        // had the same slot.
        lab.set_fragment_record(family(), slot, of_mapping);
        passes(lab, PROG_INGRESS, &first(&to_host), vec![]);
        assert_eq!(lab.fragment_records(family()), [(slot, of_mapping)]);
        lab.age_fragment_records(family(), 40);
        passes(lab, PROG_INGRESS, &first(&to_host), vec![]);
        let replaced = lab.fragment_records(family())[0].1;
        assert!(is_of(replaced, host_record), "a timed-out record must be replaced");
    });
}

#[test]
fn fragments_of_unmapped_datagrams_are_passed_unchanged() {
    with_mappings(|lab| {
        let [(packet, _), _] = requests();
        let to_host = to(&packet, (node_ip(), 53).into());
        let elsewhere = to(&packet, (unused_ip(), NODE_PORT).into());
        for datagram in [to_host, elsewhere] {
            for frame in fragments(&datagram, ID) {
                passes(lab, PROG_INGRESS, &frame, vec![]);
            }
        }
        // The sources: a Pod port without a mapping, and an address that belongs to no Pod.
        for source in [(pod_ip(), 53), (unused_ip(), 53)] {
            for frame in fragments(&from(&replies()[0].0, source.into()), ID) {
                passes(lab, PROG_EGRESS, &frame, vec![]);
            }
        }
    });
}

#[test]
fn fragments_without_a_mapping_or_flow_are_counted_once_per_datagram() {
    with_mappings(|lab| {
        let unmapped = to(&requests()[0].0, (node_ip(), 61_050).into());
        for (number, frame) in fragments(&unmapped, ID).iter().enumerate() {
            passes(lab, PROG_INGRESS, frame, if number == 0 { reason(Reason::NoMapping) } else { vec![] });
        }
        for (number, frame) in fragments(&replies()[0].0, ID).iter().enumerate() {
            passes(lab, PROG_EGRESS, frame, if number == 0 { reason(Reason::UntrackedReply) } else { vec![] });
        }
    });
}

/// A first fragment without the TCP checksum cannot be translated, so all fragments are passed unchanged. No legitimate
/// sender makes such small fragments.
#[test]
fn truncated_first_fragment_is_passed_with_all_others() {
    with_mappings(|lab| {
        let [_, (packet, _)] = requests();
        passes(lab, PROG_INGRESS, &fragment(&packet, ID, 0, 16), reason(Reason::Truncated));
        passes(lab, PROG_INGRESS, &fragment(&packet, ID, 16, SIZE), vec![]);
        establish(lab);
        let [_, (packet, _)] = replies();
        passes(lab, PROG_EGRESS, &fragment(&packet, ID, 0, 16), reason(Reason::Truncated));
        passes(lab, PROG_EGRESS, &fragment(&packet, ID, 16, SIZE), vec![]);
    });
}

/// A frame may be longer than its packet: Ethernet pads short frames. The padding is not a part of the fragment, so a
/// first fragment that is too short must be recognized despite the padding.
#[test]
fn truncated_first_fragment_is_passed_although_padding_follows_it() {
    with_mappings(|lab| {
        let [_, (packet, _)] = requests();
        let padded = |size| [fragment(&packet, ID, 0, size), vec![0; 30]].concat();
        for size in [8, 16] {
            passes(lab, PROG_INGRESS, &padded(size), reason(Reason::Truncated));
            passes(lab, PROG_INGRESS, &fragment(&packet, ID, size, SIZE), vec![]);
        }
        let translated = [fragment(&to(&packet, pod()), ID, 0, 24), vec![0; 30]].concat();
        let changes = first_request("61000/tcp", translated.len());
        becomes(lab, PROG_INGRESS, &padded(24), translated, changes);
    });
}

#[test]
fn smallest_fragments_of_a_datagram_are_translated() {
    with_mappings(|lab| {
        let [(packet, mapping), _] = requests();
        let translated = to(&packet, pod());
        for offset in (0..64).step_by(8) {
            let frame = fragment(&packet, ID, offset, 8);
            let change = if offset == 0 { first_request } else { request };
            becomes(lab, PROG_INGRESS, &frame, fragment(&translated, ID, offset, 8), change(mapping, frame.len()));
        }
    });
}

#[test]
fn fragments_of_a_removed_mapping_are_passed_unchanged() {
    with_mappings(|lab| {
        let [_, (packet, _)] = requests();
        lab.run(PROG_INGRESS, &fragment(&packet, ID, 0, SIZE));
        lab.remove(family(), Tcp, NODE_PORT);
        passes(lab, PROG_INGRESS, &fragment(&packet, ID, SIZE, SIZE), vec![]);
    });
}

/// Returns hashes of all saved copies, on all processors.
fn saved() -> BTreeSet<u64> {
    let map: PerCpuArray<MapData, SavedFrame> = open_map(MAP_FRAGMENT_BUFFER);
    let hashes = |place| -> Vec<u64> { map.get(&place, 0).unwrap().iter().map(|copy| copy.hash).collect() };
    (0..FRAGMENTS).flat_map(hashes).filter(|hash| *hash != 0).collect()
}

/// Makes all saved copies older by `units`, each of about one second.
fn age_copies(units: u64) {
    let mut map: PerCpuArray<MapData, SavedFrame> = open_map(MAP_FRAGMENT_BUFFER);
    for place in 0..FRAGMENTS {
        let copies = map.get(&place, 0).unwrap();
        let aged = copies.iter().map(|copy| SavedFrame { time: copy.time.wrapping_sub(units), ..*copy });
        let aged: Vec<SavedFrame> = aged.collect();
        map.set(place, PerCpuValues::try_from(aged).unwrap(), 0).unwrap();
    }
}

#[test]
fn expired_copy_of_a_fragment_is_not_received_again() {
    stay_on_this_processor();
    with_mappings(|lab| {
        let [(packet, _), _] = requests();
        for (id, units, is_received) in [(ID, 20, true), (ID + 1, 40, false)] {
            let before = saved();
            passes(lab, PROG_INGRESS, &fragment(&packet, id, SIZE, SIZE), reason(Reason::EarlyFragment));
            let copy = &saved() - &before;
            assert_eq!(copy.len(), 1);
            age_copies(units);
            lab.run(PROG_INGRESS, &fragment(&packet, id, 0, SIZE));
            assert_eq!(saved().is_disjoint(&copy), is_received, "after about {units} s");
        }
    });
}

/// In redirect mode a reply passes two hooks, which identify a fragment by the same hash. A copy that one hook saved
/// has the link-layer addresses of that hook's link, so the other hook must not send this copy.
#[test]
fn copy_that_one_hook_saved_is_not_sent_by_another() {
    stay_on_this_processor();
    with_mappings(|lab| {
        open(lab);
        set_next_hop(pod_ip(), PodNextHop { ifindex: TEST_DEVICE, ..NEXT_HOP });
        let [(packet, mapping), _] = replies();
        let before = saved();
        passes(lab, PROG_PODS_REDIRECT, &fragment(&packet, ID, SIZE, SIZE), vec![]);
        let copy = &saved() - &before;
        assert_eq!(copy.len(), 1);
        let (first, translated) = (fragment(&packet, ID, 0, SIZE), fragment(&from(&packet, node()), ID, 0, SIZE));
        becomes(lab, PROG_EGRESS, &first, translated, reply(mapping, first.len()));
        assert!(copy.is_subset(&saved()), "the copy must stay in the fragment buffer");
    });
}

/// A fragmented ICMP error cannot be translated: the quoted packet is spread over several fragments, and the ICMP
/// checksum covers all of them.
#[test]
fn fragments_of_an_icmp_error_are_passed_unchanged() {
    with_mappings(|lab| {
        open(lab);
        let (arrives, _) = about_reply(too_large(), &udp(pod(), client(), &[7; 100]), 64);
        let (leaves, _) = about_request(too_large(), pod_ip(), &udp(client(), node(), &[7; 100]), 64);
        for (program, error) in [(PROG_INGRESS, arrives), (PROG_EGRESS, leaves)] {
            for frame in pieces(&error, ID, 48) {
                passes(lab, program, &frame, vec![]);
            }
        }
    });
}
