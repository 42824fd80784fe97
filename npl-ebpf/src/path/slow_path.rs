// SPDX-License-Identifier: GPL-2.0-only
//! The slow path handles ICMP errors, fragments, SCTP, and packets with IPv4 options or IPv6 extension headers.
//!
//! The slow path is a separate program, which the fast path tail-calls: few packets need the slow path, and a
//! tail-called program can use the whole BPF stack. The steps of the slow path are functions that are not inlined,
//! because all steps together would exceed the stack limit.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use npl_common::{config::Config, reason::Reason};

use super::{hook::Hook, trace};
use crate::{
    act::{redirect, rewrite::SOURCE},
    base::{
        context::skb,
        maps::CONFIG,
        verdict::{self, Verdict},
    },
    net::{icmp, packet::Packet},
    state::{fragment, fragment_buffer, host_connection, maps::Family, sctp_reassembly},
};

// A step returns one of these values if another step must handle the packet. TC has no action with these numbers.
const IS_ICMP: i32 = i32::MAX;
const IS_FRAGMENT: i32 = i32::MAX - 1;
const IS_LEAVING: i32 = i32::MAX - 2;
const IS_UNREADABLE: i32 = i32::MAX - 3;

/// Translates, passes or drops a packet of the address family `F` whose IP header starts at offset `L2`.
#[inline(always)]
pub fn translate<F: Family, H: Hook, const L2: usize>(ctx: &TcContext) -> i32 {
    let action = run_steps::<F, H, L2>(ctx);
    // The program sets the mark of a redirected reply only after all steps. Earlier steps may re-inject fragments as
    // clones of the same skb, and a clone that the stack forwards must not have the mark.
    if H::ON_ARRIVAL
        && H::SIDE == SOURCE
        && verdict::is_redirect(action)
        && let Some(config) = CONFIG.get(0)
    {
        redirect::mark_translated(ctx, config);
    }
    action
}

#[inline(always)]
fn run_steps<F: Family, H: Hook, const L2: usize>(ctx: &TcContext) -> i32 {
    begin_sctp::<F, H, L2>(skb(ctx));
    let action = trace::step::<F, H, L2>(skb(ctx), translate_packet::<F, H, L2>);
    let is_held = action != IS_FRAGMENT && sctp_reassembly::hold_noted();
    match action {
        IS_ICMP => trace::step::<F, H, L2>(skb(ctx), translate_error::<F, H, L2>),
        IS_FRAGMENT if !sctp_reassembly::reinject_first(skb(ctx), H::ON_ARRIVAL) => {
            trace::step::<F, H, L2>(skb(ctx), drop_unwritable)
        }
        IS_FRAGMENT => trace::step::<F, H, L2>(skb(ctx), translate_fragment::<F, H, L2>),
        IS_LEAVING if !H::ON_ARRIVAL => trace::step::<F, H, L2>(skb(ctx), record_leaving::<F, L2>),
        IS_UNREADABLE if H::ON_ARRIVAL => trace::step::<F, H, L2>(skb(ctx), judge_unreadable::<F, L2>),
        _ if !fragment_buffer::reinject_noted(skb(ctx), H::ON_ARRIVAL) => {
            trace::step::<F, H, L2>(skb(ctx), drop_unwritable)
        }
        _ if is_held => verdict::consume(),
        action => action,
    }
}

/// Drops a packet whose skb could not be overwritten with a saved frame ([`fragment_buffer::load_frame`]).
#[inline(always)]
fn drop_unwritable(_skb: *mut __sk_buff) -> i32 {
    trace::decide(Verdict::drop(Reason::RewriteFailed))
}

/// For the first fragment of an SCTP packet, looks up the datagram's length or saves a copy of the fragment. For the
/// last fragment, stores the datagram's key and length for the later steps.
#[inline(never)]
fn begin_sctp<F: Family, H: Hook, const L2: usize>(skb: *mut __sk_buff) {
    let ctx = &TcContext::new(skb);
    let Some(chain) = F::parse_chain(ctx, L2) else { return };
    let Some(config) = CONFIG.get(0) else { return };
    if sctp_reassembly::is_first(&chain) {
        let hash = fragment::hash(config, &chain, H::SIDE);
        sctp_reassembly::begin(ctx, hash, H::ON_ARRIVAL);
    } else if sctp_reassembly::may_be_last(&chain) {
        let hash = fragment::hash(config, &chain, H::SIDE);
        sctp_reassembly::note_last(hash, &chain, H::ON_ARRIVAL);
    }
}

#[inline(never)]
fn translate_packet<F: Family, H: Hook, const L2: usize>(skb: *mut __sk_buff) -> i32 {
    let ctx = &TcContext::new(skb);
    let Some(chain) = F::parse_chain(ctx, L2) else {
        return if H::ON_ARRIVAL { IS_UNREADABLE } else { trace::decide(Verdict::UNRELATED) };
    };
    if chain.headers.protocol == F::ICMP {
        return IS_ICMP;
    }
    if chain.fragment.is_later {
        return IS_FRAGMENT;
    }
    let is_first = chain.fragment.is_first;
    let Some(config) = CONFIG.get(0) else { return trace::decide(Verdict::UNRELATED) };
    let hash = if is_first { fragment::hash(config, &chain, H::SIDE) } else { 0 };
    let (destination, protocol) = (chain.headers.destination, chain.headers.protocol);
    let verdict = match Packet::from_chain(ctx, chain, sctp_reassembly::datagram_end) {
        Some(packet) => H::packet::<F, L2, false>(ctx, &packet, |nat| {
            if is_first {
                fragment::record_translated(hash, nat, protocol);
            }
        }),
        None => Verdict::UNRELATED,
    };
    // An early fragment of a request is saved only if the destination is a node address; an early fragment of a reply
    // is always saved.
    let may_be_early = |config: &Config| H::SIDE == SOURCE || F::node_address_index(config, destination).is_some();
    if !H::ON_ARRIVAL && verdict.is_slow_path() {
        if is_first {
            fragment::record_untranslated::<F>(hash, may_be_early);
        }
        return IS_LEAVING;
    }
    let (is_translated, is_by_stack) = (verdict.is_translated(), H::ON_ARRIVAL && !verdict.is_redirected());
    // The record of a dropped first fragment is kept, so that the later fragments are dropped as well.
    let is_dropped = verdict.is_drop();
    // The verdict is converted to an action before the branches. After the branches, the verifier no longer knows the
    // bounds of the reason's number, and rejects the program if the loader lacks `CAP_PERFMON`.
    let action = trace::decide(verdict);
    if !is_first || is_dropped {
        return action;
    }
    if is_translated {
        if is_by_stack {
            fragment::record_by_stack::<F>(hash);
        }
        fragment_buffer::note_translated(hash, H::ON_ARRIVAL);
    } else {
        fragment::record_untranslated::<F>(hash, may_be_early);
    }
    action
}

#[inline(never)]
fn translate_fragment<F: Family, H: Hook, const L2: usize>(skb: *mut __sk_buff) -> i32 {
    let ctx = &TcContext::new(skb);
    let Some(chain) = F::parse_chain(ctx, L2) else { return trace::decide(Verdict::UNRELATED) };
    trace::decide(H::later_fragment::<F, L2>(ctx, chain))
}

/// Counts a packet to a node address if its IPv6 extension headers could not be parsed up to a transport header.
#[inline(never)]
fn judge_unreadable<F: Family, const L2: usize>(skb: *mut __sk_buff) -> i32 {
    let destination = F::destination_of_chain(&TcContext::new(skb), L2);
    let is_node_address = |addr| CONFIG.get(0).is_some_and(|config| F::node_address_index(config, addr).is_some());
    let is_for_node = destination.is_some_and(is_node_address);
    trace::decide(if is_for_node { Verdict::pass(Reason::Ipv6ExtensionHeaders) } else { Verdict::UNRELATED })
}

/// Records an outgoing packet with a source port of the node port range as a packet of a host connection, see
/// [`host_connection`].
#[inline(never)]
fn record_leaving<F: Family, const L2: usize>(skb: *mut __sk_buff) -> i32 {
    let ctx = &TcContext::new(skb);
    let Some(chain) = F::parse_chain(ctx, L2) else { return trace::decide(Verdict::UNRELATED) };
    let Some(packet) = Packet::from_chain(ctx, chain, sctp_reassembly::datagram_end) else {
        return trace::decide(Verdict::UNRELATED);
    };
    // A packet with an incomplete transport header or an unknown length, such as a first fragment of SCTP, creates no
    // record. Other packets of the connection create the record.
    if let Ok(segment) = packet.segment(ctx) {
        host_connection::record_leaving(&packet, segment);
    }
    trace::decide(Verdict::UNRELATED)
}

#[inline(never)]
fn translate_error<F: Family, H: Hook, const L2: usize>(skb: *mut __sk_buff) -> i32 {
    let ctx = &TcContext::new(skb);
    let Some(outer) = F::parse_chain(ctx, L2) else { return trace::decide(Verdict::UNRELATED) };
    if outer.fragment.is_first || outer.fragment.is_later {
        return trace::decide(Verdict::UNRELATED);
    }
    let Some(header) = icmp::error_header(ctx, &outer) else { return trace::decide(Verdict::UNRELATED) };
    trace::decide(H::error::<F, L2>(ctx, outer, header))
}
