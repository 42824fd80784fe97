// SPDX-License-Identifier: Apache-2.0
//! Tests the XDP program, which translates or drops fast-path requests as TC ingress does, and passes all other frames
//! unchanged to TC.

use std::sync::Mutex;

use npl_agent::core::model::Family;
use npl_common::names::{PROG_EGRESS, PROG_INGRESS};
use npl_common::reason::Reason;
use npl_testkit::packet::tcp_flags::{ACK, FIN, PSH, RST, SYN};
use npl_testkit::packet::{Checksum, Packet, Transport, sctp_chunks};

use super::errors::{about_reply, too_large};
use super::extensions::{DESTINATION_OPTIONS, SIX, extended};
use super::fragments::fragments;
use super::scene::{
    CLIENT_PORT, GENERATION, NODE_PORT, SECOND_NODE_PORT, Sctp, Tcp, Udp, bare, client, client_ip, flow, length, node,
    node_ip, pod, pod_ip, random_packets, router_ip, sctp, second_node, tcp, to, udp, unused_ip, with_mappings,
    with_mappings_of,
};
use crate::counters::{Change, and, establishing_request, first_request, reason};
use crate::lab::{DROP, FlowEntry, Lab, NEXT, Outcome, TEST_DEVICE};

/// The verdict `XDP_DROP`.
const XDP_DROP: i32 = 1;
/// The verdict `XDP_PASS`: the kernel stack receives the frame, and the TC program runs next.
const XDP_PASS: i32 = 2;

/// Asserts that the frame is passed as `expected` and that exactly these counters increased.
#[track_caller]
fn becomes(lab: &mut Lab, frame: &Packet, expected: &Packet, changes: Vec<Change>) {
    let expected = Outcome { action: XDP_PASS, bytes: expected.build(), changes };
    assert_eq!(lab.run_xdp(&frame.build()), expected);
}

#[test]
fn xdp_translates_plain_requests() {
    with_mappings(|lab| {
        let request = tcp(client(), node(), SYN, b"");
        becomes(lab, &request, &to(&request, pod()), first_request("61000/tcp", bare()));
        let request = udp(client(), node(), b"hello");
        becomes(lab, &request, &to(&request, pod()), first_request("61000/udp", length(&request)));
    });
}

#[test]
fn flow_that_xdp_opens_is_established_after_the_pods_reply() {
    with_mappings(|lab| {
        lab.run_xdp(&tcp(client(), node(), SYN, b"").build());
        lab.egress(&tcp(pod(), client(), SYN | ACK, b""));
        let request = tcp(client(), node(), ACK, b"");
        becomes(lab, &request, &to(&request, pod()), establishing_request("61000/tcp", bare()));
        assert_eq!(lab.flow(flow(Tcp)).unwrap().node_addr, node_ip());
    });
}

#[test]
fn datagram_without_checksum_keeps_none() {
    with_mappings(|lab| {
        let mut request = udp(client(), node(), b"no checksum");
        *request.transport.checksum_mut().unwrap() = Checksum::Zero;
        becomes(lab, &request, &to(&request, pod()), first_request("61000/udp", length(&request)));
    });
}

#[test]
fn xdp_drops_refused_sources_and_leaves_no_flow() {
    with_mappings(|lab| {
        for protocol in [Tcp, Udp] {
            lab.add_restricted(protocol, NODE_PORT, pod(), GENERATION, &router_ip().to_string());
        }
        for request in [tcp(client(), node(), SYN, b""), udp(client(), node(), b"hello")] {
            let bytes = request.build();
            let expected = Outcome { action: XDP_DROP, bytes: bytes.clone(), changes: reason(Reason::SourceRefused) };
            assert_eq!(lab.run_xdp(&bytes), expected);
        }
        assert_eq!((lab.slot(flow(Tcp)), lab.slot(flow(Udp))), (None, None));
        let allowed = tcp((router_ip(), CLIENT_PORT).into(), node(), SYN, b"");
        becomes(lab, &allowed, &to(&allowed, pod()), first_request("61000/tcp", bare()));
    });
}

/// Returns frames that the XDP program passes to TC unchanged.
fn left_to_tc() -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    for vlans in [vec![100], vec![100, 200], vec![0]] {
        let mut request = tcp(client(), node(), SYN, b"");
        request.ethernet.as_mut().unwrap().vlans = vlans;
        frames.push(request.build());
    }
    for port in [22, 60_999, 61_101, SECOND_NODE_PORT] {
        frames.push(tcp(client(), (node_ip(), port).into(), SYN, b"").build());
    }
    for ip in [unused_ip(), pod_ip()] {
        frames.push(udp(client(), (ip, NODE_PORT).into(), b"hello").build());
    }
    frames.push(sctp(client(), node(), sctp_chunks::INIT, &[0; 16]).build());
    frames.push(about_reply(too_large(), &tcp(pod(), client(), ACK, b"a reply"), 8).0.build());
    frames.extend(fragments(&udp(client(), node(), &[7; 200]), 1));
    let (mut options, mut arp) = (udp(client(), node(), b"options"), udp(client(), node(), b"hello").build());
    match options.ipv4_mut() {
        Some(header) => {
            header.options = vec![1; 7];
            frames.push(options.build());
        }
        None => frames.push(extended(&options, &[(DESTINATION_OPTIONS, SIX)])),
    }
    arp[12..14].copy_from_slice(&[0x08, 0x06]);
    frames.push(arp);
    let segment = tcp(client(), node(), SYN, b"").build();
    frames.extend((bare() - 20..bare()).map(|length| segment[..length].to_vec()));
    frames.push(Packet::new(client_ip(), node_ip(), Transport::Raw { protocol: 47, bytes: vec![0; 40] }).build());
    frames
}

#[test]
fn xdp_passes_all_other_frames_unchanged_and_uncounted() {
    with_mappings(|lab| {
        for frame in left_to_tc() {
            let expected = Outcome { action: XDP_PASS, bytes: frame.clone(), changes: vec![] };
            assert_eq!(lab.run_xdp(&frame), expected);
        }
        assert_eq!((lab.slot(flow(Tcp)), lab.slot(flow(Udp)), lab.slot(flow(Sctp))), (None, None, None));
    });
}

/// The programs that a received frame traverses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    TcAlone,
    XdpAndTc,
}

/// A packet of a connection, by its direction.
enum Step {
    Arrives(Vec<u8>),
    Leaves(Vec<u8>),
}

/// Runs the path's programs on a received frame, and returns the outcome.
fn arrive(lab: &mut Lab, path: Path, frame: &[u8]) -> Outcome {
    if path == Path::TcAlone {
        return lab.run(PROG_INGRESS, frame);
    }
    let by_xdp = lab.run_xdp(frame);
    if by_xdp.action == XDP_DROP {
        return Outcome { action: DROP, ..by_xdp };
    }
    let by_tc = lab.run(PROG_INGRESS, &by_xdp.bytes);
    if by_xdp.bytes != frame {
        let expected = Outcome { action: NEXT, bytes: by_xdp.bytes, changes: vec![] };
        assert_eq!(by_tc, expected, "TC must not change frames that XDP has translated");
    }
    Outcome { changes: and(by_xdp.changes, by_tc.changes), ..by_tc }
}

/// Returns the outcome of each step, and the final entries of the flows in the flow table (without times) and in the
/// half-open cache.
fn outcomes(family: Family, path: Path, steps: impl Fn() -> Vec<Step> + Send + Sync) -> (Vec<Outcome>, Vec<String>) {
    let all = Mutex::default();
    with_mappings_of(family, |lab| {
        lab.add_restricted(Udp, SECOND_NODE_PORT, pod(), GENERATION, &router_ip().to_string());
        lab.datapath
            .write_pre_tc_devices(&if path == Path::XdpAndTc { [TEST_DEVICE].into() } else { [].into() })
            .unwrap();
        let mut run = |step| match step {
            Step::Arrives(frame) => arrive(lab, path, &frame),
            Step::Leaves(frame) => lab.run(PROG_EGRESS, &frame),
        };
        let outcomes: Vec<Outcome> = steps().into_iter().map(&mut run).collect();
        let facts = |FlowEntry { node_addr, state }: FlowEntry| {
            (
                node_addr,
                state.generation,
                state.pod_acknowledgement,
                state.node_port,
                state.client_tcp_flags,
                state.pod_tcp_flags,
            )
        };
        let flows = [Tcp, Udp].map(|protocol| (lab.flow(flow(protocol)).map(facts), lab.slot(flow(protocol))));
        *all.lock().unwrap() = (outcomes, vec![format!("{flows:?}")]);
    });
    all.into_inner().unwrap()
}

#[track_caller]
fn same_with_and_without_xdp(steps: impl Fn() -> Vec<Step> + Send + Sync) {
    for family in Family::ALL {
        let [alone, both] = [Path::TcAlone, Path::XdpAndTc].map(|path| outcomes(family, path, &steps));
        assert!(!alone.0.is_empty());
        for (number, (alone, both)) in alone.0.iter().zip(&both.0).enumerate() {
            assert_eq!(both, alone, "step {number} in {family}");
        }
        assert_eq!(both.1, alone.1, "the remaining flows in {family}");
    }
}

#[test]
fn random_requests_are_translated_alike_with_and_without_xdp() {
    same_with_and_without_xdp(|| {
        let second_address = second_node();
        let refused = (node_ip(), SECOND_NODE_PORT).into();
        let packets = random_packets(client(), node(), 200)
            .chain(random_packets(client(), second_address, 20))
            .chain(random_packets(client(), refused, 20));
        let variants = packets.enumerate().map(|(number, mut packet)| {
            match number % 5 {
                0 => *packet.transport.checksum_mut().unwrap() = Checksum::Wrong(0x1234),
                1 => *packet.transport.checksum_mut().unwrap() = Checksum::Zero,
                _ => {}
            }
            let mut frame = packet.build();
            // Ethernet pads short frames. The program must keep the padding, which is included in the byte counter.
            frame.resize(frame.len().max(60), 0x5a);
            Step::Arrives(frame)
        });
        variants.collect()
    });
}

#[test]
fn connection_is_handled_alike_with_and_without_xdp() {
    same_with_and_without_xdp(|| {
        let request = |flags, payload: &[u8]| Step::Arrives(tcp(client(), node(), flags, payload).build());
        let reply = |flags, payload: &[u8]| Step::Leaves(tcp(pod(), client(), flags, payload).build());
        let by_second = Step::Arrives(tcp(client(), second_node(), SYN, b"").build());
        vec![
            request(SYN, b""),
            request(SYN, b""),
            reply(SYN | ACK, b""),
            request(ACK, b""),
            request(PSH | ACK, b"question"),
            reply(PSH | ACK, b"answer"),
            request(FIN | ACK, b""),
            reply(FIN | ACK, b""),
            request(SYN, b""),
            by_second,
            reply(SYN | ACK, b""),
            request(RST, b""),
            Step::Arrives(udp(client(), node(), b"question").build()),
            Step::Leaves(udp(pod(), client(), b"answer").build()),
            Step::Arrives(udp(client(), node(), b"thanks").build()),
        ]
    });
}

#[test]
fn frames_for_the_slow_path_are_handled_alike_with_and_without_xdp() {
    same_with_and_without_xdp(|| left_to_tc().into_iter().map(Step::Arrives).collect());
}
