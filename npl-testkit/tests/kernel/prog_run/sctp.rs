// SPDX-License-Identifier: Apache-2.0
//! Tests SCTP. The CRC of an SCTP packet covers no pseudo-header, and NPL updates the CRC without reading the payload.

use npl_agent::core::model::Family;
use npl_common::names::{PROG_EGRESS, PROG_INGRESS};
use npl_common::reason::Reason;
use npl_testkit::packet::sctp_chunks::{COOKIE_ECHO, DATA, INIT, INIT_ACK};
use npl_testkit::packet::{Crc, Ip, Packet, Transport};

use super::extensions::{DESTINATION_OPTIONS, HOP_BY_HOP, SIX, extended};
use super::scene::{
    Sctp, becomes, client, client_ip, family, from, length, node, node_ip, pod, pod_ip, sctp, to, with_mappings,
    with_mappings_of,
};
use crate::counters::{first_request, reason, reply, request};
use crate::lab::Lab;

/// Length of the smallest SCTP packet: the common header and one chunk header.
const SMALLEST: usize = 16;

/// Establishes an association.
fn establish(lab: &mut Lab) {
    lab.ingress(&sctp(client(), node(), INIT, &[0; 16]));
    lab.egress(&sctp(pod(), client(), INIT_ACK, &[0; 16]));
    lab.ingress(&sctp(client(), node(), COOKIE_ECHO, b""));
}

fn with_checksum(packet: &Packet, checksum: Crc) -> Packet {
    let mut packet = packet.clone();
    let Transport::Sctp(sctp) = &mut packet.transport else { unreachable!("the packet is SCTP") };
    sctp.checksum = checksum;
    packet
}

#[test]
fn request_goes_to_the_pod_and_reply_comes_from_the_node() {
    with_mappings(|lab| {
        let init = sctp(client(), node(), INIT, &[7; 16]);
        lab.ingress(&init).is(&to(&init, pod()), first_request("61000/sctp", length(&init)));
        let answer = sctp(pod(), client(), INIT_ACK, &[9; 300]);
        lab.egress(&answer).is(&from(&answer, node()), reply("61000/sctp", length(&answer)));
    });
}

/// The updated CRCs must be correct for packets of any length up to the MTU of a link, including lengths that no SCTP
/// stack sends.
#[test]
fn updated_crcs_equal_a_full_computation() {
    with_mappings(|lab| {
        establish(lab);
        let mut state = 1_u32;
        for bytes in (0..=1500).step_by(if crate::world::is_emulated() { 37 } else { 3 }) {
            let content: Vec<u8> = std::iter::repeat_with(|| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                state.to_be_bytes()[0]
            })
            .take(bytes)
            .collect();
            let unpadded = |mut packet: Packet| {
                let Transport::Sctp(sctp) = &mut packet.transport else { unreachable!("the packet is SCTP") };
                sctp.chunks.truncate(4 + bytes);
                packet
            };
            let question = unpadded(sctp(client(), node(), DATA, &content));
            assert_eq!(lab.ingress(&question).bytes, to(&question, pod()).build(), "{bytes} bytes");
            let answer = unpadded(sctp(pod(), client(), DATA, &content));
            assert_eq!(lab.egress(&answer).bytes, from(&answer, node()).build(), "{bytes} bytes");
        }
    });
}

#[test]
fn crc_that_is_left_to_hardware_stays_zero() {
    with_mappings(|lab| {
        establish(lab);
        let question = with_checksum(&sctp(client(), node(), DATA, b"question"), Crc::Zero);
        lab.ingress(&question).is(&to(&question, pod()), request("61000/sctp", length(&question)));
        let answer = with_checksum(&sctp(pod(), client(), DATA, b"answer"), Crc::Zero);
        lab.egress(&answer).is(&from(&answer, node()), reply("61000/sctp", length(&answer)));
    });
}

#[test]
fn wrong_crc_stays_equally_wrong() {
    with_mappings(|lab| {
        establish(lab);
        let question = with_checksum(&sctp(client(), node(), DATA, b"question"), Crc::WrongBy(0x0100_0001));
        lab.ingress(&question).is(&to(&question, pod()), request("61000/sctp", length(&question)));
        let answer = with_checksum(&sctp(pod(), client(), DATA, b"answer"), Crc::WrongBy(0x8000_0000));
        lab.egress(&answer).is(&from(&answer, node()), reply("61000/sctp", length(&answer)));
    });
}

#[test]
fn padding_of_the_frame_is_not_part_of_the_crc() {
    with_mappings(|lab| {
        establish(lab);
        let padding = [0xa5; 22];
        let question = sctp(client(), node(), DATA, b"short");
        let frame = [question.build(), padding.to_vec()].concat();
        let translated = [to(&question, pod()).build(), padding.to_vec()].concat();
        becomes(lab, PROG_INGRESS, &frame, translated, request("61000/sctp", frame.len()));
        let answer = sctp(pod(), client(), DATA, b"short");
        let frame = [answer.build(), padding.to_vec()].concat();
        let translated = [from(&answer, node()).build(), padding.to_vec()].concat();
        becomes(lab, PROG_EGRESS, &frame, translated, reply("61000/sctp", frame.len()));
    });
}

#[test]
fn options_and_extension_headers_are_kept_and_not_part_of_the_crc() {
    with_mappings_of(Family::V4, |lab| {
        establish(lab);
        let with_options = |packet: &Packet| {
            let mut packet = packet.clone();
            let header = packet.ipv4_mut().unwrap();
            (header.options, header.tos, header.ttl) = (vec![1; 39], 0x28, 3);
            packet
        };
        let question = with_options(&sctp(client(), node(), DATA, b"behind options"));
        lab.ingress(&question).is(&to(&question, pod()), request("61000/sctp", length(&question)));
        let answer = with_options(&sctp(pod(), client(), DATA, b"behind options"));
        lab.egress(&answer).is(&from(&answer, node()), reply("61000/sctp", length(&answer)));
    });
    with_mappings_of(Family::V6, |lab| {
        establish(lab);
        let chain: [(u8, &[u8]); 2] = [(HOP_BY_HOP, SIX), (DESTINATION_OPTIONS, SIX)];
        let question = sctp(client(), node(), DATA, b"behind extensions");
        let frame = extended(&question, &chain);
        let translated = extended(&to(&question, pod()), &chain);
        becomes(lab, PROG_INGRESS, &frame, translated, request("61000/sctp", frame.len()));
        let answer = sctp(pod(), client(), DATA, b"behind extensions");
        let frame = extended(&answer, &chain);
        becomes(lab, PROG_EGRESS, &frame, extended(&from(&answer, node()), &chain), reply("61000/sctp", frame.len()));
    });
}

#[test]
fn all_other_header_fields_are_kept() {
    with_mappings(|lab| {
        establish(lab);
        let mut answer = sctp(pod(), client(), DATA, b"answer");
        match &mut answer.ip {
            Ip::V4(header) => (header.tos, header.ttl, header.identification) = (0xb8, 1, 0xffff),
            Ip::V6(header) => (header.traffic_class, header.hop_limit, header.flow_label) = (0xb8, 1, 0xf_ffff),
        }
        lab.egress(&answer).is(&from(&answer, node()), reply("61000/sctp", length(&answer)));
    });
}

#[test]
fn no_mapping_is_counted_for_sctp() {
    with_mappings(|lab| {
        let packet = sctp(client(), (node_ip(), 61_050).into(), INIT, &[0; 16]);
        lab.ingress(&packet).is(&packet, reason(Reason::NoMapping));
        lab.remove(family(), Sctp, node().port());
        let packet = sctp(client(), node(), INIT, &[0; 16]);
        lab.ingress(&packet).is(&packet, reason(Reason::NoMapping));
    });
}

#[test]
fn sctp_outside_of_the_range_and_from_unmapped_ports_is_passed_unchanged() {
    with_mappings(|lab| {
        establish(lab);
        let packet = sctp(client(), (node_ip(), 2905).into(), INIT, &[0; 16]);
        lab.ingress(&packet).is(&packet, vec![]);
        let packet = sctp((pod_ip(), 2905).into(), client(), DATA, b"direct");
        lab.egress(&packet).is(&packet, vec![]);
    });
}

#[test]
fn untracked_reply_is_counted_for_a_direct_sctp_association() {
    with_mappings(|lab| {
        let packet = sctp(pod(), client(), INIT, &[0; 16]);
        lab.egress(&packet).is(&packet, reason(Reason::UntrackedReply));
    });
}

/// A packet may be truncated although its frame is long enough: bytes after the end of the packet, such as Ethernet
/// padding, do not belong to the packet.
#[test]
fn truncated_sctp_is_counted_in_both_directions() {
    with_mappings(|lab| {
        establish(lab);
        for bytes in 4..SMALLEST {
            let part = |packet: Packet| {
                let transport = packet.build()[length(&packet) - SMALLEST..][..bytes].to_vec();
                Transport::Raw { protocol: 132, bytes: transport }
            };
            let request = part(sctp(client(), node(), DATA, b""));
            let request = Packet::new(client_ip(), node_ip(), request).to_this_machine();
            let answer = Packet::new(pod_ip(), client_ip(), part(sctp(pod(), client(), DATA, b""))).to_this_machine();
            for (program, packet) in [(PROG_INGRESS, request), (PROG_EGRESS, answer)] {
                for padding in [vec![], vec![0; 24]] {
                    let frame = [packet.build(), padding].concat();
                    becomes(lab, program, &frame, frame.clone(), reason(Reason::Truncated));
                }
            }
        }
    });
}
