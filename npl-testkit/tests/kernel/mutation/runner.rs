// SPDX-License-Identifier: Apache-2.0
//! Runs programs on mutated packets, and compares each result with the oracle.

use std::fmt::Write as _;
use std::net::SocketAddr;

use aya::maps::{MapData, PerCpuArray};
use npl_agent::core::model::Protocol;
use npl_common::names::{MAP_REASON, MAP_STATS};
use npl_common::reason::Reason;
use npl_common::stats::MappingStats;
use npl_testkit::packet::protocol_number::SCTP;
use npl_testkit::packet::sctp_chunks::DATA;
use npl_testkit::packet::tcp_flags::ACK;
use npl_testkit::packet::{Packet, SCTP_TAG};
use npl_testkit::random::Random;
use npl_testkit::test_run::{Ran, SkbContext, run_frame};

use super::check::check;
use super::corpus::{self, Corpus, WORDS};
use super::headers::{self, Parsed, Part};
use super::mutate::mutated;
use super::oracle::{Allowed, Change, History, Redirect, Run, Side, Target, allowed};
use super::scene::{Role, Scene, uplink};
use super::tally::{Kind, Tally};
use crate::counters::fields;
use crate::lab::{DROP, Lab, NEXT, SEED, open};
use crate::prog_run::redirect::REDIRECT;
use crate::prog_run::scene::{CLIENT_ISN, POD_ISN, node_ip, sctp, with_isns};

/// The verdicts of XDP programs.
const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;

/// The flag `BPF_F_TEST_SKB_CHECKSUM_COMPLETE`: the kernel verifies after the run that the checksum from the device
/// still matches the packet.
const CHECKSUM_COMPLETE: u32 = 1 << 2;
/// Length of the output buffer.
const OUTPUT: usize = 4096;

pub(super) struct Runner {
    scene: Scene,
    history: History,
    random: Random,
    ethernet: Corpus,
    bare: Corpus,
    addresses: Vec<Vec<u8>>,
    counters: Counters,
    last: Counts,
    output: Vec<u8>,
    uplink: u32,
    verifies_checksums: bool,
    pub(super) tally: Tally,
}

/// Everything that a run depends on, apart from the state of the maps.
struct Case {
    program: usize,
    frame: Vec<u8>,
    skb: SkbContext,
    /// `BPF_F_TEST_*` flags.
    flags: u32,
    /// Whether a request opens the flow of the packet, or of the packet that an ICMP error quotes, before the run.
    opens_flow: bool,
}

impl Runner {
    pub(super) fn new(lab: &mut Lab, seed: u64) -> Self {
        let scene = Scene::new(lab);
        let counters = Counters::open(&scene);
        Self {
            last: counters.read(),
            counters,
            scene,
            history: History::default(),
            random: Random::new(seed),
            ethernet: corpus::ethernet(),
            bare: corpus::bare(),
            addresses: corpus::addresses(),
            output: vec![0; OUTPUT],
            uplink: uplink(),
            verifies_checksums: aya::util::KernelVersion::current().unwrap() >= aya::util::KernelVersion::new(6, 17, 0),
            tally: Tally::default(),
        }
    }

    /// Runs a program on the next packet.
    pub(super) fn run_next(&mut self) -> Result<(), String> {
        let case = self.next_case();
        let name = self.scene.programs[case.program].name;
        match self.attempt(&case) {
            Ok(kind) => {
                self.tally.add(name, kind);
                Ok(())
            }
            Err(failure) => Err(self.describe(&case, &failure)),
        }
    }

    fn next_case(&mut self) -> Case {
        let random = &mut self.random;
        let number = random.below(self.scene.programs.len());
        let program = &self.scene.programs[number];
        let corpus = if program.l3 == 0 { &self.bare } else { &self.ethernet };
        let is_usual = !random.once_in(8);
        let bases = if program.takes_requests() == is_usual { &corpus.requests } else { &corpus.replies };
        let base = random.choose(bases);
        let frame = mutated(random, base, bases, program.l3, (&WORDS, &self.addresses));
        let mut skb = SkbContext::default();
        if random.once_in(8) {
            skb.mark = u32::try_from(random.next() >> 32).unwrap();
            skb.priority = u32::from(random.byte());
        }
        if random.once_in(32) {
            skb.ifindex = self.uplink;
        }
        if random.once_in(16) {
            skb.cb = [1, 2, 3, 4, *random.choose(&[5, mark()])];
        }
        let run = Run { program, frame: &frame, skb, is_known: false };
        // The stack reassembles fragments before it forwards a GSO packet.
        let is_whole = matches!(run.parsed(), Parsed::Located(chain) if chain.part == Part::Whole);
        if is_whole && random.once_in(8) {
            skb.gso_size = *random.choose(&[1, 100, 536, 1000, 1400, 1460, 1480, 9000, 65_483, 65_535]);
            skb.gso_segs = u32::from(random.byte());
        }
        // Without a link-layer header, the test run sums other bytes than a device.
        let is_verified = self.verifies_checksums && program.l3 > 0 && program.role != Role::Frames;
        // A re-injected fragment overwrites the link-layer header too, which the checksum from a device does not cover:
        // if the fragments of a datagram have different link-layer headers, the checksum becomes wrong.
        let is_verified = is_verified && is_whole && skb.gso_size == 0;
        let flags = if is_verified && random.once_in(4) { CHECKSUM_COMPLETE } else { 0 };
        Case { program: number, frame, skb, flags, opens_flow: random.once_in(2) }
    }

    /// Runs the program, and checks the result.
    fn attempt(&mut self, case: &Case) -> Result<Kind, String> {
        let is_known = case.opens_flow && self.open_flow(case);
        let program = &self.scene.programs[case.program];
        let mut skb = case.skb;
        let has_context = program.role != Role::Frames;
        let context = has_context.then_some(&mut skb);
        let ran = match run_frame(program.fd(), &case.frame, context, case.flags, &mut self.output) {
            Ok(ran) => ran,
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && case.frame.len() < 14 + 40 => {
                return Ok(Kind::Rejected);
            }
            Err(error) => return Err(format!("the run fails: {error}")),
        };
        let counts = self.counters.read();
        let change = counts.since(&self.last)?;
        self.last = counts;
        let run = Run { program, frame: &case.frame, skb: case.skb, is_known };
        let allowed = allowed(&self.scene, &self.history, &run);
        let after = self.output.get(..ran.length).ok_or("the frame has grown beyond the buffer")?;
        let judged = judge(&run, ran, after, &change, &allowed);
        let (kind, taken) = judged.map_err(|failure| {
            format!("{failure}\naction {}, {change}, allowed: {allowed:02x?}\nafter: {}", ran.action, hex(after))
        })?;
        check_mark(&run, kind, &skb)?;
        self.history.learn(&self.scene, &run, taken.as_ref(), kind == Kind::Refused);
        Ok(kind)
    }

    /// Sends a request of the flow that the packet, or the packet in an ICMP error's quote, belongs to. Returns whether
    /// the packet must be recognized as a packet of this flow.
    fn open_flow(&mut self, case: &Case) -> bool {
        let program = &self.scene.programs[case.program];
        let run = Run { program, frame: &case.frame, skb: case.skb, is_known: false };
        let Some((protocol, client, node_port)) = flow_of(&self.scene, &run) else { return false };
        let node = SocketAddr::new(node_ip(), node_port);
        let isns = (CLIENT_ISN, POD_ISN);
        let request = match protocol {
            Protocol::Tcp => with_isns(Packet::tcp(client, node, ACK, b"request"), isns),
            Protocol::Udp => Packet::udp(client, node, b"request"),
            Protocol::Sctp => sctp(client, node, DATA, &SCTP_TAG.to_be_bytes()),
        };
        let frame = request.to_this_machine().build();
        let ingress = &self.scene.programs[0];
        let mut skb = SkbContext::default();
        let ran = run_frame(ingress.fd(), &frame, Some(&mut skb), 0, &mut self.output).unwrap();
        self.last = self.counters.read();
        let is_translated = self.output[..ran.length] != frame;
        if is_translated {
            let run = Run { program: ingress, frame: &frame, skb: SkbContext::default(), is_known: false };
            let allowed = allowed(&self.scene, &self.history, &run);
            self.history.learn(&self.scene, &run, allowed.targets.first(), false);
        }
        is_translated && protocol == Protocol::Udp
    }

    /// Describes a failure with the shortest frame that still fails, in which as many bytes as possible are zero.
    fn describe(&mut self, case: &Case, failure: &str) -> String {
        let mut case = Case { frame: case.frame.clone(), ..*case };
        let mut failure = failure.to_owned();
        let original = hex(&case.frame);
        let mut fails = |runner: &mut Self, case: &mut Case, frame: Vec<u8>| {
            let former = std::mem::replace(&mut case.frame, frame);
            match runner.attempt(case) {
                Ok(_) => case.frame = former,
                Err(other) => failure = other,
            }
        };
        let length = (14..case.frame.len()).find(|length| {
            let frame = case.frame[..*length].to_vec();
            self.attempt(&Case { frame, ..case }).is_err()
        });
        if let Some(length) = length {
            let frame = case.frame[..length].to_vec();
            fails(self, &mut case, frame);
        }
        for at in 0..case.frame.len() {
            let mut frame = case.frame.clone();
            frame[at] = 0;
            fails(self, &mut case, frame);
        }
        let Case { program, skb, flags, opens_flow, .. } = &case;
        format!(
            "{failure}\nprogram {}, flags {flags}, flow opened before: {opens_flow}, cb {:x?}, device {}, GSO size {}\nframe: {}\noriginal frame: {original}",
            self.scene.programs[*program].name,
            skb.cb,
            skb.ifindex,
            skb.gso_size,
            hex(&case.frame)
        )
    }
}

/// Returns protocol, client and node port of the flow that a reply or an ICMP error belongs to, if a request of this
/// flow would be translated.
fn flow_of(scene: &Scene, run: &Run<'_>) -> Option<(Protocol, SocketAddr, u16)> {
    let Parsed::Located(chain) = run.parsed() else { return None };
    let is_reply = matches!(run.program.role, Role::RepliesAtUplink | Role::RepliesAtPod { .. });
    let is_error = chain.is_icmp() && headers::is_error(run.frame, &chain);
    let (packet, is_sent_by_pod) =
        if is_error { (headers::quote(run.frame, &chain)?, !is_reply) } else { (chain, is_reply) };
    if packet.part == Part::Later || !is_error && !is_reply {
        return None;
    }
    let (protocol, (source, destination)) = (packet.transport()?, packet.ports(run.frame)?);
    let (source, destination) =
        (SocketAddr::new(packet.source, source), SocketAddr::new(packet.destination, destination));
    let (server, client) = if is_sent_by_pod { (source, destination) } else { (destination, source) };
    let mapping = if is_reply {
        scene.mappings_of(protocol, server).first().copied()?
    } else {
        scene.mapping(protocol, server.port())?
    };
    let is_allowed = mapping.only.is_none_or(|only| only == client.ip());
    is_allowed.then_some((protocol, client, mapping.node_port))
}

/// The value by which a program marks a reply that it has translated.
fn mark() -> u32 {
    u32::try_from(SEED & 0xffff_ffff).unwrap()
}

/// Checks the mark in `skb->cb`: only replies that a program at a Pod's device has redirected get the mark.
fn check_mark(run: &Run<'_>, kind: Kind, after: &SkbContext) -> Result<(), String> {
    let is_marked = kind == Kind::Redirected && matches!(run.program.role, Role::RepliesAtPod { .. });
    let mut expected = run.skb.cb;
    if is_marked {
        expected[4] = mark();
    }
    let is_checked = kind != Kind::Held && run.program.role != Role::Frames;
    if is_checked && after.cb != expected {
        return Err(format!("skb->cb is {:08x?} instead of {expected:08x?}", after.cb));
    }
    Ok(())
}

/// Returns the kind of the result, and the translation that the program has chosen.
fn judge(
    run: &Run<'_>,
    ran: Ran,
    after: &[u8],
    change: &CountChange,
    allowed: &Allowed,
) -> Result<(Kind, Option<Target>), String> {
    if after.len() != run.frame.len() {
        return Err(format!("the length changes from {} to {}", run.frame.len(), after.len()));
    }
    let is_frame = run.program.role == Role::Frames;
    let (pass, drop) = if is_frame { (XDP_PASS, XDP_DROP) } else { (NEXT, DROP) };
    let is_unchanged = after == run.frame;
    if ran.action == drop {
        let is_right = allowed.refused && is_unchanged && change.mappings.is_empty();
        let is_counted = change.reasons == [(Reason::SourceRefused, 1)];
        return if is_right && is_counted {
            Ok((Kind::Refused, None))
        } else {
            Err("the packet is dropped".to_owned())
        };
    }
    if ran.action == pass && is_unchanged {
        return judge_passed(change, allowed).map(|kind| (kind, None));
    }
    let Parsed::Located(chain) = run.parsed() else { return Err("a foreign packet is changed".to_owned()) };
    if ran.action != pass && ran.action != REDIRECT {
        return Err("the verdict is unknown".to_owned());
    }
    let is_first_sctp = chain.part == Part::First && chain.protocol == SCTP;
    let is_held = ran.action == REDIRECT && is_first_sctp;
    let mut failure = "the packet is changed or redirected".to_owned();
    for target in &allowed.targets {
        let is_hop = if is_held {
            target.redirect != Redirect::Never && after[chain.ttl_at()] != run.frame[chain.ttl_at()]
        } else {
            ran.action == REDIRECT
        };
        let is_allowed = is_held || target.redirect != if is_hop { Redirect::Never } else { Redirect::Must };
        let checked = if is_allowed {
            check(run.frame, after, &chain, target, is_hop)
        } else {
            Err(format!("the packet is {}redirected", if is_hop { "" } else { "not " }))
        };
        let judged = checked.and_then(|()| judge_counts(run, change, allowed, target, is_first_sctp));
        match judged {
            Ok(()) => {
                let kind = match (is_held, is_hop) {
                    (true, _) => Kind::Held,
                    (false, true) => Kind::Redirected,
                    (false, false) => Kind::Translated,
                };
                return Ok((kind, Some(target.clone())));
            }
            Err(other) => failure = format!("to {}: {other}", target.to),
        }
    }
    Err(failure)
}

/// Whether a counter shows conflicts of one packet. A SYN or INIT can conflict with a half-open handshake and with an
/// established flow of the same flow tuple.
fn is_conflict(&(reason, count): &(Reason, u64)) -> bool {
    reason == Reason::TupleConflict && (1..=2).contains(&count)
}

/// Checks the counters of a packet that was passed unchanged.
fn judge_passed(change: &CountChange, allowed: &Allowed) -> Result<Kind, String> {
    let mut reasons = change.reasons.clone();
    if allowed.may_conflict {
        reasons.retain(|entry| !is_conflict(entry));
    }
    let counted = match reasons.as_slice() {
        [] => None,
        [(reason, 1)] => Some(*reason),
        _ => return Err("an unchanged packet is counted twice".to_owned()),
    };
    if !change.mappings.is_empty() || !allowed.passed.contains(&counted) {
        return Err(format!("the packet is passed unchanged, and counted as {counted:?}"));
    }
    Ok(counted.map_or(Kind::Untouched, Kind::Counted))
}

/// Checks the counters of a translated packet.
fn judge_counts(
    run: &Run<'_>,
    change: &CountChange,
    allowed: &Allowed,
    target: &Target,
    is_first_sctp: bool,
) -> Result<(), String> {
    let is_expected = |entry: &(Reason, u64)| is_conflict(entry) || *entry == (Reason::FlowTableFull, 1);
    if !allowed.may_conflict && !change.reasons.is_empty() || !change.reasons.iter().all(is_expected) {
        return Err("a translated packet is counted under a reason".to_owned());
    }
    let [(index, [request_packets, request_bytes, reply_packets, reply_bytes, new, established])] =
        change.mappings.as_slice()
    else {
        // A first SCTP fragment may look as if it were re-injected, and a re-injected packet was counted on arrival.
        let is_uncounted = change.mappings.is_empty() && (target.counted_by.is_empty() || is_first_sctp);
        return if is_uncounted { Ok(()) } else { Err("a translated packet is not counted once".to_owned()) };
    };
    let counted = (1, run.frame.len() as u64);
    let (expected, other) = if target.side == Side::Destination {
        ((*request_packets, *request_bytes), (*reply_packets, *reply_bytes))
    } else {
        ((*reply_packets, *reply_bytes), (*request_packets, *request_bytes))
    };
    let is_tracked = target.change == Change::Packet;
    let is_right = expected == counted && other == (0, 0) && new + established <= u64::from(is_tracked);
    let is_own = target.counted_by.is_empty() || target.counted_by.contains(index);
    if is_right && is_own { Ok(()) } else { Err("the counters of the mapping are wrong".to_owned()) }
}

/// The maps of counters.
struct Counters {
    reasons: PerCpuArray<MapData, u64>,
    mappings: PerCpuArray<MapData, MappingStats>,
    indexes: Vec<u32>,
}

/// The values of all counters.
struct Counts {
    reasons: Vec<u64>,
    mappings: Vec<(u32, [u64; 6])>,
}

/// The counters that have increased.
#[derive(Debug, PartialEq, Eq)]
struct CountChange {
    reasons: Vec<(Reason, u64)>,
    mappings: Vec<(u32, [u64; 6])>,
}

impl std::fmt::Display for CountChange {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "counted: {:?} {:?}", self.reasons, self.mappings)
    }
}

impl Counters {
    fn open(scene: &Scene) -> Self {
        let mut indexes: Vec<u32> = scene.mappings.iter().map(|mapping| mapping.counters).collect();
        indexes.sort_unstable();
        Self { reasons: open(MAP_REASON), mappings: open(MAP_STATS), indexes }
    }

    fn read(&self) -> Counts {
        let reason = |reason: &Reason| self.reasons.get(&(*reason as u32), 0).unwrap().iter().sum();
        let mapping = |index: &u32| {
            let mut sums = [0; 6];
            for stats in self.mappings.get(index, 0).unwrap().iter() {
                for (sum, (_, value)) in sums.iter_mut().zip(fields(stats)) {
                    *sum += value;
                }
            }
            (*index, sums)
        };
        Counts {
            reasons: Reason::ALL.iter().map(reason).collect(),
            mappings: self.indexes.iter().map(mapping).collect(),
        }
    }
}

impl Counts {
    fn since(&self, before: &Self) -> Result<CountChange, String> {
        let minus = |now: u64, before: u64| now.checked_sub(before).ok_or("a counter has decreased");
        let mut change = CountChange { reasons: Vec::new(), mappings: Vec::new() };
        for (reason, (now, before)) in Reason::ALL.iter().zip(self.reasons.iter().zip(&before.reasons)) {
            if now != before {
                change.reasons.push((*reason, minus(*now, *before)?));
            }
        }
        for ((index, now), (_, before)) in self.mappings.iter().zip(&before.mappings) {
            if now != before {
                let mut by = [0; 6];
                for (by, (now, before)) in by.iter_mut().zip(now.iter().zip(before)) {
                    *by = minus(*now, *before)?;
                }
                change.mappings.push((*index, by));
            }
        }
        Ok(change)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}
