// SPDX-License-Identifier: GPL-2.0-only
//! Records packets for `npl-agent trace`. A record contains a packet before and after a program, and the program's
//! verdict. The programs record packets that match the filter, and every ICMP error.
//!
//! While tracing is off, a fast-path program looks up the trace filter twice: before and after its other work. A step
//! of the slow path also looks up the filter when the step reaches a verdict. The functions that write a record are not
//! inlined, so that they take no stack space during the program's other work.

use core::hint::black_box;

use aya_ebpf::{
    bindings::{__sk_buff, xdp_md},
    helpers::generated::bpf_skb_load_bytes,
    programs::{TcContext, XdpContext},
};
use npl_common::{
    mapping::protocol,
    packet_trace::{
        EndpointFilter, ICMP_ERROR, IPV6, PORT_MASK, PacketCopy, PacketEnd, SNAP_LENGTH, TraceCpu, TraceFilter, hook,
        verdict::PENDING,
    },
};

use crate::{
    act::rewrite::SOURCE,
    base::{
        cell::{Cell, field},
        clock,
        context::{Access as _, ETHERNET, Frame, skb},
        maps::{TRACE_CPU, TRACE_FILTER, TRACE_RING},
        verdict::{Verdict, kind},
    },
    net::{V4, V6, family::HeaderLayout as _},
    path::hook::Hook,
    state::maps::Family,
};

/// Indexes in `TraceRecord::packets`: the packet before the program's run, and the packet after the program's run.
const BEFORE: usize = 0;
const AFTER: usize = 1;

/// Flags in the parameter `origin` of [`npl_trace_begin`]. The low eight bits of this parameter contain the number of
/// the hook.
const IS_REPLY: u32 = 1 << 8;
const IS_SLOW_PATH: u32 = 1 << 16;

/// The interval of the rate limit, in nanoseconds.
const SECOND: u64 = 1_000_000_000;

/// Runs `judge`, which decides the verdict on a fast-path packet and rewrites the packet. Records the packet, unless
/// the slow path handles the packet.
#[inline(always)]
pub fn packet<F: Family, H: Hook, const L2: usize>(
    ctx: &TcContext,
    judge: impl FnOnce(&TcContext) -> Verdict,
) -> Verdict {
    if is_armed() {
        npl_trace_begin(skb(ctx), L2 as u32, origin::<H>());
    }
    let verdict = judge(ctx);
    if !verdict.is_slow_path() && is_armed() {
        npl_trace_note(verdict.bits());
        npl_trace_end(skb(ctx), L2 as u32);
        npl_trace_write();
    }
    verdict
}

/// Runs a step of the slow path, and records the packet if the step reaches a verdict. Each step records before the
/// next step runs: a later step may re-inject a fragment, and the programs that process the fragment would overwrite
/// this CPU's record.
#[inline(always)]
pub fn step<F: Family, H: Hook, const L2: usize>(skb: *mut __sk_buff, step: impl FnOnce(*mut __sk_buff) -> i32) -> i32 {
    if is_armed() {
        npl_trace_begin(skb, L2 as u32, origin::<H>() | IS_SLOW_PATH);
    }
    let action = step(skb);
    if is_armed() {
        npl_trace_end(skb, L2 as u32);
        npl_trace_write();
    }
    action
}

/// Stores the verdict of a step in this CPU's record, and returns the TC action.
#[inline(always)]
pub fn decide(verdict: Verdict) -> i32 {
    if is_armed() {
        npl_trace_note(verdict.bits());
    }
    verdict.into_action()
}

/// Runs `judge`, which decides the verdict on a frame and rewrites the frame. Records a translated or dropped frame;
/// the TC program records a frame that passes unchanged.
#[inline(always)]
pub fn frame<F: Family, const MULTI_BUFFER: bool>(
    frame: &Frame<MULTI_BUFFER>,
    judge: impl FnOnce(&Frame<MULTI_BUFFER>) -> Verdict,
) -> Verdict {
    if is_armed() {
        begin_frame::<F, MULTI_BUFFER>(frame.0.ctx);
    }
    let verdict = judge(frame);
    if (verdict.is_translated() || verdict.is_drop()) && is_armed() {
        npl_trace_note(verdict.bits());
        end_frame::<F, MULTI_BUFFER>(frame.0.ctx);
        npl_trace_write();
    }
    verdict
}

/// Returns whether tracing is on: `npl-agent trace` has set a filter.
#[inline(always)]
fn is_armed() -> bool {
    TRACE_FILTER.get_ptr_mut(0).is_some_and(|filter| field!(filter, until).load() != 0)
}

/// Returns the number of the program's hook, with the flag [`IS_REPLY`] if the program translates replies.
#[inline(always)]
const fn origin<H: Hook>() -> u32 {
    let hook = if H::ON_ARRIVAL { hook::INGRESS } else { hook::EGRESS };
    hook as u32 | if H::SIDE == SOURCE { IS_REPLY } else { 0 }
}

/// Stores a verdict in this CPU's record. This function and the other functions with `no_mangle` in this module are
/// exported, so that the verifier checks each of them only once, and not once for each verifier state of each caller.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_trace_note(bits: u32) -> u32 {
    let verdict = Verdict::of_bits(bits);
    if let Some(cpu) = TRACE_CPU.get_ptr_mut(0) {
        let reason = if matches!(verdict.kind(), kind::PASSED | kind::DROPPED) { verdict.detail() } else { 0 };
        field!(cpu, record.reason).store(reason);
        field!(cpu, record.verdict).store(verdict.kind() as u8);
    }
    0
}

/// Starts this CPU's trace record, and stores the packet's device, its length and a copy of its start. The packet's IP
/// header starts at offset `l2`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_trace_begin(skb: *mut __sk_buff, l2: u32, origin: u32) -> u32 {
    if let Some(cpu) = begin_record(origin) {
        let ctx = &TcContext::new(skb);
        set_packet(cpu, ctx.ifindex(), ctx.length().wrapping_sub(l2));
        copy_packet(skb, l2, packet_copy::<BEFORE>(cpu));
    }
    0
}

/// If the program has reached a verdict, copies the packet, as it is after the program's run, to this CPU's record.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_trace_end(skb: *mut __sk_buff, l2: u32) -> u32 {
    if let Some(cpu) = decided() {
        copy_packet(skb, l2, packet_copy::<AFTER>(cpu));
    }
    0
}

#[inline(never)]
fn begin_frame<F: Family, const MULTI_BUFFER: bool>(ctx: *mut xdp_md) {
    if let Some(cpu) = begin_record(hook::XDP.into()) {
        // The [`Frame`] is created after the map look-ups: without `CAP_PERFMON`, the keys of look-ups must not
        // overwrite the context that `black_box` puts on the stack.
        let frame = Frame::<MULTI_BUFFER>(XdpContext::new(black_box(ctx)));
        set_packet(cpu, frame.ifindex(), frame.length().wrapping_sub(ETHERNET as u32));
        copy_frame::<F, MULTI_BUFFER>(&frame, packet_copy::<BEFORE>(cpu));
    }
}

#[inline(never)]
fn end_frame<F: Family, const MULTI_BUFFER: bool>(ctx: *mut xdp_md) {
    let Some(cpu) = decided() else { return };
    copy_frame::<F, MULTI_BUFFER>(&Frame::<MULTI_BUFFER>(XdpContext::new(black_box(ctx))), packet_copy::<AFTER>(cpu));
}

/// Begins this CPU's record. If the end time in the trace filter has passed, turns tracing off, because `npl-agent
/// trace` may have been killed.
#[inline(always)]
fn begin_record(origin: u32) -> Option<*mut TraceCpu> {
    let filter = TRACE_FILTER.get_ptr_mut(0)?;
    let cpu = TRACE_CPU.get_ptr_mut(0)?;
    let now = clock::nanoseconds();
    if field!(filter, until).load() <= now {
        field!(filter, until).store(0);
        field!(cpu, record.verdict).store(PENDING);
        return None;
    }
    field!(cpu, record.time).store(now);
    field!(cpu, record.hook).store(origin as u8);
    field!(cpu, record.is_reply).store(u8::from(origin & IS_REPLY != 0));
    field!(cpu, record.is_slow_path).store(u8::from(origin & IS_SLOW_PATH != 0));
    field!(cpu, record.verdict).store(PENDING);
    field!(cpu, record.reason).store(0);
    Some(cpu)
}

#[inline(always)]
fn set_packet(cpu: *mut TraceCpu, ifindex: u32, length: u32) {
    field!(cpu, record.ifindex).store(ifindex);
    field!(cpu, record.length).store(length);
}

/// Returns this CPU's record if the program has reached a verdict.
#[inline(always)]
fn decided() -> Option<*mut TraceCpu> {
    TRACE_CPU.get_ptr_mut(0).filter(|cpu| field!(*cpu, record.verdict).load() != PENDING)
}

#[inline(always)]
fn packet_copy<const POSITION: usize>(cpu: *mut TraceCpu) -> *mut PacketCopy {
    // SAFETY: `cpu` points to this CPU's element of the map, and the expression creates no Rust reference.
    unsafe { &raw mut (*cpu).record.packets[POSITION] }
}

/// Copies the start of a packet whose IP header starts at offset `l2`.
#[inline(always)]
fn copy_packet(skb: *mut __sk_buff, l2: u32, copy: *mut PacketCopy) {
    let length = TcContext::new(skb).length().wrapping_sub(l2);
    // The helper rejects a length of 0. The subtraction and the mask turn the length 0 into `SNAP_LENGTH`, with which
    // the helper fails on an empty packet. The mask also shows the bounds of the length to the verifier.
    let captured = (length.min(SNAP_LENGTH).wrapping_sub(1) & (SNAP_LENGTH - 1)) + 1;
    // SAFETY: the element has room for `SNAP_LENGTH` bytes, and `captured` is at most `SNAP_LENGTH`.
    let to = unsafe { (&raw mut (*copy).bytes).cast() };
    // SAFETY: the context is valid, and the helper writes exactly `captured` bytes or fails.
    let status = unsafe { bpf_skb_load_bytes(skb.cast(), l2, to, captured) };
    let captured = if status == 0 { captured } else { 0 };
    // SAFETY: `copy` is in this CPU's element of the map.
    let version = unsafe { (*copy).bytes[0] } >> 4;
    if version == 6 { describe::<V6>(copy, captured) } else { describe::<V4>(copy, captured) }
}

/// Copies the start of a frame in whole words, because no helper copies bytes of a frame before Linux 5.18.
#[expect(
    clippy::cast_ptr_alignment,
    reason = "the bytes of a record are aligned to eight bytes, and each offset to the size that is read"
)]
#[inline(always)]
fn copy_frame<F: Family, const MULTI_BUFFER: bool>(frame: &Frame<MULTI_BUFFER>, copy: *mut PacketCopy) {
    // SAFETY: the element has room for `SNAP_LENGTH` bytes, and is aligned.
    let to = unsafe { (&raw mut (*copy).bytes).cast::<u64>() };
    let words = frame.copy_words::<ETHERNET, { SNAP_LENGTH as usize / size_of::<u64>() }>(to);
    describe::<F>(copy, words * size_of::<u64>() as u32);
}

/// Stores the addresses, protocol and ports that the copied bytes contain. Ports after options or extension headers are
/// not stored: `npl-agent trace` parses the bytes in user space.
#[expect(
    clippy::cast_ptr_alignment,
    reason = "the bytes of a record are aligned to eight bytes, and each offset to the size that is read"
)]
#[inline(always)]
fn describe<F: Family>(copy: *mut PacketCopy, captured: u32) {
    // SAFETY: `copy` is in this CPU's element of the map, and its bytes are aligned to eight bytes.
    let bytes = unsafe { (&raw const (*copy).bytes).cast::<u8>() };
    let is_ipv6 = const { F::ETHER_TYPE != V4::ETHER_TYPE };
    let has_addresses = captured >= F::LENGTH as u32;
    let has_ports = captured >= (F::LENGTH + size_of::<u32>()) as u32;
    // SAFETY: all offsets are constants within the bytes, and are multiples of the size that is read.
    let (next, first_byte, fragment, ports) = unsafe {
        let next = bytes.add(if is_ipv6 { 6 } else { 9 }).read();
        let fragment = if is_ipv6 { 0 } else { bytes.add(6).cast::<u16>().read() & u16::to_be(0x1fff) };
        (next, bytes.read(), fragment, bytes.add(F::LENGTH).cast::<[u16; 2]>().read())
    };
    let is_plain = is_ipv6 || first_byte == 0x45;
    let is_with_ports = matches!(next, protocol::TCP | protocol::UDP | protocol::SCTP);
    // In IPv6, a next header other than ICMPv6 may be an extension header, after which a header with ports follows.
    let is_without_ports = if is_ipv6 { next == V6::ICMP } else { !is_with_ports };
    let is_whole = has_ports && is_plain && fragment == 0;
    let has_ports = is_whole && is_with_ports;
    let family = if is_ipv6 { IPV6 } else { 0 };
    let port_mask = if has_ports || is_without_ports { PORT_MASK | IPV6 } else { IPV6 };
    let mut index = 0;
    while index < 2 {
        // SAFETY: the bytes are aligned, and the offsets are constants within the bytes; the source is followed by the
        // destination.
        let [first, second] = unsafe {
            let at = bytes.add(F::LENGTH - (2 - index) * size_of::<F::Addr>());
            if is_ipv6 {
                [at.cast::<u64>().read(), at.add(8).cast::<u64>().read()]
            } else {
                [at.cast::<u32>().read().into(), 0]
            }
        };
        let port = if has_ports { u16::from_be(ports[index]).into() } else { 0 };
        // Each word is stored separately: without `CAP_PERFMON`, the verifier rejects a loop that sets bytes.
        field!(copy, ends[index].addr[0]).store(if has_addresses { first } else { 0 });
        field!(copy, ends[index].addr[1]).store(if has_addresses { second } else { 0 });
        field!(copy, ends[index].port).store(port | family);
        field!(copy, ends[index].port_mask).store(port_mask);
        index += 1;
    }
    let is_known = has_addresses && (has_ports || is_without_ports || !is_ipv6);
    // The type is the first byte of an ICMP header.
    let is_error = is_whole && next == F::ICMP && F::is_error(ports[0].to_ne_bytes()[0]);
    let error = if is_error { ICMP_ERROR } else { 0 };
    field!(copy, protocol).store(if is_known { u32::from(next) | error } else { 0 });
    field!(copy, captured).store(captured);
}

/// Writes this CPU's record to the ring buffer, if the program has reached a verdict and the record matches the filter.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_trace_write() -> u32 {
    let (Some(filter), Some(cpu)) = (TRACE_FILTER.get_ptr_mut(0), decided()) else { return 0 };
    if !matches(filter, cpu) {
        return 0;
    }
    let now = field!(cpu, record.time).load();
    if now.wrapping_sub(field!(cpu, second_began).load()) >= SECOND {
        field!(cpu, second_began).store(now);
        field!(cpu, in_second).store(0);
    }
    let in_second = field!(cpu, in_second).load();
    let is_rate_limited = in_second >= field!(filter, rate).load();
    let mut is_lost = false;
    if !is_rate_limited {
        field!(cpu, in_second).store(in_second + 1);
        // SAFETY: `cpu` points to this CPU's element of the map, which no other program writes during this call.
        is_lost = TRACE_RING.output(unsafe { &(*cpu).record }, 0).is_err();
    }
    // The program always writes both counters: without `CAP_PERFMON`, the verifier rejects a single increment at one of
    // two offsets.
    add(field!(cpu, rate_limited), is_rate_limited);
    add(field!(cpu, lost), is_lost);
    0
}

#[inline(always)]
fn add(counter: Cell<u64>, is_counted: bool) {
    counter.store(counter.load().wrapping_add(is_counted.into()));
}

/// Returns whether the filter matches a packet. The packet has four addresses with ports: source and destination,
/// before and after the program. One of the four must match the filter's client, and one must match an endpoint of the
/// filter. For an ICMP error, the result is always true: `npl-agent trace` then compares the filter with the packet
/// that the error quotes.
#[inline(always)]
fn matches(filter: *mut TraceFilter, cpu: *mut TraceCpu) -> bool {
    let wanted = field!(filter, protocol).load();
    let found = field!(cpu, record.packets[BEFORE].protocol).load();
    if found & ICMP_ERROR != 0 {
        return true;
    }
    if wanted != 0 && found != 0 && wanted != u64::from(found) {
        return false;
    }
    // SAFETY: `cpu` points to this CPU's element of the map, and the expression creates no Rust reference.
    let end = |packet: usize, end: usize| unsafe { &raw const (*cpu).record.packets[packet].ends[end] };
    let misses = misses_of(filter, end(BEFORE, 0))
        & misses_of(filter, end(BEFORE, 1))
        & misses_of(filter, end(AFTER, 0))
        & misses_of(filter, end(AFTER, 1));
    misses == 0
}

/// Bits of the result of [`misses_of`].
const MISSES_ENDPOINTS: u64 = 1;
const MISSES_CLIENT: u64 = 2;

/// Returns the parts of the filter that do not match one address and port of the packet, as a bit set of `MISSES_…`.
/// The function is not inlined, so that the stack contains the values of only one address and port at a time.
#[inline(never)]
fn misses_of(filter: *const TraceFilter, end: *const PacketEnd) -> u64 {
    // SAFETY: only `npl-agent trace` writes the fields that this function reads. If a field changes during the read,
    // the program may record or omit a packet contrary to the filter. `end` is in this CPU's element, which no other
    // program writes during this call.
    let (filter, end) = unsafe { (&*filter, &*end) };
    // The comparisons are not in a loop: without `CAP_PERFMON`, the verifier rejects an instruction that adds different
    // offsets to a pointer on different paths. Each `black_box` prevents the compiler from loading the next endpoint of
    // the filter too early: the stack has no room for two endpoints.
    let [e0, e1, e2, e3, e4, e5, e6, e7] = &filter.endpoints;
    let misses_endpoints = black_box(differs(e0, end));
    let misses_endpoints = black_box(misses_endpoints & differs(e1, end));
    let misses_endpoints = black_box(misses_endpoints & differs(e2, end));
    let misses_endpoints = black_box(misses_endpoints & differs(e3, end));
    let misses_endpoints = black_box(misses_endpoints & differs(e4, end));
    let misses_endpoints = black_box(misses_endpoints & differs(e5, end));
    let misses_endpoints = black_box(misses_endpoints & differs(e6, end));
    let misses_endpoints = black_box(misses_endpoints & differs(e7, end));
    (misses_endpoints * MISSES_ENDPOINTS) | (differs(&filter.client, end) * MISSES_CLIENT)
}

/// Returns 0 if the filter matches the address and port, and otherwise 1. The function has no branches, because the
/// verifier would follow each branch separately.
#[inline(always)]
fn differs(filter: &EndpointFilter, end: &PacketEnd) -> u64 {
    let difference = filter.difference(end);
    (difference | difference.wrapping_neg()) >> 63
}
