// SPDX-License-Identifier: Apache-2.0
//! Tests packets with a checksum from the device (`CHECKSUM_COMPLETE`). The checksum must match the packet after every
//! rewrite.

use std::os::fd::AsFd as _;

use aya::util::KernelVersion;
use npl_agent::core::model::Family;
use npl_common::names::{PROG_EGRESS, PROG_INGRESS, PROG_INGRESS_REDIRECT};
use npl_testkit::packet::sctp_chunks::{DATA, INIT, INIT_ACK};
use npl_testkit::packet::tcp_flags::{ACK, SYN};
use npl_testkit::packet::{Checksum, Packet};

use super::fragments::fragments;
use super::redirect::{NEXT_HOP, REDIRECT, set_next_hop};
use super::requests::looks_partial;
use super::scene::{client, family, node, pod, pod_ip, router_ip, sctp, tcp, udp, with_mappings};
use crate::lab::{Lab, NEXT};
use crate::sys::run_with_complete_checksum;

/// Whether the kernel's test run supports and verifies a checksum from the device.
fn is_supported() -> bool {
    KernelVersion::current().unwrap() >= KernelVersion::new(6, 17, 0)
}

#[track_caller]
fn keeps_checksum(lab: &mut Lab, program: &'static str, packet: &Packet) {
    keeps_checksum_of_frame(lab, program, &packet.build());
}

#[track_caller]
fn keeps_checksum_of_frame(lab: &mut Lab, program: &'static str, frame: &[u8]) {
    ends_with(lab, NEXT, program, frame);
}

/// Asserts the same as [`keeps_checksum_of_frame`], for a program that ends with this action.
#[track_caller]
fn ends_with(lab: &mut Lab, action: i32, program: &'static str, frame: &[u8]) {
    let fd = lab.program(program).fd().unwrap().as_fd().try_clone_to_owned().unwrap();
    assert_eq!(run_with_complete_checksum(fd.as_fd(), frame).unwrap(), action, "{program} on {frame:02x?}");
}

#[test]
fn checksum_complete_stays_correct() {
    if !is_supported() {
        return;
    }
    with_mappings(|lab| {
        let mut no_checksum = udp(client(), node(), b"no checksum");
        *no_checksum.transport.checksum_mut().unwrap() = Checksum::Zero;
        let mut options = udp(client(), node(), b"options");
        if let Some(header) = options.ipv4_mut() {
            header.options = vec![1; 39];
        }
        let unfinished = looks_partial(|payload| udp(client(), node(), payload));
        let requests =
            [tcp(client(), node(), SYN, b"odd"), udp(client(), node(), b"hello"), no_checksum, options, unfinished];
        for request in requests {
            keeps_checksum(lab, PROG_INGRESS, &request);
        }
        let mut no_checksum = udp(pod(), client(), b"no checksum");
        *no_checksum.transport.checksum_mut().unwrap() = Checksum::Zero;
        for answer in [tcp(pod(), client(), SYN | ACK, b"odd"), udp(pod(), client(), b"hello"), no_checksum] {
            keeps_checksum(lab, PROG_EGRESS, &answer);
        }
    });
}

/// The hop limit of a redirected packet is decremented. In IPv6, no checksum in the packet covers the hop limit, so the
/// program must update the device's checksum for the changed hop limit.
#[test]
fn checksum_complete_of_a_redirected_packet_stays_correct() {
    if !is_supported() {
        return;
    }
    for is_reachable in [false, true] {
        with_mappings(|lab| {
            if is_reachable {
                set_next_hop(pod_ip(), NEXT_HOP);
            }
            let action = if is_reachable { REDIRECT } else { NEXT };
            let mut no_checksum = udp(client(), node(), b"no checksum");
            *no_checksum.transport.checksum_mut().unwrap() = Checksum::Zero;
            for request in [tcp(client(), node(), SYN, b"odd"), udp(client(), node(), b"hello"), no_checksum] {
                ends_with(lab, action, PROG_INGRESS_REDIRECT, &request.build());
            }
            for frame in fragments(&udp(client(), node(), &[7; 200]), 1) {
                ends_with(lab, action, PROG_INGRESS_REDIRECT, &frame);
            }
        });
    }
}

/// The device's checksum covers the CRC too. An updated Internet checksum compensates for the changed ports, so the sum
/// of the packet stays the same. An updated CRC does not compensate for them, so the program must update the device's
/// checksum too.
#[test]
fn checksum_complete_of_an_sctp_packet_stays_correct() {
    if !is_supported() {
        return;
    }
    with_mappings(|lab| {
        keeps_checksum(lab, PROG_INGRESS, &sctp(client(), node(), INIT, &[7; 16]));
        keeps_checksum(lab, PROG_EGRESS, &sctp(pod(), client(), INIT_ACK, &[7; 117]));
        for bytes in [8, 12, 64] {
            let about_reply = Packet::icmp_error(router_ip(), 3, 1, &sctp(node(), client(), DATA, &[7; 100]), bytes);
            keeps_checksum(lab, PROG_INGRESS, &about_reply.to_this_machine());
        }
    });
}

#[test]
fn checksum_complete_of_an_icmp_error_stays_correct() {
    if !is_supported() {
        return;
    }
    with_mappings(|lab| {
        lab.ingress(&udp(client(), node(), b"hello"));
        let kind = if family() == Family::V4 { 3 } else { 1 };
        for bytes in [8, 11, 13] {
            let about_reply = Packet::icmp_error(router_ip(), kind, 4, &udp(node(), client(), b"hello"), bytes);
            keeps_checksum(lab, PROG_INGRESS, &about_reply.to_this_machine());
            let about_request = Packet::icmp_error(pod_ip(), kind, 4, &udp(client(), pod(), b"hello"), bytes);
            keeps_checksum(lab, PROG_EGRESS, &about_request.to_this_machine());
        }
    });
}

#[test]
fn checksum_complete_of_a_fragment_stays_correct() {
    if !is_supported() {
        return;
    }
    with_mappings(|lab| {
        lab.ingress(&udp(client(), node(), b"hello"));
        let (request, answer) = (udp(client(), node(), &[7; 200]), udp(pod(), client(), &[7; 200]));
        for frame in fragments(&request, 1) {
            keeps_checksum_of_frame(lab, PROG_INGRESS, &frame);
        }
        for frame in fragments(&answer, 1) {
            keeps_checksum_of_frame(lab, PROG_EGRESS, &frame);
        }
    });
}
