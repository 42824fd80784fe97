// SPDX-License-Identifier: GPL-2.0-only
//! First fragments of SCTP packets: their checksum depends on the length of the whole, which the last fragment tells.
//!
//! So the first one waits, as a copy, for the last one, which lends its buffer to it: it comes to the hook once more, with
//! the length of the whole beside it. All that follow go on meanwhile; whoever puts them together waits for the last one too.

use core::num::NonZeroUsize;

use aya_ebpf::{
    bindings::{__sk_buff, BPF_CSUM_LEVEL_RESET, BPF_F_INGRESS},
    helpers::generated::{bpf_clone_redirect, bpf_csum_level, bpf_ktime_get_ns},
    programs::TcContext,
};
use npl_common::{
    hold::{AGAIN, Held, LAST, WAIT_NS, WAITS, WHOLE_BYTES, first_place},
    mapping::protocol,
};

use crate::{
    family::{Family, Location, Walk},
    hold::{self, become_frame, copy, mark},
    hook::Hook,
    maps::{FIRST, HOLD},
    packet::skb,
    sctp,
};

/// Finds out what is known of the whole whose first fragment this is, and keeps a copy of it if that is to wait.
#[inline(always)]
pub fn begin<H: Hook>(ctx: &TcContext, hash: u64) {
    tell(npl_look(skb(ctx), mark::<H>(hash)));
}

/// Where the whole ends that has its first fragment here: as the last one has told, or as this one does where it does not wait.
/// Of one that is to wait, where it ends itself: its checksum is of no use yet.
#[inline(always)]
pub fn end_of_whole<F: Family>(ctx: &TcContext, walk: &Walk<F>) -> Option<NonZeroUsize> {
    NonZeroUsize::new(npl_end(skb(ctx), walk.location.l4 as u32, walk.end as u32) as usize)
}

/// Whether a packet was counted before it waited.
#[inline(always)]
pub fn is_again<F: Family>(location: &Location<F>) -> bool {
    !location.is_plain && npl_told() & AGAIN != 0
}

/// Has the first fragment wait that [`begin`] has made a copy of, if [`hold::note`] says that it was translated; whether it does.
#[inline(always)]
pub fn waits_noted() -> bool {
    npl_wait() != 0
}

/// Whether this is the first fragment of an SCTP packet.
#[inline(always)]
pub const fn is_first<F: Family>(walk: &Walk<F>) -> bool {
    walk.fragment.is_first && walk.fragment.content == protocol::SCTP
}

/// Whether a fragment is the last one of what may be a packet whose first one waits. A later fragment of IPv6 need not say what
/// it is of.
#[inline(always)]
pub const fn is_awaited<F: Family>(walk: &Walk<F>) -> bool {
    walk.fragment.is_last && (walk.fragment.content == protocol::SCTP || walk.fragment.protocol == 0)
}

/// Notes that this is the last fragment of its datagram, for [`recall_noted`]: the two need no stack at the same time.
#[inline(always)]
pub fn note_last<F: Family, H: Hook>(hash: u64, walk: &Walk<F>) {
    let is_sctp = if walk.fragment.content == protocol::SCTP { WAITS } else { 0 };
    if let Some(last) = HOLD.get_ptr_mut(LAST) {
        // SAFETY: this processor's element; nothing else on it runs in between.
        let last = unsafe { &mut *last };
        (last.hash, last.whole) = (mark::<H>(hash), walk.whole() as u32 & WHOLE_BYTES | is_sctp);
    }
}

/// Has the first fragment come to the hook again that has waited for the one at hand, if that is a last one. False if the one at
/// hand is lost by that.
#[inline(always)]
pub fn recall_noted<H: Hook>(skb: *mut __sk_buff) -> bool {
    let Some(last) = HOLD.get_ptr_mut(LAST) else { return true };
    // SAFETY: this processor's element; nothing else on it runs in between.
    let last = unsafe { &mut *last };
    let (mark, whole) = (core::mem::take(&mut last.hash), core::mem::take(&mut last.whole));
    let direction = if H::ON_ARRIVAL { BPF_F_INGRESS } else { 0 };
    mark == 0 || npl_recall(skb, mark, whole, direction) == 0
}

/// What [`begin`] finds. Exported, so that the verifier goes over it by itself.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_look(skb: *mut __sk_buff, mark: u64) -> u32 {
    let Some(place) = FIRST.get_ptr_mut(first_place(mark)) else { return 0 };
    // SAFETY: see `npl_wait`.
    let place = unsafe { &mut *place };
    let is_mine = is_young(place) && place.hash == mark;
    if !is_mine && is_kept(place) {
        return 0;
    }
    place.hash = 0;
    if is_mine && place.whole != 0 {
        return place.whole;
    }
    if copy(skb, place).is_ok() { WAITS } else { 0 }
}

/// What [`tell`] has noted. Exported as [`npl_look`] is, and since there is no stack left where it is asked for.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_told() -> u32 {
    told()
}

/// What [`waits_noted`] does. Exported as [`npl_look`] is.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_wait() -> u32 {
    let is_to_wait = told() & WAITS != 0;
    tell(0);
    let mark = hold::noted();
    if !is_to_wait || mark == 0 {
        return 0;
    }
    let Some(place) = FIRST.get_ptr_mut(first_place(mark)) else { return 0 };
    // SAFETY: aligned memory of the map. Two processors that take one place at a time mix up two packets, whose checksums
    // tell.
    let place = unsafe { &mut *place };
    (place.time, place.whole, place.hash) = (now(), 0, mark);
    1
}

/// What [`end_of_whole`] gives, 0 for nothing. Exported as [`npl_look`] is, which spares the verifier from going over all that
/// follows on a call once more for each chunk that the packet may end at.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_end(skb: *mut __sk_buff, l4: u32, end: u32) -> u32 {
    let told = told();
    match told & WHOLE_BYTES {
        0 if told & WAITS != 0 => end,
        0 => sctp::end_of_cut(&TcContext::new(skb), l4, end),
        bytes => l4 + bytes,
    }
}

/// What [`recall_noted`] does; 1 if the fragment at hand is lost. Exported as [`npl_look`] is.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_recall(skb: *mut __sk_buff, mark: u64, whole: u32, direction: u32) -> u32 {
    let (Some(place), Some(last)) = (FIRST.get_ptr_mut(first_place(mark)), HOLD.get_ptr_mut(LAST)) else { return 0 };
    // SAFETY: see `npl_wait`.
    let first = unsafe { &mut *place };
    let is_mine = is_young(first) && first.hash == mark;
    if !is_mine || first.whole != 0 {
        if whole & WAITS != 0 && (is_mine || !is_kept(first)) {
            // It may come before the first one, which need not wait then.
            (first.time, first.whole, first.hash) = (now(), whole & WHOLE_BYTES, mark);
        }
        return 0;
    }
    if copy(skb, last).is_err() {
        return 0;
    }
    (first.time, first.whole) = (now(), whole & WHOLE_BYTES | AGAIN);
    // Nobody has verified the checksum of what is received again.
    // SAFETY: the context is valid. There may be nothing to forget.
    let _level = unsafe { bpf_csum_level(skb, u64::from(BPF_CSUM_LEVEL_RESET)) };
    if become_frame(skb, place).is_ok() {
        // SAFETY: the context is valid. One that the kernel has no room for is lost, as on any device.
        let _lost = unsafe { bpf_clone_redirect(skb, (*skb).ifindex, u64::from(direction)) };
    }
    u32::from(become_frame(skb, last).is_err())
}

/// Whether what a place has is of now.
#[inline(always)]
fn is_young(place: &Held) -> bool {
    place.hash != 0 && now().wrapping_sub(place.time) < WAIT_NS
}

/// Whether a place has a first fragment that waits, or comes again. What a last one has told yields to others.
#[inline(always)]
fn is_kept(place: &Held) -> bool {
    is_young(place) && (place.whole == 0 || place.whole & AGAIN != 0)
}

/// Notes what is known of the whole that the packet at hand is the first fragment of.
#[inline(always)]
fn tell(whole: u32) {
    if let Some(last) = HOLD.get_ptr_mut(LAST) {
        // SAFETY: this processor's element; nothing else on it runs in between.
        unsafe { (*last).whole = whole };
    }
}

/// What [`tell`] has noted; 0 of all but first fragments of SCTP.
#[inline(always)]
fn told() -> u32 {
    // SAFETY: as in `tell`.
    HOLD.get_ptr_mut(LAST).map_or(0, |last| unsafe { (*last).whole })
}

/// Nanoseconds.
#[inline(always)]
fn now() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_ns() }
}
