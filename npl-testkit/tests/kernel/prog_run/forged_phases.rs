// SPDX-License-Identifier: Apache-2.0
//! Tests forged TCP segments with each of [`ALL_FLAGS`], to every address by which clients reach the Pod port, in every
//! phase of a connection, and with the programs of each forwarding mode and of XDP.

use std::net::SocketAddr;

use npl_common::conntrack::{CLOSING_WINDOW, Numbers, TCP_NS};
use npl_common::names::{
    PROG_EGRESS, PROG_EGRESS_OFFLOAD, PROG_INGRESS, PROG_INGRESS_OFFLOAD, PROG_INGRESS_REDIRECT, PROG_TO_PODS,
};
use npl_testkit::packet::tcp_flags::{ACK, FIN, PSH, RST, SYN};
use npl_testkit::packet::{Packet, Transport};

use super::forged::{ALL_FLAGS, forged_isns, timeout};
use super::redirect::{NEXT_HOP, REDIRECT, after_one_hop, set_next_hop};
use super::scene::{
    CLIENT_ISN, DIRECT_ISNS, NODE_PORT, POD_ISN, Tcp, client, flow, from, node, pod, pod_ip, second_node, tcp, to,
    with_isns, with_mappings,
};
use super::sweep::expire_flows;
use crate::lab::Lab;

/// Position of the TCP checksum, and of the byte with the flag NS, in the TCP header.
const CHECKSUM: usize = 16;
const NS: usize = 12;
/// Initial sequence numbers of the client and the Pod in the connections of the tests.
const ISNS: (u32, u32) = (CLIENT_ISN, POD_ISN);
/// Initial sequence numbers of later connections with the same flow tuple.
const LATER_ISNS: [(u32, u32); 3] =
    [(CLIENT_ISN + (1 << 28), POD_ISN + (1 << 28)), (CLIENT_ISN + (1 << 29), POD_ISN + (1 << 29)), ISNS];

/// The program that translates requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Via {
    Stack,
    Redirect,
    Offload,
    Xdp,
}

impl Via {
    const ALL: [Self; 4] = [Self::Stack, Self::Redirect, Self::Offload, Self::Xdp];

    fn run(self, lab: &mut Lab, frame: &[u8]) -> (i32, Vec<u8>) {
        match self {
            Self::Stack => lab.run_uncounted(PROG_INGRESS, frame),
            Self::Redirect => lab.run_uncounted(PROG_INGRESS_REDIRECT, frame),
            Self::Offload => lab.run_uncounted(PROG_INGRESS_OFFLOAD, frame),
            Self::Xdp => lab.run_xdp_uncounted(frame),
        }
    }

    const fn egress(self) -> &'static str {
        if matches!(self, Self::Offload) { PROG_EGRESS_OFFLOAD } else { PROG_EGRESS }
    }
}

/// Runs `test` with each program that translates requests, in each family.
fn with_programs(test: impl Fn(&mut Lab, Via) + Send + Sync) {
    for via in Via::ALL {
        with_mappings(|lab| {
            set_next_hop(pod_ip(), NEXT_HOP);
            test(lab, via);
        });
    }
}

/// A segment with the client's address, and the two frames of which one must reach the Pod: the frame that passes
/// through the stack, or the redirected frame.
struct Sent {
    frame: Vec<u8>,
    passed: Vec<u8>,
    redirected: Vec<u8>,
}

impl Sent {
    fn new(packet: &Packet, has_ns: bool) -> Self {
        let at_pod = to(packet, pod());
        let build = |packet: &Packet| if has_ns { with_ns(packet) } else { packet.build() };
        Self { frame: build(packet), passed: build(&at_pod), redirected: build(&after_one_hop(&at_pod)) }
    }

    /// Runs the program on the segment, and asserts that the segment reaches the Pod.
    #[track_caller]
    fn arrives(&self, lab: &mut Lab, via: Via) {
        let (action, bytes) = via.run(lab, &self.frame);
        let expected = if action == REDIRECT { &self.redirected } else { &self.passed };
        assert_eq!(&bytes, expected, "by {via:?}");
        if via == Via::Offload && action != REDIRECT {
            lab.run_uncounted(PROG_TO_PODS, &bytes);
        }
    }
}

/// Builds a segment with the flag NS, whose bit is outside of the byte of the other flags.
fn with_ns(packet: &Packet) -> Vec<u8> {
    let mut frame = packet.build();
    let Transport::Tcp(segment) = &packet.transport else { unreachable!("the packet is a segment") };
    let header = frame.len() - segment.payload.len() - 20;
    frame[header + NS] |= 1;
    let check = &mut frame[header + CHECKSUM..header + CHECKSUM + 2];
    let (sum, carry) = (!u16::from_be_bytes([check[0], check[1]])).overflowing_add(1 << 8);
    check.copy_from_slice(&(!(sum + u16::from(carry))).to_be_bytes());
    frame
}

/// Returns a segment with the client's address and these numbers. The acknowledgement number is set whether or not the
/// flags contain ACK.
fn segment(destination: SocketAddr, flags: u8, payload: &[u8], sequence: u32, acknowledgement: u32) -> Packet {
    let mut packet = tcp(client(), destination, flags, payload);
    let Transport::Tcp(segment) = &mut packet.transport else { unreachable!("the packet is a segment") };
    (segment.sequence, segment.acknowledgement) = (sequence, acknowledgement);
    packet
}

/// Forged segments: each of [`ALL_FLAGS`], to each destination, with each pair of numbers.
struct Attack {
    via: Via,
    segments: Vec<Sent>,
}

impl Attack {
    fn new(via: Via, destinations: &[SocketAddr], numbers: impl IntoIterator<Item = (u32, u32)>) -> Self {
        let mut segments = Vec::new();
        for (sequence, acknowledgement) in numbers {
            for destination in destinations {
                for flags in ALL_FLAGS {
                    // The payload depends on the number of flags, so that each flag is tested with and without a
                    // payload.
                    let payload: &[u8] = if flags.count_ones() % 2 == 1 { b"" } else { b"7 bytes" };
                    let forged = segment(*destination, flags, payload, sequence, acknowledgement);
                    segments.push(Sent::new(&forged, segments.len().is_multiple_of(5)));
                }
            }
        }
        Self { via, segments }
    }

    /// Returns an attack on a connection, to every address, with numbers that are far from the connection's.
    fn far(via: Via, isns: (u32, u32)) -> Self {
        Self::new(via, &[node(), second_node(), pod()], forged_isns(isns))
    }

    /// Returns an attack on a handshake: like [`Self::far`], and also with numbers that differ by one from the required
    /// numbers. The required sequence number is the initial one for a SYN, and the next one for a RST.
    fn on_handshake(via: Via, isns: (u32, u32)) -> Self {
        let (client_isn, pod_isn) = isns;
        let near = [(client_isn.wrapping_sub(1), pod_isn), (client_isn + 2, pod_isn + 2)];
        Self::new(via, &[node(), second_node(), pod()], forged_isns(isns).into_iter().chain(near))
    }

    #[track_caller]
    fn run(&self, lab: &mut Lab) {
        self.run_and(lab, |_| {});
    }

    /// Runs `after_each` after each forged segment.
    #[track_caller]
    fn run_and(&self, lab: &mut Lab, mut after_each: impl FnMut(&mut Lab)) {
        for segment in &self.segments {
            segment.arrives(lab, self.via);
            after_each(lab);
        }
    }
}

/// A live TCP connection of the client.
#[derive(Clone, Copy, Debug)]
struct Live {
    via: Via,
    /// The address and port to which the client sends.
    server: SocketAddr,
    isns: (u32, u32),
}

impl Live {
    fn new(via: Via, server: SocketAddr, isns: (u32, u32)) -> Self {
        Self { via, server, isns }
    }

    /// Sends the client's segment, and asserts that it reaches the Pod.
    #[track_caller]
    fn asks(self, lab: &mut Lab, flags: u8) {
        let request = with_isns(tcp(client(), self.server, flags, b""), self.isns);
        Sent::new(&request, false).arrives(lab, self.via);
    }

    /// Sends the Pod's segment, and asserts that it leaves from the address and port to which the client sends.
    #[track_caller]
    fn is_answered(self, lab: &mut Lab, flags: u8) {
        let answer = with_isns(tcp(pod(), client(), flags, b""), (self.isns.1, self.isns.0));
        let (_, bytes) = lab.run_uncounted(self.via.egress(), &answer.build());
        assert!(bytes == from(&answer, self.server).build(), "{self:?}: the Pod's {flags:#x} has the wrong source");
    }

    /// Opens the connection without forged segments.
    #[track_caller]
    fn opens_quietly(self, lab: &mut Lab) {
        self.asks(lab, SYN);
        self.is_answered(lab, SYN | ACK);
        self.asks(lab, ACK);
        self.is_answered(lab, ACK);
    }

    /// Opens the connection and exchanges data, with attacks before and between the steps.
    #[track_caller]
    fn opens(self, lab: &mut Lab) {
        let attack = Attack::on_handshake(self.via, self.isns);
        attack.run(lab);
        self.asks(lab, SYN);
        attack.run(lab);
        self.is_answered(lab, SYN | ACK);
        attack.run(lab);
        self.is_answered(lab, SYN | ACK);
        self.asks(lab, SYN);
        attack.run(lab);
        self.asks(lab, ACK);
        let attack = Attack::far(self.via, self.isns);
        attack.run(lab);
        self.is_answered(lab, ACK);
        self.talks(lab, &attack);
    }

    /// Exchanges data, with attacks between the segments, and asserts that the forged segments do not change the
    /// connection's state.
    #[track_caller]
    fn talks(self, lab: &mut Lab, attack: &Attack) {
        for _exchange in 0..2 {
            self.asks(lab, ACK | PSH);
            attack.run(lab);
            self.is_answered(lab, ACK | PSH);
            attack.run(lab);
            self.is_answered(lab, ACK);
            self.is_undisturbed(lab);
        }
    }

    #[track_caller]
    fn is_undisturbed(self, lab: &Lab) {
        let entry = lab.flow(flow(Tcp));
        if self.server == pod() {
            assert_eq!(entry, None, "{self:?}");
            return;
        }
        let entry = entry.unwrap_or_else(|| panic!("{self:?} has no entry"));
        assert_eq!((entry.node_addr, entry.state.node_port), (node().ip(), NODE_PORT), "{self:?}");
        let flags = entry.state.client_tcp_flags | entry.state.pod_tcp_flags;
        assert_eq!(flags & (FIN | RST), 0, "{self:?}: a forged FIN or RST, or an earlier one, counts");
        assert_eq!(timeout(&entry.state), TCP_NS, "{self:?}");
    }
}

#[test]
fn forged_segments_of_all_flags_disturb_no_mapped_connection() {
    with_programs(|lab, via| Live::new(via, node(), ISNS).opens(lab));
}

#[test]
fn forged_segments_of_all_flags_disturb_no_direct_connection() {
    with_programs(|lab, via| {
        let live = Live::new(via, pod(), DIRECT_ISNS);
        let attack = Attack::far(via, DIRECT_ISNS);
        attack.run(lab);
        live.asks(lab, SYN);
        for flags in [SYN | ACK, ACK, ACK | PSH, FIN | ACK, RST | ACK, RST] {
            attack.run_and(lab, |lab| live.is_answered(lab, flags));
        }
        live.is_undisturbed(lab);
    });
}

/// Three ways to end a connection, each with the segments that end the connection and the segments that follow. The
/// first value of a segment is whether the client sends it, and the second value is its flags.
const ENDS: [&[(bool, u8)]; 3] = [
    &[(true, FIN | ACK), (false, ACK), (false, FIN | ACK), (true, ACK), (false, FIN | ACK), (true, ACK)],
    &[(true, RST | ACK), (false, ACK), (true, RST)],
    &[(false, RST | ACK), (true, ACK), (false, RST)],
];

/// Sends the segments that end the connection, and runs the attack after each segment.
#[track_caller]
fn ends(live: Live, lab: &mut Lab, end: &[(bool, u8)]) {
    let attack = Attack::far(live.via, live.isns);
    for (is_client, flags) in end {
        if *is_client {
            live.asks(lab, *flags);
        } else {
            live.is_answered(lab, *flags);
        }
        attack.run(lab);
    }
}

/// Connections with one flow tuple follow each other. Forged segments arrive during the end of each connection, after
/// the end, and on the open connection.
#[test]
fn forged_segments_of_all_flags_do_not_disturb_the_end_of_a_connection() {
    with_programs(|lab, via| {
        for (isns, end) in LATER_ISNS.into_iter().zip(ENDS) {
            let live = Live::new(via, node(), isns);
            live.opens_quietly(lab);
            live.talks(lab, &Attack::far(via, isns));
            ends(live, lab, end);
        }
    });
}

/// Does the same as the previous test, with forged segments also during the handshakes.
#[test]
fn forged_segments_of_all_flags_do_not_disturb_the_handshake_after_the_end_of_a_connection() {
    with_programs(|lab, via| {
        for (isns, end) in LATER_ISNS.into_iter().zip(ENDS) {
            let live = Live::new(via, node(), isns);
            live.opens(lab);
            ends(live, lab, end);
        }
    });
}

/// Runs `test` for forged segments with each of [`ALL_FLAGS`], and asserts after each run that the connection has an
/// entry with the idle timeout of an open connection.
#[track_caller]
fn no_flags_shorten(lab: &mut Lab, via: Via, test: impl Fn(&mut Lab, u8)) {
    let mut harmful = Vec::new();
    for flags in ALL_FLAGS {
        test(lab, flags);
        let entry = lab.flow(flow(Tcp));
        if entry.is_some() {
            lab.evict(flow(Tcp));
        }
        if entry.is_none_or(|entry| timeout(&entry.state) != TCP_NS) {
            harmful.push(flags);
        }
        lab.set_slot(flow(Tcp), 0);
    }
    assert!(
        harmful.is_empty(),
        "{via:?}: a forged segment with these flags removes the entry or shortens its timeout: {harmful:x?}"
    );
}

/// A connection has ended by a FIN of each side. In the handshake of the next connection with the same flow tuple, one
/// forged segment arrives after the Pod's SYN-ACK. The next connection must not have the flags of the previous one.
#[test]
fn forged_segment_before_the_last_ack_of_a_handshake_does_not_shorten_the_next_connection() {
    with_programs(|lab, via| {
        no_flags_shorten(lab, via, |lab, flags| {
            let [first, next] = [LATER_ISNS[0], LATER_ISNS[1]].map(|isns| Live::new(via, node(), isns));
            first.opens_quietly(lab);
            first.asks(lab, FIN | ACK);
            first.is_answered(lab, FIN | ACK);
            next.asks(lab, SYN);
            next.is_answered(lab, SYN | ACK);
            let (sequence, acknowledgement) = forged_isns(next.isns)[0];
            Sent::new(&segment(node(), flags, b"", sequence, acknowledgement), false).arrives(lab, via);
            next.asks(lab, ACK);
            next.is_answered(lab, ACK);
        });
    });
}

/// The flow's entry has timed out, and the Pod sends first. A forged segment on the client's own path does not shorten
/// the idle timeout of the connection that continues.
#[test]
fn forged_segment_on_the_clients_own_path_does_not_shorten_an_idle_connection() {
    with_programs(|lab, via| {
        no_flags_shorten(lab, via, |lab, flags| {
            let live = Live::new(via, node(), ISNS);
            live.opens_quietly(lab);
            expire_flows(lab);
            live.is_answered(lab, ACK | PSH);
            let (sequence, acknowledgement) = forged_isns(ISNS)[0];
            Sent::new(&segment(node(), flags, b"", sequence, acknowledgement), false).arrives(lab, via);
            for _exchange in 0..2 {
                live.asks(lab, ACK | PSH);
                live.is_answered(lab, ACK);
            }
        });
    });
}

/// The sequence number of a forged FIN or RST is just outside of the window in which the FIN or RST of the client
/// counts.
#[test]
fn forged_fin_or_reset_at_the_edge_of_the_window_does_not_count() {
    with_programs(|lab, via| {
        let live = Live::new(via, node(), ISNS);
        live.opens_quietly(lab);
        let next = CLIENT_ISN + 1;
        let outside = [next + CLOSING_WINDOW, next - CLOSING_WINDOW - 1].map(|sequence| (sequence, POD_ISN + 1));
        let addresses = [node(), second_node(), pod()];
        live.talks(lab, &Attack::new(via, &addresses, outside));
        // Within the window, the FIN of the client counts.
        for sequence in [next + CLOSING_WINDOW - 1, next - CLOSING_WINDOW] {
            live.is_undisturbed(lab);
            Sent::new(&segment(node(), FIN | ACK, b"", sequence, POD_ISN + 1), false).arrives(lab, via);
            assert_ne!(timeout(&lab.flow(flow(Tcp)).unwrap().state), TCP_NS);
            lab.evict(flow(Tcp));
            lab.set_slot(flow(Tcp), 0);
            live.asks(lab, ACK);
            live.is_answered(lab, ACK);
            live.asks(lab, ACK);
            live.is_answered(lab, ACK);
        }
    });
}

/// Of the two numbers of a forged segment (sequence and acknowledgement), one is near that of a direct connection. The
/// other is just outside of the window in which NPL takes the Pod's reply for an answer to this segment.
#[test]
fn forged_segments_at_the_edge_of_the_window_do_not_divert_a_direct_connection() {
    with_programs(|lab, via| {
        let live = Live::new(via, pod(), DIRECT_ISNS);
        live.asks(lab, SYN);
        live.is_answered(lab, SYN | ACK);
        live.asks(lab, ACK);
        let (sequence, acknowledgement) = (DIRECT_ISNS.0 + 1, DIRECT_ISNS.1 + 1);
        let outside = |number: u32| [number + Numbers::WINDOW + 1, number - Numbers::WINDOW];
        // A RST of the Pod without ACK matches only the exact number, so the near number must not be the exact one.
        let numbers = outside(sequence).map(|it| (it, acknowledgement + 1));
        let numbers = numbers.into_iter().chain(outside(acknowledgement).map(|it| (sequence + 1, it)));
        Attack::new(via, &[node(), second_node(), pod()], numbers).run_and(lab, |lab| {
            for flags in [ACK, FIN | ACK, RST] {
                live.is_answered(lab, flags);
            }
        });
        live.is_undisturbed(lab);
        // Within the window, NPL takes the reply for an answer to the forged segment.
        Sent::new(&segment(node(), ACK, b"", sequence + Numbers::WINDOW, acknowledgement + 1), false).arrives(lab, via);
        Live { server: node(), ..live }.is_answered(lab, ACK);
    });
}

/// The flow's entry has timed out, and the Pod sends first. Forged segments through the other node address and to the
/// Pod change neither the NAT address of the Pod's segments nor the state of the connection that continues.
#[test]
fn forged_segments_on_other_paths_do_not_disturb_an_idle_connection() {
    with_programs(|lab, via| {
        let live = Live::new(via, node(), ISNS);
        live.opens(lab);
        expire_flows(lab);
        let attack = Attack::new(via, &[second_node(), pod()], forged_isns(ISNS));
        attack.run_and(lab, |lab| live.is_answered(lab, ACK | PSH));
        live.asks(lab, ACK);
        live.is_answered(lab, ACK);
        live.talks(lab, &attack);
    });
}

/// The flow's entry has timed out, and the Pod sends first. Forged segments on any path, including the client's own,
/// must not change the NAT address of the Pod's segments.
#[test]
fn forged_segments_do_not_divert_the_replies_of_an_idle_connection() {
    with_programs(|lab, via| {
        let live = Live::new(via, node(), ISNS);
        live.opens(lab);
        expire_flows(lab);
        let attack = Attack::far(via, ISNS);
        attack.run_and(lab, |lab| live.is_answered(lab, ACK | PSH));
    });
}

/// A generator of random numbers with a fixed seed (xorshift), so that every run uses the same numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a forged segment with random numbers.
    fn segment(&mut self, destination: SocketAddr, flags: u8) -> Sent {
        let numbers = Numbers(self.next());
        Sent::new(&segment(destination, flags, b"", numbers.sequence(), numbers.acknowledgement()), false)
    }
}

/// The number of forged segments with random numbers, and the largest number of them that may have an effect: one in a
/// thousand. By design, about one in 4096 has an effect.
const TRIALS: usize = 16_384;
const MAX_HITS: usize = TRIALS / 1000;

#[test]
fn random_fin_or_reset_counts_less_than_once_in_a_thousand() {
    with_mappings(|lab| {
        let live = Live::new(Via::Stack, node(), ISNS);
        let mut random = Random(0x4e50_4c01);
        let (mut hits, mut is_open) = (0, false);
        for flags in [FIN, RST, FIN | ACK, RST | ACK].into_iter().cycle().take(TRIALS) {
            if !is_open {
                live.opens_quietly(lab);
            }
            random.segment(node(), flags).arrives(lab, Via::Stack);
            is_open = timeout(&lab.flow(flow(Tcp)).unwrap().state) == TCP_NS;
            hits += usize::from(!is_open);
        }
        assert!((1..=MAX_HITS).contains(&hits), "{hits} of {TRIALS} forged segments count");
    });
}

#[test]
fn random_segment_diverts_a_direct_connection_less_than_once_in_a_thousand() {
    with_mappings(|lab| {
        let mut random = Random(0x4e50_4c02);
        let answer = with_isns(tcp(pod(), client(), ACK, b""), (DIRECT_ISNS.1, DIRECT_ISNS.0)).build();
        let mut hits = 0;
        for destination in [node(), second_node()].into_iter().cycle().take(TRIALS) {
            random.segment(destination, ACK).arrives(lab, Via::Stack);
            if lab.run_uncounted(PROG_EGRESS, &answer).1 != answer {
                hits += 1;
                lab.forget_mid_stream(flow(Tcp));
            }
        }
        assert!((1..=MAX_HITS).contains(&hits), "{hits} of {TRIALS} forged segments divert a reply");
    });
}

/// In a handshake, the numbers must match exactly.
#[test]
fn random_segments_do_not_disturb_a_handshake() {
    with_mappings(|lab| {
        let mut random = Random(0x4e50_4c03);
        let live = Live::new(Via::Stack, node(), ISNS);
        let attack = |lab: &mut Lab, random: &mut Random| {
            let destinations = [node(), second_node()].into_iter().cycle();
            for (flags, destination) in ALL_FLAGS.into_iter().cycle().zip(destinations).take(TRIALS / 16) {
                random.segment(destination, flags).arrives(lab, Via::Stack);
            }
        };
        for (is_client, flags) in [(true, SYN), (false, SYN | ACK), (true, ACK), (false, ACK)] {
            attack(lab, &mut random);
            if is_client { live.asks(lab, flags) } else { live.is_answered(lab, flags) }
        }
        live.is_undisturbed(lab);
    });
}
