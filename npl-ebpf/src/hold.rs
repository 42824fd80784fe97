// SPDX-License-Identifier: GPL-2.0-only
//! Fragments that come before the first of their datagram: copies of them wait until it is known whether they are ours.
//!
//! The fragment itself goes on meanwhile, to the host or the network that it may be for. When the first one turns out to be
//! ours, its buffer lends itself to the copies, one after the other, and each comes to the hook once more.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_CSUM_LEVEL_RESET, BPF_F_INGRESS, BPF_F_RECOMPUTE_CSUM},
    helpers::generated::{
        bpf_clone_redirect, bpf_csum_level, bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_store_bytes,
    },
    programs::TcContext,
};
use npl_common::hold::{CURSOR, FRAME_EXCESS, Held, MIN_FRAME, PLACES, SAVED};

use crate::{fragment, hook::Hook, maps::HOLD, packet, rewrite::Refused};

/// What the held fragments of a datagram are told by. At one hook: their frames are of no use at the next, which may have the
/// same datagram.
#[inline(always)]
pub const fn mark<H: Hook>(hash: u64) -> u64 {
    if H::ON_ARRIVAL { hash } else { !hash }
}

/// Keeps a copy of a fragment, in the place of the oldest one that this processor has. A longer one is not kept.
#[inline(always)]
pub fn keep<H: Hook>(ctx: &TcContext, hash: u64) {
    let Some(cursor) = HOLD.get_ptr_mut(CURSOR) else { return };
    // SAFETY: this processor's element; nothing else on it runs in between.
    let cursor = unsafe { &mut *cursor };
    let place = cursor.excess;
    cursor.excess = if place + 1 < PLACES { place + 1 } else { 0 };
    cursor.time = fragment::now();
    if let Some(held) = HOLD.get_ptr_mut(place) {
        let is_kept = copy(packet::skb(ctx), held).is_ok();
        // SAFETY: as above.
        let held = unsafe { &mut *held };
        (held.hash, held.time) = (if is_kept { mark::<H>(hash) } else { 0 }, cursor.time);
    }
}

/// Has a datagram's fragments that came before its first one come to the hook again, if one was just translated there.
#[inline(always)]
pub fn release_noted<H: Hook>(skb: *mut __sk_buff) -> bool {
    let Some(cursor) = HOLD.get_ptr_mut(CURSOR) else { return true };
    // SAFETY: this processor's element; nothing else on it runs in between.
    let hash = unsafe { &mut (*cursor).hash };
    let noted = core::mem::take(hash);
    noted == 0 || release(skb, noted, if H::ON_ARRIVAL { 0 } else { LEAVES })
}

/// Notes that the first fragment of a datagram was translated, for [`release_noted`]: the two need no stack at the same time.
#[inline(always)]
pub fn note<H: Hook>(hash: u64) {
    if let Some(cursor) = HOLD.get_ptr_mut(CURSOR) {
        // SAFETY: this processor's element; nothing else on it runs in between.
        unsafe { (*cursor).hash = mark::<H>(hash) };
    }
}

/// What [`note`] has noted, or 0.
#[inline(always)]
pub fn noted() -> u64 {
    // SAFETY: this processor's element; nothing else on it runs in between.
    HOLD.get_ptr_mut(CURSOR).map_or(0, |cursor| unsafe { (*cursor).hash })
}

/// Of what [`npl_release`] is told: the first fragment is saved; what is held leaves by the device, and did not come by it.
const IS_SAVED: u32 = 1;
const LEAVES: u32 = 2;

/// Has all fragments of a datagram come to the hook again that came before its first one, which is as it was afterwards.
///
/// One after the other without a loop: a processor may guess that one goes on for ever, and the verifier of a program
/// without `CAP_PERFMON` follows it there. Linux 6.12 finds no end.
#[inline(never)]
fn release(skb: *mut __sk_buff, hash: u64, mut state: u32) -> bool {
    let now = fragment::now();
    let Some(cursor) = HOLD.get_ptr_mut(CURSOR) else { return true };
    // SAFETY: this processor's element; nothing else on it runs in between.
    if npl_common::fragment::is_over(unsafe { (*cursor).time }, now) {
        return true;
    }
    macro_rules! release_all {
        ($($place:literal)*) => {
            $(state = npl_release(skb, hash, now, $place, state);)*
            const { assert!([$($place),*].len() == PLACES as usize, "each place is looked at") };
        };
    }
    release_all!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    let Some(saved) = HOLD.get_ptr_mut(SAVED) else { return true };
    state & IS_SAVED == 0 || become_frame(skb, saved).is_ok()
}

/// Has the fragment in a place come again, if it is of this datagram, by the buffer of the first one, which is saved before
/// that; the new state. Exported, so that the verifier goes over it once, and not for each place.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_release(skb: *mut __sk_buff, hash: u64, now: u64, place: u32, state: u32) -> u32 {
    let (Some(held), Some(saved)) = (HOLD.get_ptr_mut(place), HOLD.get_ptr_mut(SAVED)) else { return state };
    // SAFETY: this processor's element; nothing else on it runs in between.
    let fragment = unsafe { &mut *held };
    if fragment.hash != hash || npl_common::fragment::is_over(fragment.time, now) {
        return state;
    }
    fragment.hash = 0;
    if state & IS_SAVED == 0 {
        if copy(skb, saved).is_err() {
            return state;
        }
        // Nobody has verified the checksum of what is received again.
        // SAFETY: the context is valid. There may be nothing to forget.
        let _level = unsafe { bpf_csum_level(skb, u64::from(BPF_CSUM_LEVEL_RESET)) };
    }
    if become_frame(skb, held).is_ok() {
        let direction = if state & LEAVES == 0 { u64::from(BPF_F_INGRESS) } else { 0 };
        // SAFETY: the context is valid. One that the kernel has no room for is lost, as on any device.
        let _lost = unsafe { bpf_clone_redirect(skb, (*skb).ifindex, direction) };
    }
    state | IS_SAVED
}

/// Copies a frame out.
#[inline(always)]
pub fn copy(skb: *mut __sk_buff, to: *mut Held) -> Result<(), Refused> {
    // SAFETY: the context is valid, and the element is this processor's.
    let length = unsafe {
        (*to).excess = (*skb).len.wrapping_sub(MIN_FRAME);
        length(to)?
    };
    // SAFETY: no more than the element has room for.
    let status = unsafe { bpf_skb_load_bytes(skb.cast(), 0, (&raw mut (*to).frame).cast(), length) };
    if status == 0 { Ok(()) } else { Err(Refused) }
}

/// Gives a packet the length and the bytes of a copy.
#[inline(always)]
pub fn become_frame(skb: *mut __sk_buff, from: *mut Held) -> Result<(), Refused> {
    let length = length(from)?;
    // SAFETY: the context is valid, and no pointer into the packet is held.
    if unsafe { bpf_skb_change_tail(skb, length, 0) } != 0 {
        return Err(Refused);
    }
    let flags = u64::from(BPF_F_RECOMPUTE_CSUM);
    // SAFETY: no more than the element has.
    let status = unsafe { bpf_skb_store_bytes(skb, 0, (&raw const (*from).frame).cast(), length, flags) };
    if status == 0 { Ok(()) } else { Err(Refused) }
}

/// The bytes of a copy. The verifier has to see both bounds on the very number that it is given, and the compiler would
/// make one comparison of two: so what is kept is a number whose lower bound is zero.
#[inline(always)]
fn length(held: *mut Held) -> Result<u32, Refused> {
    // SAFETY: this processor's element, aligned.
    let excess = unsafe { (&raw const (*held).excess).read_volatile() };
    if excess > FRAME_EXCESS { Err(Refused) } else { Ok(excess + MIN_FRAME) }
}
