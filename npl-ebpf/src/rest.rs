// SPDX-License-Identifier: GPL-2.0-only
//! Packets that are not plain ones of TCP or UDP: ICMP errors, fragments, SCTP, and those with options or extension
//! headers.
//!
//! Few packets are. Programs of their own look at them, which those of the hooks jump to: the others pay nothing for
//! them, and they have a stack to themselves. Each part is a function of its own for the same reason.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};

use npl_common::reason::Reason;

use crate::{
    family::{Family, V4, V6},
    first, fragment, hold,
    hook::Hook,
    host, icmp,
    maps::CONFIG,
    packet::{self, Packet, skb},
    redirect,
    rewrite::SOURCE,
    verdict::{self, Verdict},
};

/// In the place of an action, of which TC has none of these numbers: the packet is for another function.
const IS_ICMP: i32 = i32::MAX;
const IS_FRAGMENT: i32 = i32::MAX - 1;
const IS_LEAVING: i32 = i32::MAX - 2;
const IS_UNREADABLE: i32 = i32::MAX - 3;

/// Looks closer at a packet whose IP header starts `L2` bytes in.
#[inline(always)]
pub fn translate<H: Hook, const L2: usize>(ctx: &TcContext) -> i32 {
    match packet::ether_type(ctx) {
        Some(V4::ETHER_TYPE) => translate_family::<V4, H, L2>(ctx),
        Some(V6::ETHER_TYPE) => translate_family::<V6, H, L2>(ctx),
        _ => Verdict::NOT_OURS.into_action(),
    }
}

#[inline(always)]
fn translate_family<F: Family, H: Hook, const L2: usize>(ctx: &TcContext) -> i32 {
    // What was translated at the Pod's device says nothing about what is to be translated here.
    if !H::ON_ARRIVAL && CONFIG.get(0).is_some_and(|config| redirect::is_marked(ctx, config)) {
        return Verdict::NOT_OURS.into_action();
    }
    let action = act::<F, H, L2>(ctx);
    // After the copies that came to the hook again by the same buffer: those may yet take the stack.
    if H::ON_ARRIVAL
        && H::END == SOURCE
        && verdict::is_redirect(action)
        && let Some(config) = CONFIG.get(0)
    {
        redirect::mark_translated(ctx, config);
    }
    action
}

#[inline(always)]
fn act<F: Family, H: Hook, const L2: usize>(ctx: &TcContext) -> i32 {
    begin::<F, H, L2>(skb(ctx));
    let action = translate_packet::<F, H, L2>(skb(ctx));
    let waits = action != IS_FRAGMENT && first::waits_noted();
    match action {
        IS_ICMP => translate_error::<F, H, L2>(skb(ctx)),
        IS_FRAGMENT if !first::recall_noted::<H>(skb(ctx)) => Verdict::drop(Reason::RewriteFailed).into_action(),
        IS_FRAGMENT => translate_fragment::<F, H, L2>(skb(ctx)),
        IS_LEAVING if !H::ON_ARRIVAL => note_leaving::<F, L2>(skb(ctx)),
        IS_UNREADABLE if H::ON_ARRIVAL => judge_unreadable::<F, L2>(skb(ctx)),
        _ if !hold::release_noted::<H>(skb(ctx)) => Verdict::drop(Reason::RewriteFailed).into_action(),
        _ if waits => verdict::take(),
        action => action,
    }
}

/// Notes what the other parts have to know of a fragment of SCTP.
#[inline(never)]
fn begin<F: Family, H: Hook, const L2: usize>(skb: *mut __sk_buff) {
    let ctx = &TcContext::new(skb);
    let Some(walk) = F::walk(ctx, L2) else { return };
    let Some(config) = CONFIG.get(0) else { return };
    if first::is_first(&walk) {
        first::begin::<H>(ctx, fragment::hash::<F, H>(config, &walk));
    } else if first::is_awaited(&walk) {
        first::note_last::<F, H>(fragment::hash::<F, H>(config, &walk), &walk);
    }
}

#[inline(never)]
fn translate_packet<F: Family, H: Hook, const L2: usize>(skb: *mut __sk_buff) -> i32 {
    let ctx = &TcContext::new(skb);
    let Some(walk) = F::walk(ctx, L2) else {
        return if H::ON_ARRIVAL { IS_UNREADABLE } else { Verdict::NOT_OURS.into_action() };
    };
    if walk.location.protocol == F::ICMP {
        return IS_ICMP;
    }
    if walk.fragment.is_later {
        return IS_FRAGMENT;
    }
    let is_first = walk.fragment.is_first;
    let Some(config) = CONFIG.get(0) else { return Verdict::NOT_OURS.into_action() };
    let hash = if is_first { fragment::hash::<F, H>(config, &walk) } else { 0 };
    let (destination, protocol) = (walk.location.destination, walk.location.protocol);
    let verdict = match Packet::of(ctx, walk) {
        Some(packet) => H::packet::<F, L2, false>(ctx, &packet, |node| {
            if is_first {
                fragment::note_translated(hash, node, protocol);
            }
        }),
        None => Verdict::NOT_OURS,
    };
    if !H::ON_ARRIVAL && verdict.is_unusual() {
        if is_first {
            fragment::note_not_ours::<F, H>(hash, destination);
        }
        return IS_LEAVING;
    }
    let (is_translated, is_by_stack) = (verdict.is_translated(), H::ON_ARRIVAL && !verdict.is_redirected());
    // Its record leads those that follow to the same mapping, and to the same end.
    let is_followed = verdict.is_drop();
    // Before anything else: a reason that only some verdicts have must not be kept where the verifier misses it in others.
    let action = verdict.into_action();
    if !is_first || is_followed {
        return action;
    }
    if is_translated {
        if is_by_stack {
            fragment::note_by_stack::<F>(hash);
        }
        hold::note::<H>(hash);
    } else {
        fragment::note_not_ours::<F, H>(hash, destination);
    }
    action
}

#[inline(never)]
fn translate_fragment<F: Family, H: Hook, const L2: usize>(skb: *mut __sk_buff) -> i32 {
    let ctx = &TcContext::new(skb);
    let Some(walk) = F::walk(ctx, L2) else { return Verdict::NOT_OURS.into_action() };
    H::later_fragment::<F, L2>(ctx, walk).into_action()
}

/// What arrives for the Node behind headers that lead to no ports may have been for a mapping.
#[inline(never)]
fn judge_unreadable<F: Family, const L2: usize>(skb: *mut __sk_buff) -> i32 {
    let destination = F::destination_of_chain(&TcContext::new(skb), L2);
    let is_for_node = |addr| CONFIG.get(0).is_some_and(|config| F::local_index(config, addr).is_some());
    let is_near = destination.is_some_and(is_for_node);
    if is_near { Verdict::pass(Reason::HeaderChain) } else { Verdict::NOT_OURS }.into_action()
}

/// What leaves by a node port is the host's.
#[inline(never)]
fn note_leaving<F: Family, const L2: usize>(skb: *mut __sk_buff) -> i32 {
    let ctx = &TcContext::new(skb);
    if let Some(packet) = F::walk(ctx, L2).and_then(|walk| Packet::of(ctx, walk)) {
        // One that is cut off before its flags is taken for one that goes on.
        host::note_leaving(&packet, packet.tcp_flags::<L2>(ctx).unwrap_or(0));
    }
    Verdict::NOT_OURS.into_action()
}

#[inline(never)]
fn translate_error<F: Family, H: Hook, const L2: usize>(skb: *mut __sk_buff) -> i32 {
    let ctx = &TcContext::new(skb);
    let Some(outer) = F::walk(ctx, L2) else { return Verdict::NOT_OURS.into_action() };
    if outer.fragment.is_first || outer.fragment.is_later {
        return Verdict::NOT_OURS.into_action();
    }
    let Some(header) = icmp::header(ctx, &outer) else { return Verdict::NOT_OURS.into_action() };
    H::error::<F, L2>(ctx, outer, header).into_action()
}
