// SPDX-License-Identifier: GPL-2.0-only
//! Logs verdicts in the trace build (feature `trace`). The programs log every verdict except `UNRELATED`, which is the
//! verdict on nearly every packet of the Node.
//!
//! The program and its logging are separate functions that are not inlined, so that each function frees its stack space
//! before the other function runs.

use core::hint::black_box;

use aya_ebpf::{
    bindings::{__sk_buff, xdp_md},
    programs::{TcContext, XdpContext},
};
use aya_log_ebpf::{log, macro_support::Level};
use npl_common::{mapping::protocol, reason::Reason};

use crate::{
    act::rewrite::SOURCE,
    base::{
        cell::field,
        context::{self, ETHERNET, Frame, skb},
        trace::{self, Note},
        verdict::{Verdict, kind},
    },
    net::{
        V4, V6,
        family::HeaderLayout as _,
        headers::{Ports, has_ports},
        packet::Packet,
    },
    path::hook::Hook,
    state::maps::Family,
};

/// Decides the verdict on a fast-path packet, rewrites the packet if it is translated, and logs the verdict.
#[inline(always)]
pub fn packet<F: Family, H: Hook, const L2: usize>(
    ctx: &TcContext,
    judge: impl FnOnce(&TcContext) -> Verdict,
) -> Verdict {
    note_packet::<F, L2>(skb(ctx));
    let verdict = judge_packet(skb(ctx), judge);
    trace::note_verdict(verdict);
    write_log(H::SIDE == SOURCE);
    verdict
}

/// Returns the TC action for the verdict of a step. [`Verdict::into_action`] stores the verdict for the log.
#[inline(always)]
pub fn decide(verdict: Verdict) -> i32 {
    verdict.into_action()
}

/// Runs a step of the slow path, and logs the verdict if the step reaches a verdict. Each step logs before the next
/// step runs, because the next step may re-inject a fragment, and the programs that process this fragment would
/// overwrite this processor's [`Note`].
#[inline(always)]
pub fn step<F: Family, H: Hook, const L2: usize>(skb: *mut __sk_buff, step: impl FnOnce(*mut __sk_buff) -> i32) -> i32 {
    note_packet::<F, L2>(skb);
    let action = step(skb);
    write_log(H::SIDE == SOURCE);
    action
}

/// Decides the verdict on a frame, rewrites the frame if it is translated, and logs the verdict. The TC program logs a
/// frame that is passed unchanged.
#[inline(always)]
pub fn frame<F: Family, const MULTI_BUFFER: bool>(
    frame: &Frame<MULTI_BUFFER>,
    judge: impl FnOnce(&Frame<MULTI_BUFFER>) -> Verdict,
) -> Verdict {
    note_frame::<F, MULTI_BUFFER>(frame.0.ctx);
    let verdict = judge_frame(frame.0.ctx, judge);
    if verdict.is_translated() || verdict.is_drop() {
        trace::note_verdict(verdict);
        write_log(false);
    }
    verdict
}

#[inline(never)]
fn judge_packet(skb: *mut __sk_buff, judge: impl FnOnce(&TcContext) -> Verdict) -> Verdict {
    judge(&TcContext::new(skb))
}

#[inline(never)]
fn judge_frame<const MULTI_BUFFER: bool>(
    ctx: *mut xdp_md,
    judge: impl FnOnce(&Frame<MULTI_BUFFER>) -> Verdict,
) -> Verdict {
    // `black_box` makes the compiler pass the context to this function. Without `black_box`, the compiler would pass
    // the caller's packet pointers, which the verifier rejects as arguments.
    judge(&Frame(XdpContext::new(black_box(ctx))))
}

/// Stores the addresses, protocol and ports of a packet in this processor's [`Note`]. The packet's IP header starts at
/// offset `L2`.
#[inline(never)]
fn note_packet<F: Family, const L2: usize>(skb: *mut __sk_buff) {
    trace::note_verdict(Verdict::UNRELATED);
    let ctx = &TcContext::new(skb);
    // In both IP families, the addresses are the last fields of the fixed IP header, so they are readable even if
    // options or extension headers are malformed.
    let addresses = context::load::<[F::Addr; 2]>(ctx, L2 + F::LENGTH - size_of::<[F::Addr; 2]>());
    let Some([source, destination]) = addresses else { return };
    let (mut protocol, mut ports) = (0, Ports::NONE);
    if let Some(chain) = F::parse_chain(ctx, L2) {
        protocol = chain.headers.protocol;
        if has_ports(protocol) && !chain.fragment.is_later {
            ports = context::load::<Ports>(ctx, chain.headers.l4).unwrap_or(Ports::NONE);
        }
    }
    note::<F>(source, destination, protocol, ports);
}

#[inline(never)]
fn note_frame<F: Family, const MULTI_BUFFER: bool>(ctx: *mut xdp_md) {
    trace::note_verdict(Verdict::UNRELATED);
    let frame = Frame::<MULTI_BUFFER>(XdpContext::new(black_box(ctx)));
    if let Ok(Packet { headers, ports, .. }) = Packet::<F>::parse::<ETHERNET>(&frame) {
        note::<F>(headers.source, headers.destination, headers.protocol, ports);
    }
}

#[inline(always)]
fn note<F: Family>(source: F::Addr, destination: F::Addr, protocol: u8, ports: Ports) {
    let Some(note) = trace::note() else { return };
    const {
        assert!(size_of::<F::Addr>() <= 16 && align_of::<F::Addr>() <= align_of::<Note>());
    };
    // SAFETY: `note` is this processor's element of the map; the fields `source` and `destination` have room for an
    // address, and are aligned like an address.
    unsafe {
        (&raw mut (*note).source).cast::<F::Addr>().write(source);
        (&raw mut (*note).destination).cast::<F::Addr>().write(destination);
    }
    field!(note, source_port).store(u16::from_be(ports.source));
    field!(note, destination_port).store(u16::from_be(ports.destination));
    field!(note, protocol).store(protocol);
    field!(note, is_ipv6).store(F::ETHER_TYPE != V4::ETHER_TYPE);
}

/// Logs the packet and the verdict that this processor's [`Note`] contains.
///
/// All texts of one table have the same length, and the function selects a text by an index. If the function selected
/// texts of different lengths by branches, the verifier would check the rest of the function once for each branch and
/// length.
#[inline(never)]
fn write_log(is_reply: bool) {
    let Some(note) = trace::note() else { return };
    // SAFETY: the note is this processor's element of the map, which no other program writes while this function runs.
    let Note { source, destination, source_port, destination_port, protocol, is_ipv6, kind, reason } =
        unsafe { &*note };
    let kind = usize::from(*kind) % KINDS;
    let outcome = &OUTCOMES[kind][usize::from(*reason) % REASONS];
    let Some(level) = outcome.level else { return };
    let direction = text(&DIRECTIONS[usize::from(is_reply)]);
    let protocol = text(&PROTOCOLS[usize::from(*protocol)]);
    let outcome = text(&outcome.text);
    if *is_ipv6 {
        log!(
            (),
            level,
            "{} {} src={:i} dst={:i} sport={} dport={} {}",
            direction,
            protocol,
            *source,
            *destination,
            *source_port,
            *destination_port,
            outcome
        );
    } else {
        log!(
            (),
            level,
            "{} {} src={:i} dst={:i} sport={} dport={} {}",
            direction,
            protocol,
            first_four(source),
            first_four(destination),
            *source_port,
            *destination_port,
            outcome
        );
    }
}

#[inline(always)]
const fn first_four(address: &[u8; 16]) -> [u8; 4] {
    let [a, b, c, d, ..] = *address;
    [a, b, c, d]
}

#[inline(always)]
const fn text<const LENGTH: usize>(padded: &Text<LENGTH>) -> &str {
    // SAFETY: the bytes consist of whole UTF-8 strings and of spaces.
    unsafe { core::str::from_utf8_unchecked(padded) }
}

/// A text of a log line, padded with spaces to `LENGTH` bytes.
type Text<const LENGTH: usize> = [u8; LENGTH];
/// The level and the text with which a verdict is logged.
#[derive(Clone, Copy)]
struct Outcome {
    /// `None` if the verdict is not logged.
    level: Option<Level>,
    text: Text<32>,
}

/// The number of rows (kinds of verdicts) and of columns (reasons) of [`OUTCOMES`]. The two numbers are powers of two,
/// so that the program can mask an index: the verifier then knows that the index is in range.
const KINDS: usize = 8;
const REASONS: usize = Reason::ALL.len().next_power_of_two();

static OUTCOMES: [[Outcome; REASONS]; KINDS] = {
    let mut outcomes = [[Outcome { level: None, text: padded("", "") }; REASONS]; KINDS];
    outcomes[kind::PASSED as usize] = of_each_reason(Level::Info, "passed: ");
    outcomes[kind::TRANSLATED as usize] = of_any_reason("translated");
    outcomes[kind::REDIRECTED as usize] = of_any_reason("redirected");
    outcomes[kind::DROPPED as usize] = of_each_reason(Level::Warn, "dropped: ");
    outcomes
};

static DIRECTIONS: [Text<7>; 2] = [padded("request", ""), padded("reply", "")];

static PROTOCOLS: [Text<4>; 256] = {
    let mut names = [padded("ip", ""); 256];
    names[protocol::TCP as usize] = padded("tcp", "");
    names[protocol::UDP as usize] = padded("udp", "");
    names[protocol::SCTP as usize] = padded("sctp", "");
    names[V4::ICMP as usize] = padded("icmp", "");
    names[V6::ICMP as usize] = padded("icmp", "");
    names
};

const fn of_any_reason(text: &str) -> [Outcome; REASONS] {
    [Outcome { level: Some(Level::Debug), text: padded(text, "") }; REASONS]
}

const fn of_each_reason(level: Level, verb: &str) -> [Outcome; REASONS] {
    let mut outcomes = [Outcome { level: Some(level), text: padded(verb, "") }; REASONS];
    let mut index = 0;
    while index < Reason::ALL.len() {
        outcomes[index].text = padded(verb, Reason::ALL[index].name());
        index += 1;
    }
    outcomes
}

const fn padded<const LENGTH: usize>(verb: &str, name: &str) -> Text<LENGTH> {
    let mut text = [b' '; LENGTH];
    let (start, end) = text.split_at_mut(verb.len());
    start.copy_from_slice(verb.as_bytes());
    end.split_at_mut(name.len()).0.copy_from_slice(name.as_bytes());
    text
}
