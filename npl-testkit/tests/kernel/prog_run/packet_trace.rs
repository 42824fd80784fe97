// SPDX-License-Identifier: Apache-2.0
//! Tests packet tracing: which records the programs write, and in which cases they write none.

use std::path::Path;

use aya::maps::{Array, MapData, RingBuf};
use npl_agent::core::model::Family;
use npl_agent::core::packet_trace::{Hook, PacketSelection, ProgramVerdict, Step, TracedEndpoint};
use npl_agent::datapath::{LeftOut, PacketTrace, Pins};
use npl_common::names::{MAP_TRACE_FILTER, MAP_TRACE_RING, PROG_EGRESS, PROG_INGRESS};
use npl_common::packet_trace::{SNAP_LENGTH, TraceFilter};
use npl_common::reason::Reason;
use npl_testkit::packet::tcp_flags::{ACK, PSH, SYN};
use npl_testkit::packet::{Packet, sctp_chunks};

use super::errors::{about_reply, too_large};
use super::extensions::{DESTINATION_OPTIONS, SIX, extended};
use super::fragments::fragments;
use super::scene::{
    GENERATION, NODE_PORT, Tcp, client, client_ip, node, node_ip, pod, pod_ip, router, sctp, tcp, to, udp, unused_ip,
    with_mappings, with_mappings_of,
};
use crate::bpffs_pool::BPFFS;
use crate::lab::{Lab, TEST_DEVICE, open};

const ETHERNET: usize = 14;

fn all_of(selection: &PacketSelection) -> PacketTrace {
    PacketTrace::arm(&Pins::new(Path::new(BPFFS)), selection.filter(u64::MAX).unwrap()).unwrap()
}

fn of_client() -> PacketSelection {
    PacketSelection { client: Some(client_ip().to_string().parse().unwrap()), ..PacketSelection::default() }
}

fn steps(trace: &mut PacketTrace) -> Vec<Step> {
    let mut steps = Vec::new();
    while let Some(record) = trace.next_record() {
        steps.push(Step::of(&record).unwrap());
    }
    steps
}

/// Returns the only record that was written since the last call. Then extends the time for which tracing stays on,
/// because a slow machine may send the test's next packet only after that time.
#[track_caller]
fn only_step(trace: &mut PacketTrace) -> Step {
    let steps = steps(trace);
    trace.extend().unwrap();
    let [step] = steps.as_slice() else { panic!("{} records: {steps:#?}", steps.len()) };
    step.clone()
}

/// Returns the part of a frame that a record contains.
fn captured(frame: &[u8]) -> &[u8] {
    let packet = &frame[ETHERNET..];
    &packet[..packet.len().min(SNAP_LENGTH as usize)]
}

#[test]
fn record_has_the_packet_before_and_after_the_program_and_the_verdict() {
    with_mappings(|lab| {
        let mut trace = all_of(&of_client());
        let request = tcp(client(), node(), SYN, b"");
        let outcome = lab.ingress(&request);
        let step = only_step(&mut trace);
        assert_eq!((step.hook, step.is_reply, step.is_slow_path), (Hook::Ingress, false, false));
        assert_eq!((step.verdict, step.reason, step.ifindex), (ProgramVerdict::Translated, None, TEST_DEVICE));
        assert_eq!(step.before, captured(&request.build()));
        assert_eq!(step.after, captured(&to(&request, pod()).build()));
        assert_eq!(step.length as usize, outcome.bytes.len() - ETHERNET);

        let reply = tcp(pod(), client(), SYN | ACK, &[7; 1000]);
        let outcome = lab.egress(&reply);
        let step = only_step(&mut trace);
        assert_eq!((step.hook, step.is_reply, step.verdict), (Hook::Egress, true, ProgramVerdict::Translated));
        assert_eq!(step.before, captured(&reply.build()));
        assert_eq!(step.after, captured(&outcome.bytes));
        assert_eq!(step.before.len(), SNAP_LENGTH as usize);
        assert_eq!(step.length as usize, outcome.bytes.len() - ETHERNET);
    });
}

#[test]
fn record_of_a_packet_that_is_not_translated_has_the_reason() {
    with_mappings(|lab| {
        let mut trace = all_of(&of_client());
        let mut verdict_of = |lab: &mut Lab, packet: &Packet| {
            lab.ingress(packet);
            let step = only_step(&mut trace);
            assert_eq!(step.before, step.after, "{packet:?}");
            (step.verdict, step.reason)
        };
        let unmapped = tcp(client(), (node_ip(), 61_099).into(), SYN, b"");
        assert_eq!(verdict_of(lab, &unmapped), (ProgramVerdict::Passed, Some(Reason::NoMapping)));
        let direct = tcp(client(), pod(), SYN, b"");
        assert_eq!(verdict_of(lab, &direct), (ProgramVerdict::Unrelated, None));
        lab.add_restricted(Tcp, NODE_PORT, pod(), GENERATION, "");
        let refused = tcp(client(), node(), SYN, b"");
        assert_eq!(verdict_of(lab, &refused), (ProgramVerdict::Dropped, Some(Reason::SourceRefused)));
    });
}

#[test]
fn slow_path_is_recorded_once_for_each_packet() {
    with_mappings(|lab| {
        let mut trace = all_of(&of_client());
        lab.ingress(&tcp(client(), node(), SYN, b""));
        lab.egress(&tcp(pod(), client(), SYN | ACK, b""));
        steps(&mut trace);
        let init = sctp(client(), node(), sctp_chunks::INIT, &[0; 16]);
        lab.ingress(&init);
        let step = only_step(&mut trace);
        assert_eq!((step.is_slow_path, step.verdict), (true, ProgramVerdict::Translated));
        assert_eq!(step.after, captured(&to(&init, pod()).build()));

        let large = udp(client(), node(), &[5; 2000]);
        for (number, frame) in fragments(&large, 77).iter().enumerate() {
            lab.run(PROG_INGRESS, frame);
            let step = only_step(&mut trace);
            assert_eq!((step.is_slow_path, step.verdict), (true, ProgramVerdict::Translated), "fragment {number}");
            assert_eq!(step.before, captured(frame));
            let (_, after) = step.packets().unwrap();
            assert_eq!(after.unwrap().destination, pod_ip(), "fragment {number}");
        }

        let (error, _) = about_reply(too_large(), &tcp(pod(), client(), ACK, &[7; 100]), 64);
        lab.ingress(&error);
        let step = only_step(&mut trace);
        assert_eq!((step.is_slow_path, step.is_reply), (true, false));
        assert_eq!(step.verdict, ProgramVerdict::Translated);
        let (before, after) = step.packets().unwrap();
        assert_eq!(before.quoted.unwrap().source, node_ip());
        assert_eq!(after.unwrap().quoted.unwrap().source, pod_ip());
    });
}

#[test]
fn packet_with_extension_headers_is_recorded_with_its_ports() {
    with_mappings_of(Family::V6, |lab| {
        let selection =
            PacketSelection { endpoints: vec![TracedEndpoint::NodePort(NODE_PORT)], ..PacketSelection::default() };
        let mut trace = all_of(&selection);
        let request = tcp(client(), node(), SYN, b"");
        lab.run(PROG_INGRESS, &extended(&request, &[(DESTINATION_OPTIONS, SIX)]));
        let step = only_step(&mut trace);
        let (before, after) = step.packets().unwrap();
        assert_eq!(before.ports, Some([client().port(), NODE_PORT]));
        assert_eq!(after.unwrap().ends()[1], (pod_ip(), Some(pod().port())));
    });
}

#[test]
fn xdp_records_the_frames_that_it_translates_or_drops() {
    with_mappings(|lab| {
        let mut trace = all_of(&of_client());
        let request = tcp(client(), node(), PSH | ACK, &[3; 200]);
        lab.run_xdp(&tcp(client(), node(), SYN, b"").build());
        steps(&mut trace);
        lab.run_xdp(&request.build());
        let step = only_step(&mut trace);
        assert_eq!((step.hook, step.verdict), (Hook::Xdp, ProgramVerdict::Translated));
        assert_eq!(step.before, captured(&request.build()));
        assert_eq!(step.after, captured(&to(&request, pod()).build()));
        lab.run_xdp(&tcp(client(), pod(), SYN, b"").build());
        assert_eq!(steps(&mut trace), [], "only TC may record a frame that XDP passes to TC");
        lab.add_restricted(Tcp, NODE_PORT, pod(), GENERATION, "");
        lab.run_xdp(&request.build());
        let step = only_step(&mut trace);
        assert_eq!((step.verdict, step.reason), (ProgramVerdict::Dropped, Some(Reason::SourceRefused)));
    });
}

#[test]
fn packets_that_the_filter_does_not_select_are_not_recorded() {
    with_mappings(|lab| {
        let others =
            PacketSelection { client: Some(unused_ip().to_string().parse().unwrap()), ..PacketSelection::default() };
        let mut trace = all_of(&others);
        lab.ingress(&tcp(client(), node(), SYN, b""));
        assert_eq!(steps(&mut trace), []);
        drop(trace);
        let of_pod =
            PacketSelection { endpoints: vec![TracedEndpoint::Address(pod_ip())], ..PacketSelection::default() };
        let mut trace = all_of(&of_pod);
        lab.ingress(&tcp(client(), node(), SYN, b""));
        assert_eq!(
            only_step(&mut trace).verdict,
            ProgramVerdict::Translated,
            "the filter must select the packet, because the translated packet has the Pod's address"
        );
        lab.ingress(&tcp(router(), (node_ip(), 61_099).into(), SYN, b""));
        assert_eq!(steps(&mut trace), []);
    });
}

#[test]
fn filter_whose_time_is_over_is_turned_off_by_the_next_packet() {
    with_mappings(|lab| {
        let mut trace = all_of(&of_client());
        let mut filter: Array<MapData, TraceFilter> = open(MAP_TRACE_FILTER);
        let armed = filter.get(&0, 0).unwrap();
        assert_ne!(armed.until, 0);
        filter.set(0, TraceFilter { until: 1, ..armed }, 0).unwrap();
        lab.ingress(&tcp(client(), node(), SYN, b""));
        assert_eq!(filter.get(&0, 0).unwrap().until, 0);
        assert_eq!(steps(&mut trace), []);
        trace.extend().unwrap();
        lab.ingress(&tcp(client(), node(), SYN, b""));
        only_step(&mut trace);
        drop(trace);
        assert_eq!(filter.get(&0, 0).unwrap(), TraceFilter::OFF);
        let mut ring: RingBuf<MapData> = open(MAP_TRACE_RING);
        lab.run(PROG_EGRESS, &tcp(pod(), client(), SYN | ACK, b"").build());
        assert!(ring.next().is_none(), "no packet may be recorded after `trace` has ended");
    });
}

#[test]
fn records_beyond_the_rate_or_the_ring_buffer_are_counted() {
    with_mappings(|lab| {
        let pins = Pins::new(Path::new(BPFFS));
        let mut trace = PacketTrace::arm(&pins, of_client().filter(2).unwrap()).unwrap();
        let packet = tcp(client(), (node_ip(), 61_099).into(), SYN, b"");
        for _ in 0..200 {
            lab.ingress(&packet);
            trace.extend().unwrap();
        }
        let recorded = steps(&mut trace).len();
        let left_out = trace.left_out().unwrap();
        assert!(recorded >= 2, "{recorded}");
        assert_eq!((left_out.rate_limited, left_out.lost), (200 - recorded as u64, 0));
        drop(trace);

        let mut trace = all_of(&of_client());
        for _ in 0..2000 {
            lab.ingress(&packet);
            trace.extend().unwrap();
        }
        let recorded = steps(&mut trace).len() as u64;
        assert!(recorded > 100, "{recorded}");
        assert_eq!(trace.left_out().unwrap(), LeftOut { rate_limited: 0, lost: 2000 - recorded });
    });
}

#[test]
fn only_one_command_traces_at_a_time() {
    with_mappings(|_lab| {
        let trace = all_of(&of_client());
        let pins = Pins::new(Path::new(BPFFS));
        let error = PacketTrace::arm(&pins, of_client().filter(1).unwrap()).unwrap_err().to_string();
        assert!(error.contains("another `npl-agent trace` runs"), "{error}");
        drop(trace);
        all_of(&of_client());
    });
}
