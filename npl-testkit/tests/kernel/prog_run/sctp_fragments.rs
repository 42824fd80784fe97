// SPDX-License-Identifier: Apache-2.0
//! SCTP packets in fragments: how long the whole is, which the checksum depends on, is told by the last one. Where the first one
//! cannot wait for that, the chunk that is cut tells it.

use std::time::Duration;

use aya::maps::{Array, MapData};
use npl_common::fragment_buffer::{SCTP_FRAGMENTS, SavedFrame};
use npl_common::names::{MAP_SCTP_BUFFER, PROG_EGRESS, PROG_INGRESS};
use npl_common::reason::Reason;
use npl_testkit::packet::sctp_chunks::{ABORT, COOKIE_ECHO, DATA, INIT};
use npl_testkit::packet::{Packet, Transport};

use super::fragments::{fragments, pieces};
use super::scene::{becomes, client, from, node, node_ip, pod, pod_ip, sctp, strange_ip, to, with_mappings};
use super::sctp_flows::establish;
use crate::counters::{Change, first_request, reason, reply, request};
use crate::lab::{Lab, open as open_map};
use crate::sys::stay_on_this_processor;

/// What the fragments of a packet have in common.
const ID: u32 = 0x4e52;
/// `TC_ACT_REDIRECT`, to no device: it is taken from who has sent it, who takes it for sent.
const TAKEN: i32 = 7;
/// The kind of a chunk that acknowledges.
const SACK: u8 = 3;

/// The same with chunks ahead of its own, each of a kind and as many bytes of content.
fn behind(packet: Packet, chunks: &[(u8, usize)]) -> Packet {
    let ahead = chunks.iter().flat_map(|(kind, bytes)| {
        let Transport::Sctp(ahead) = sctp(client(), node(), *kind, &vec![0xa5; *bytes]).transport else {
            unreachable!("SCTP was asked for")
        };
        ahead.chunks
    });
    with_chunks(packet, |own| ahead.chain(own).collect())
}

fn with_chunks(mut packet: Packet, change: impl FnOnce(Vec<u8>) -> Vec<u8>) -> Packet {
    let Transport::Sctp(sctp) = &mut packet.transport else { unreachable!("SCTP was asked for") };
    sctp.chunks = change(std::mem::take(&mut sctp.chunks));
    packet
}

/// What leads to the packet of each direction, the packet, and what becomes of it.
fn both(lab: &mut Lab, content: &[u8], dress: impl Fn(Packet) -> Packet) -> [(&'static str, Packet, Packet); 2] {
    establish(lab);
    let question = dress(sctp(client(), node(), DATA, content));
    let answer = dress(sctp(pod(), client(), DATA, content));
    let (asked, answered) = (to(&question, pod()), from(&answer, node()));
    [(PROG_INGRESS, question, asked), (PROG_EGRESS, answer, answered)]
}

/// Has every place taken by others: no first fragment waits, and what is done is what the first one alone tells.
fn take_places(time: Duration) {
    let mut map: Array<MapData, SavedFrame> = open_map(MAP_SCTP_BUFFER);
    for place in 0..SCTP_FRAGMENTS {
        // All zero where nothing else is said.
        let taken =
            SavedFrame { hash: u64::MAX, time: u64::try_from(time.as_nanos()).unwrap(), ..map.get(&place, 0).unwrap() };
        map.set(place, taken, 0).unwrap();
    }
}

/// Has no place taken: which one a fragment gets is chosen at random.
fn free_places() {
    take_places(now().checked_sub(Duration::from_secs(2)).unwrap());
}

/// By a program's clock.
fn now() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap().into()
}

#[track_caller]
fn are_translated(lab: &mut Lab, size: usize, packets: [(&'static str, Packet, Packet); 2]) {
    take_places(now());
    for (program, packet, expected) in packets {
        let frames = pieces(&packet, ID, size);
        assert!(frames.len() > 1, "{size} bytes at once");
        for (frame, expected) in frames.iter().zip(pieces(&expected, ID, size)) {
            becomes(lab, program, frame, expected, counted(program, frame));
        }
    }
}

fn counted(program: &str, frame: &[u8]) -> Vec<Change> {
    let change = if program == PROG_INGRESS { request } else { reply };
    change("61000/sctp", frame.len())
}

/// Passed on, and counted where it is known: those that follow have no ports.
#[track_caller]
fn are_passed(lab: &mut Lab, size: usize, packets: [(&'static str, Packet, Packet); 2]) {
    take_places(now());
    for (program, packet, _) in packets {
        for (number, frame) in pieces(&packet, ID, size).iter().enumerate() {
            let changes = if number == 0 { reason(Reason::SctpFragment) } else { vec![] };
            becomes(lab, program, frame, frame.clone(), changes);
        }
    }
}

#[test]
fn chunk_that_is_cut_is_translated_whatever_its_length() {
    with_mappings(|lab| {
        for bytes in [60, 61, 62, 63, 200, 1400, 9000] {
            let packets = both(lab, &vec![7; bytes], |packet| packet);
            are_translated(lab, 64, packets);
        }
        let packets = both(lab, &[7; 1600], |packet| packet);
        are_translated(lab, 1480, packets);
    });
}

#[test]
fn chunks_ahead_of_the_one_that_is_cut_are_skipped() {
    with_mappings(|lab| {
        for ahead in [vec![(SACK, 12)], vec![(SACK, 13), (COOKIE_ECHO, 100)], vec![(SACK, 0); 5]] {
            let packets = both(lab, &[7; 1400], |packet| behind(packet, &ahead));
            are_translated(lab, 256, packets);
        }
    });
}

#[test]
fn whole_that_nothing_tells_the_length_of_is_passed_and_counted() {
    with_mappings(|lab| {
        // A chunk ends where the fragment does: 12 bytes of header, and 4 + 16 + 4 + 28.
        let packets = both(lab, &[7; 28], |packet| {
            let packet = behind(packet, &[(SACK, 16)]);
            with_chunks(packet, |chunks| [chunks.clone(), chunks].concat())
        });
        are_passed(lab, 64, packets);
        // The cut one is the seventh.
        let packets = both(lab, &[7; 400], |packet| behind(packet, &[(SACK, 0); 6]));
        are_passed(lab, 256, packets);
        // Too short to be one, of which the walk would never end.
        for length in [0_u8, 3] {
            let packets = both(lab, &[7; 400], |packet| {
                with_chunks(packet, |mut chunks| {
                    chunks[2..4].copy_from_slice(&[0, length]);
                    chunks
                })
            });
            are_passed(lab, 64, packets);
        }
    });
}

/// Packets that nothing but the length of the whole tells the checksum of: a router cuts them anywhere, or the seventh chunk is
/// cut.
fn bundles(lab: &mut Lab) -> [(&'static str, Packet, Packet); 2] {
    both(lab, &[7; 28], |packet| {
        let packet = behind(packet, &[(SACK, 0); 6]);
        with_chunks(packet, |chunks| chunks.repeat(8))
    })
}

/// Its copy waits; it is counted as it comes, and not as it comes again with the length of the whole.
#[test]
fn first_fragment_waits_for_the_last_one() {
    stay_on_this_processor();
    with_mappings(|lab| {
        for (id, size) in (ID..).zip([64, 72, 200]) {
            for (program, packet, expected) in bundles(lab) {
                let (frames, expected) = (pieces(&packet, id, size), pieces(&expected, id, size));
                free_places();
                let first = lab.run(program, &frames[0]);
                assert_eq!((first.action, first.changes), (TAKEN, counted(program, &frames[0])), "{program}");
                for (frame, expected) in frames.iter().zip(&expected).skip(1) {
                    becomes(lab, program, frame, expected.clone(), counted(program, frame));
                }
                becomes(lab, program, &frames[0], expected[0].clone(), vec![]);
            }
        }
    });
}

#[test]
fn first_fragment_that_comes_after_the_last_one_need_not_wait() {
    stay_on_this_processor();
    with_mappings(|lab| {
        for (id, size) in (ID + 0x10..).zip([64, 72, 200]) {
            for (program, packet, expected) in bundles(lab) {
                let (frames, expected) = (pieces(&packet, id, size), pieces(&expected, id, size));
                let last = frames.last().unwrap();
                free_places();
                becomes(lab, program, last, last.clone(), reason(Reason::EarlyFragment));
                for (frame, expected) in frames.iter().zip(&expected) {
                    becomes(lab, program, frame, expected.clone(), counted(program, frame));
                }
            }
        }
    });
}

/// A place is somebody's for a second.
#[test]
fn first_fragment_takes_the_place_of_one_that_waits_no_more() {
    stay_on_this_processor();
    with_mappings(|lab| {
        for (program, packet, expected) in both(lab, &[7; 200], |packet| packet) {
            let (frame, expected) =
                (fragments(&packet, ID + 0x20).remove(0), fragments(&expected, ID + 0x20).remove(0));
            take_places(now());
            becomes(lab, program, &frame, expected, counted(program, &frame));
            free_places();
            assert_eq!(lab.run(program, &frame).action, TAKEN);
        }
    });
}

/// Nor is any other's packet touched: a first fragment that nobody translates goes on at once.
#[test]
fn first_fragment_of_others_does_not_wait() {
    stay_on_this_processor();
    with_mappings(|lab| {
        let to_node = sctp(client(), (node_ip(), 2905).into(), DATA, &[7; 200]);
        let to_others = sctp(client(), (strange_ip(), 61_000).into(), DATA, &[7; 200]);
        let direct = sctp((pod_ip(), 2905).into(), client(), DATA, &[7; 200]);
        for (program, packet) in [(PROG_INGRESS, to_node), (PROG_INGRESS, to_others), (PROG_EGRESS, direct)] {
            for frame in fragments(&packet, ID + 0x30) {
                becomes(lab, program, &frame, frame.clone(), vec![]);
            }
        }
    });
}

#[test]
fn sctp_fragment_of_no_mapping_is_not_counted_as_one() {
    with_mappings(|lab| {
        let packet = sctp(client(), (node_ip(), 61_050).into(), DATA, &[7; 200]);
        let frame = &fragments(&packet, ID)[0];
        becomes(lab, PROG_INGRESS, frame, frame.clone(), reason(Reason::NoMapping));
    });
}

/// It opens a flow as a whole packet does, and what breaks off an association establishes none.
#[test]
fn cut_packet_says_what_a_whole_one_would() {
    with_mappings(|lab| {
        take_places(now());
        let init = sctp(client(), node(), INIT, &[0; 100]);
        for (number, (frame, expected)) in fragments(&init, ID).iter().zip(fragments(&to(&init, pod()), ID)).enumerate()
        {
            let change = if number == 0 { first_request } else { request };
            becomes(lab, PROG_INGRESS, frame, expected, change("61000/sctp", frame.len()));
        }
        let abort = sctp(pod(), client(), ABORT, &[0; 100]);
        for (frame, expected) in fragments(&abort, ID).iter().zip(fragments(&from(&abort, node()), ID)) {
            becomes(lab, PROG_EGRESS, frame, expected, reply("61000/sctp", frame.len()));
        }
        // Had that not been seen, this would establish the flow.
        let question = sctp(client(), node(), DATA, &[0; 100]);
        let (frame, expected) = (&fragments(&question, ID)[0], fragments(&to(&question, pod()), ID).remove(0));
        becomes(lab, PROG_INGRESS, frame, expected, first_request("61000/sctp", frame.len()));
    });
}
