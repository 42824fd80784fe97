// SPDX-License-Identifier: Apache-2.0
//! Tests fragmented SCTP packets. The CRC depends on the length of the whole packet, which only the last fragment
//! shows. If the first fragment cannot be buffered until the last one arrives, the program derives the length from the
//! chunk that continues in the next fragment.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use aya::maps::{Array, MapData};
use npl_common::fragment_buffer::{SCTP_FRAGMENTS, SavedFrame, WAIT_NS};
use npl_common::names::{MAP_SCTP_BUFFER, PROG_EGRESS, PROG_INGRESS};
use npl_common::reason::Reason;
use npl_testkit::packet::sctp_chunks::{ABORT, COOKIE_ECHO, DATA, INIT};
use npl_testkit::packet::{Packet, Transport};
use npl_testkit::poll;

use super::fragments::{fragments, pieces};
use super::scene::{
    Sctp, becomes, client, client_ip, flow, from, node, node_ip, pod, pod_ip, sctp, to, unused_ip, with_mappings,
};
use super::sctp_flows::establish;
use crate::counters::{Change, first_request, reason, reply, request};
use crate::lab::{Lab, NEXT, Outcome, open as open_map};
use crate::sys::stay_on_this_processor;

/// The identification of a packet's fragments.
const ID: u32 = 0x4e52;
/// The verdict `TC_ACT_REDIRECT` to a device that does not exist, which the program returns after it has buffered a
/// fragment. The kernel then counts the fragment as sent.
const BUFFERED: i32 = 7;
/// Chunk type of a selective acknowledgment.
const SACK: u8 = 3;

/// Returns the packet with further chunks before its own chunks. `chunks` has the type and the content length of each
/// further chunk.
fn with_chunks_before(packet: Packet, chunks: &[(u8, usize)]) -> Packet {
    let ahead = chunks.iter().flat_map(|(kind, bytes)| {
        let Transport::Sctp(ahead) = sctp(client(), node(), *kind, &vec![0xa5; *bytes]).transport else {
            unreachable!("the packet is SCTP")
        };
        ahead.chunks
    });
    with_chunks(packet, |own| ahead.chain(own).collect())
}

fn with_chunks(mut packet: Packet, change: impl FnOnce(Vec<u8>) -> Vec<u8>) -> Packet {
    let Transport::Sctp(sctp) = &mut packet.transport else { unreachable!("the packet is SCTP") };
    sctp.chunks = change(std::mem::take(&mut sctp.chunks));
    packet
}

/// Returns for each direction the program, the packet and the translated packet.
fn both(lab: &mut Lab, content: &[u8], build: impl Fn(Packet) -> Packet) -> [(&'static str, Packet, Packet); 2] {
    if lab.flow(flow(Sctp)).is_none() {
        establish(lab);
    }
    let question = build(sctp(client(), node(), DATA, content));
    let answer = build(sctp(pod(), client(), DATA, content));
    let (translated_question, translated_answer) = (to(&question, pod()), from(&answer, node()));
    [(PROG_INGRESS, question, translated_question), (PROG_EGRESS, answer, translated_answer)]
}

/// The hash of a slot that [`occupy_slots`] has written; no fragment has this hash.
const OCCUPIED: u64 = u64::MAX;

/// Occupies every slot of the SCTP reassembly buffer, so that no first fragment is buffered: the program must derive
/// the packet's length from the first fragment's chunks.
fn occupy_slots(time: Duration) {
    let mut map: Array<MapData, SavedFrame> = open_map(MAP_SCTP_BUFFER);
    for slot in 0..SCTP_FRAGMENTS {
        // All fields other than the hash and the time stay unchanged.
        let taken =
            SavedFrame { hash: OCCUPIED, time: u64::try_from(time.as_nanos()).unwrap(), ..map.get(&slot, 0).unwrap() };
        map.set(slot, taken, 0).unwrap();
    }
}

/// Frees every slot of the SCTP reassembly buffer. The hash of a fragment determines its slot, so the test frees all
/// slots instead of computing this slot.
fn free_slots() {
    occupy_slots(now().checked_sub(2 * WAIT).unwrap());
}

/// The time for which a buffered fragment is valid, and an occupied slot stays occupied.
const WAIT: Duration = Duration::from_nanos(WAIT_NS);

/// The number of attempts until [`within_wait`] starts again with the number 0.
const ATTEMPTS: u32 = 64;

/// The difference between the identifications of two successive attempts.
const ATTEMPT: u32 = 0x100;

/// Time limit of repeated trials.
const LIMIT: Duration = Duration::from_mins(1);

/// Runs `trial` until a trial is so short that no buffered fragment and no occupied slot can have expired. The result
/// of a longer trial shows nothing about the program, because the machine was too slow. `trial` gets the number of the
/// attempt, and must set up the same initial state in each attempt.
#[track_caller]
fn within_wait<T>(mut trial: impl FnMut(u32) -> T) -> T {
    let mut attempts = (0..ATTEMPTS).cycle();
    let valid = || {
        let start = Instant::now();
        let result = trial(attempts.next()?);
        (start.elapsed() < WAIT).then_some(result)
    };
    poll::until("a trial that is shorter than the time for which a fragment waits", LIMIT, valid).unwrap().0
}

/// Runs a program on a frame while no slot of the SCTP reassembly buffer is free.
#[track_caller]
fn run_without_slot(lab: &mut Lab, program: &'static str, frame: &[u8]) -> Outcome {
    within_wait(|_attempt| {
        occupy_slots(now());
        lab.run(program, frame)
    })
}

/// Asserts the result of [`run_without_slot`].
#[track_caller]
fn becomes_without_slot(lab: &mut Lab, program: &'static str, frame: &[u8], bytes: Vec<u8>, changes: Vec<Change>) {
    assert_eq!(run_without_slot(lab, program, frame), Outcome { action: NEXT, bytes, changes }, "{program}");
}

/// Returns the time of `CLOCK_MONOTONIC`, which the kernel programs read with `bpf_ktime_get_ns`.
fn now() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap().into()
}

#[track_caller]
fn are_translated(lab: &mut Lab, size: usize, packets: [(&'static str, Packet, Packet); 2]) {
    for (program, packet, expected) in packets {
        let (frames, expected) = (pieces(&packet, ID, size), pieces(&expected, ID, size));
        assert!(frames.len() > 1, "{size} bytes at once");
        for (frame, expected) in frames.iter().zip(expected) {
            becomes_without_slot(lab, program, frame, expected, counted(program, frame));
        }
    }
}

fn counted(program: &str, frame: &[u8]) -> Vec<Change> {
    let change = if program == PROG_INGRESS { request } else { reply };
    change("61000/sctp", frame.len())
}

/// Asserts that all fragments are passed unchanged and that only the first one is counted, because later fragments have
/// no ports.
#[track_caller]
fn are_passed(lab: &mut Lab, size: usize, packets: [(&'static str, Packet, Packet); 2]) {
    for (program, packet, _) in packets {
        for (number, frame) in pieces(&packet, ID, size).iter().enumerate() {
            let changes = if number == 0 { reason(Reason::SctpFragment) } else { vec![] };
            becomes_without_slot(lab, program, frame, frame.clone(), changes);
        }
    }
}

#[test]
fn packet_with_a_cut_chunk_of_any_length_is_translated() {
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
fn chunks_before_the_cut_one_are_skipped() {
    with_mappings(|lab| {
        for ahead in [vec![(SACK, 12)], vec![(SACK, 13), (COOKIE_ECHO, 100)], vec![(SACK, 0); 5]] {
            let packets = both(lab, &[7; 1400], |packet| with_chunks_before(packet, &ahead));
            are_translated(lab, 256, packets);
        }
    });
}

#[test]
fn sctp_fragment_of_unknown_length_is_passed_and_counted() {
    with_mappings(|lab| {
        // No chunk continues in the second fragment, so the program cannot derive the packet's length: the first
        // fragment contains exactly 12 bytes of common header, and chunks of 4 + 16 and 4 + 28 bytes.
        let packets = both(lab, &[7; 28], |packet| {
            let packet = with_chunks_before(packet, &[(SACK, 16)]);
            with_chunks(packet, |chunks| [chunks.clone(), chunks].concat())
        });
        are_passed(lab, 64, packets);
        // The fragment ends within the seventh chunk, but NPL parses fewer chunks.
        let packets = both(lab, &[7; 400], |packet| with_chunks_before(packet, &[(SACK, 0); 6]));
        are_passed(lab, 256, packets);
        // The chunk length is below the minimum. Without a check of the minimum, the parser would never reach the next
        // chunk.
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

/// Returns packets whose length cannot be estimated from the first fragment, because this fragment ends between two
/// chunks or within the seventh chunk.
fn bundles(lab: &mut Lab) -> [(&'static str, Packet, Packet); 2] {
    both(lab, &[7; 28], |packet| {
        let packet = with_chunks_before(packet, &[(SACK, 0); 6]);
        with_chunks(packet, |chunks| chunks.repeat(8))
    })
}

/// The first fragment is buffered and counted when it arrives, and not again when it is re-injected with the known
/// length.
#[test]
fn first_sctp_fragment_is_buffered_until_the_last_one() {
    stay_on_this_processor();
    with_mappings(|lab| {
        for (id, size) in (ID..).zip([64, 72, 200]) {
            for (program, packet, expected) in bundles(lab) {
                let (frames, expected, outcomes) = within_wait(|attempt| {
                    // Each attempt has its own identification, because the program records the fragments of a packet.
                    let id = id + attempt * ATTEMPT;
                    let frames = pieces(&packet, id, size);
                    free_slots();
                    let outcomes: Vec<Outcome> =
                        frames.iter().chain([&frames[0]]).map(|frame| lab.run(program, frame)).collect();
                    (frames, pieces(&expected, id, size), outcomes)
                });
                let (first, others) = outcomes.split_first().unwrap();
                assert_eq!((first.action, &first.changes), (BUFFERED, &counted(program, &frames[0])), "{program}");
                let (again, others) = others.split_last().unwrap();
                for (number, outcome) in others.iter().enumerate() {
                    let (frame, bytes) = (&frames[number + 1], expected[number + 1].clone());
                    let expected = Outcome { action: NEXT, bytes, changes: counted(program, frame) };
                    assert_eq!(outcome, &expected, "{program}");
                }
                assert_eq!(again, &Outcome { action: NEXT, bytes: expected[0].clone(), changes: vec![] }, "{program}");
            }
        }
    });
}

#[test]
fn first_sctp_fragment_after_the_last_one_is_not_buffered() {
    stay_on_this_processor();
    with_mappings(|lab| {
        for (id, size) in (ID + 0x10..).zip([64, 72, 200]) {
            for (program, packet, expected) in bundles(lab) {
                let (frames, expected, early, outcomes) = within_wait(|attempt| {
                    let id = id + attempt * ATTEMPT;
                    let frames = pieces(&packet, id, size);
                    free_slots();
                    let early = lab.run(program, frames.last().unwrap());
                    let outcomes: Vec<Outcome> = frames.iter().map(|frame| lab.run(program, frame)).collect();
                    (frames, pieces(&expected, id, size), early, outcomes)
                });
                let (bytes, changes) = (frames.last().unwrap().clone(), reason(Reason::EarlyFragment));
                assert_eq!(early, Outcome { action: NEXT, bytes, changes }, "{program}");
                for ((frame, bytes), outcome) in frames.iter().zip(expected).zip(outcomes) {
                    let expected = Outcome { action: NEXT, bytes, changes: counted(program, frame) };
                    assert_eq!(outcome, expected, "{program}");
                }
            }
        }
    });
}

/// A buffered first fragment occupies its slot for one second. Then, another first fragment may take the slot.
#[test]
fn first_sctp_fragment_takes_an_expired_slot() {
    stay_on_this_processor();
    with_mappings(|lab| {
        for (program, packet, expected) in both(lab, &[7; 200], |packet| packet) {
            let (frame, expected) =
                (fragments(&packet, ID + 0x20).remove(0), fragments(&expected, ID + 0x20).remove(0));
            becomes_without_slot(lab, program, &frame, expected, counted(program, &frame));
            free_slots();
            assert_eq!(lab.run(program, &frame).action, BUFFERED);
        }
    });
}

/// A first fragment that matches no mapping is passed to the host immediately, and is not buffered.
#[test]
fn first_sctp_fragment_of_unmapped_traffic_is_not_buffered() {
    stay_on_this_processor();
    with_mappings(|lab| {
        let to_node = sctp(client(), (node_ip(), 2905).into(), DATA, &[7; 200]);
        let to_others = sctp(client(), (unused_ip(), 61_000).into(), DATA, &[7; 200]);
        let direct = sctp((pod_ip(), 2905).into(), client(), DATA, &[7; 200]);
        for (program, packet) in [(PROG_INGRESS, to_node), (PROG_INGRESS, to_others), (PROG_EGRESS, direct)] {
            for frame in fragments(&packet, ID + 0x30) {
                becomes(lab, program, &frame, frame.clone(), vec![]);
            }
        }
    });
}

#[test]
fn no_mapping_is_counted_for_an_unmapped_sctp_fragment() {
    with_mappings(|lab| {
        let packet = sctp(client(), (node_ip(), 61_050).into(), DATA, &[7; 200]);
        let frame = &fragments(&packet, ID)[0];
        becomes(lab, PROG_INGRESS, frame, frame.clone(), reason(Reason::NoMapping));
    });
}

/// A frame for a program, and the expected output and counter changes.
type Step = (&'static str, Vec<u8>, Vec<u8>, Vec<Change>);

/// Returns the steps of an association that the Pod refuses: all fragments of an INIT and of the Pod's ABORT, and the
/// first fragment of later data.
fn refused_association(client: SocketAddr) -> Vec<Step> {
    let init = sctp(client, node(), INIT, &[0; 100]);
    let abort = sctp(pod(), client, ABORT, &[0; 100]);
    let data = sctp(client, node(), DATA, &[0; 100]);
    let cut = |packet: &Packet, translated: &Packet| fragments(packet, ID).into_iter().zip(fragments(translated, ID));
    let mut steps = Vec::new();
    for (number, (frame, expected)) in cut(&init, &to(&init, pod())).enumerate() {
        let change = if number == 0 { first_request } else { request };
        let changes = change("61000/sctp", frame.len());
        steps.push((PROG_INGRESS, frame, expected, changes));
    }
    for (frame, expected) in cut(&abort, &from(&abort, node())) {
        let changes = reply("61000/sctp", frame.len());
        steps.push((PROG_EGRESS, frame, expected, changes));
    }
    // If the ABORT had been missed, this packet would establish the flow.
    let (frame, expected) = cut(&data, &to(&data, pod())).next().unwrap();
    let changes = first_request("61000/sctp", frame.len());
    steps.push((PROG_INGRESS, frame, expected, changes));
    steps
}

/// A fragmented INIT opens a flow as a whole INIT does, and a fragmented ABORT prevents the flow from being
/// established.
#[test]
fn cut_init_and_abort_are_tracked_as_whole_ones() {
    with_mappings(|lab| {
        let (steps, outcomes) = within_wait(|attempt| {
            // Each attempt has its own client port, because the previous attempt has changed the state of its flow.
            let port = client().port() + u16::try_from(attempt).unwrap();
            let steps = refused_association((client_ip(), port).into());
            occupy_slots(now());
            let outcomes: Vec<Outcome> = steps.iter().map(|(program, frame, ..)| lab.run(program, frame)).collect();
            (steps, outcomes)
        });
        for ((program, _, bytes, changes), outcome) in steps.into_iter().zip(outcomes) {
            assert_eq!(outcome, Outcome { action: NEXT, bytes, changes }, "{program}");
        }
    });
}
