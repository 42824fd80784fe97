// SPDX-License-Identifier: GPL-2.0-only
//! The fragment buffer contains copies of early fragments, which arrive before the first fragment of their datagram. An
//! early fragment cannot be translated on arrival, because only the first fragment has ports.
//!
//! The early fragment itself is passed to the host unchanged. After the first fragment is translated, each saved copy
//! in turn overwrites the first fragment's skb, and is re-injected at the same hook.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_CSUM_LEVEL_RESET, BPF_F_INGRESS, BPF_F_RECOMPUTE_CSUM},
    helpers::generated::{
        bpf_clone_redirect, bpf_csum_level, bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_store_bytes,
    },
    programs::TcContext,
};
use npl_common::{
    fragment::is_over,
    fragment_buffer::{CURSOR, FRAGMENTS, FRAME_EXCESS, MIN_FRAME, SAVED, SavedFrame},
};

use crate::base::{cell::field, clock::coarse_seconds, context::skb, error::RewriteError, maps::FRAGMENT_BUFFER};

/// Returns the key of a datagram's saved fragments. The key depends on the hook (`on_arrival` is true at ingress),
/// because a copy may be re-injected only at the hook at which the copy was saved.
#[inline(always)]
pub const fn key(hash: u64, on_arrival: bool) -> u64 {
    if on_arrival { hash } else { !hash }
}

/// Saves a copy of a fragment in place of this processor's oldest copy. A frame that is longer than an element of the
/// buffer is not saved.
#[inline(always)]
pub fn save(ctx: &TcContext, hash: u64, on_arrival: bool) {
    let Some(cursor) = FRAGMENT_BUFFER.get_ptr_mut(CURSOR) else { return };
    let (next, now) = (field!(cursor, excess), coarse_seconds());
    let slot = next.load();
    next.store(if slot + 1 < FRAGMENTS { slot + 1 } else { 0 });
    field!(cursor, time).store(now);
    if let Some(saved) = FRAGMENT_BUFFER.get_ptr_mut(slot) {
        let is_saved = save_frame(skb(ctx), saved).is_ok();
        field!(saved, hash).store(if is_saved { key(hash, on_arrival) } else { 0 });
        field!(saved, time).store(now);
    }
}

/// Stores the key of a datagram whose first fragment was translated, for [`reinject_noted`], which runs later in
/// another stack frame.
#[inline(always)]
pub fn note_translated(hash: u64, on_arrival: bool) {
    if let Some(cursor) = FRAGMENT_BUFFER.get_ptr_mut(CURSOR) {
        field!(cursor, hash).store(key(hash, on_arrival));
    }
}

/// Returns the key that [`note_translated`] stored, or 0.
#[inline(always)]
pub fn noted() -> u64 {
    FRAGMENT_BUFFER.get_ptr_mut(CURSOR).map_or(0, |cursor| field!(cursor, hash).load())
}

/// Re-injects the saved fragments of the datagram whose key [`note_translated`] stored. Returns `false` if the first
/// fragment is lost, because the function could not write it back to the skb after the re-injection.
#[inline(always)]
pub fn reinject_noted(skb: *mut __sk_buff, on_arrival: bool) -> bool {
    let Some(cursor) = FRAGMENT_BUFFER.get_ptr_mut(CURSOR) else { return true };
    let noted = field!(cursor, hash).replace(0);
    noted == 0 || reinject_all(skb, noted, if on_arrival { 0 } else { LEAVES })
}

/// Flag in the argument `state` of [`npl_frag_release`]: the first fragment is saved, and its skb contains another
/// frame.
const IS_SAVED: u32 = 1;
/// Flag in the argument `state` of [`npl_frag_release`]: the hook is egress, so the device sends the fragments.
const LEAVES: u32 = 2;

/// Re-injects all saved fragments of a datagram, then restores the first fragment in its skb.
///
/// The loop over the slots is unrolled: without `CAP_PERFMON`, the verifier of Linux 6.12 also follows mispredicted
/// branches, and therefore cannot prove that a loop ends.
#[inline(never)]
fn reinject_all(skb: *mut __sk_buff, key: u64, mut state: u32) -> bool {
    let now = coarse_seconds();
    let Some(cursor) = FRAGMENT_BUFFER.get_ptr_mut(CURSOR) else { return true };
    if is_over(field!(cursor, time).load(), now) {
        return true;
    }
    macro_rules! reinject_each {
        ($($slot:literal)*) => {
            $(state = npl_frag_release(skb, key, now, $slot, state);)*
            const { assert!([$($slot),*].len() == FRAGMENTS as usize, "the list must contain every slot") };
        };
    }
    reinject_each!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    let Some(first) = FRAGMENT_BUFFER.get_ptr_mut(SAVED) else { return true };
    state & IS_SAVED == 0 || load_frame(skb, first).is_ok()
}

/// Re-injects the fragment in one slot if the fragment belongs to the datagram `key`. Returns the new value of `state`,
/// a set of flags. The function is exported, so that the verifier checks it once instead of once per call.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_frag_release(skb: *mut __sk_buff, key: u64, now: u64, slot: u32, state: u32) -> u32 {
    let (Some(saved), Some(first)) = (FRAGMENT_BUFFER.get_ptr_mut(slot), FRAGMENT_BUFFER.get_ptr_mut(SAVED)) else {
        return state;
    };
    let hash = field!(saved, hash);
    if hash.load() != key || is_over(field!(saved, time).load(), now) {
        return state;
    }
    hash.store(0);
    if state & IS_SAVED == 0 {
        if save_frame(skb, first).is_err() {
            return state;
        }
        // Resets the checksum level, because the device has not verified the checksum of a re-injected packet. SAFETY:
        // the context is valid. If the skb has no checksum level to reset, the helper returns an error.
        let _level = unsafe { bpf_csum_level(skb, u64::from(BPF_CSUM_LEVEL_RESET)) };
    }
    if load_frame(skb, saved).is_ok() {
        let direction = if state & LEAVES == 0 { u64::from(BPF_F_INGRESS) } else { 0 };
        // SAFETY: the context is valid. If the queue of the device is full, the kernel drops the fragment, as it drops
        // any packet.
        let _lost = unsafe { bpf_clone_redirect(skb, (*skb).ifindex, direction) };
    }
    state | IS_SAVED
}

/// Copies a packet's frame to an element of the buffer.
#[inline(always)]
pub fn save_frame(skb: *mut __sk_buff, to: *mut SavedFrame) -> Result<(), RewriteError> {
    // SAFETY: the context is valid, and the verifier allows a program to read this field of the context.
    field!(to, excess).store(unsafe { (*skb).len }.wrapping_sub(MIN_FRAME));
    let length = length(to)?;
    // SAFETY: the context is valid, and the element has room for `length` bytes.
    let status = unsafe { bpf_skb_load_bytes(skb.cast(), 0, (&raw mut (*to).frame).cast(), length) };
    if status == 0 { Ok(()) } else { Err(RewriteError) }
}

/// Overwrites a packet with a saved frame. The packet gets the length of the frame.
#[inline(always)]
pub fn load_frame(skb: *mut __sk_buff, from: *mut SavedFrame) -> Result<(), RewriteError> {
    let length = length(from)?;
    // SAFETY: the context is valid, and the program holds no pointer into the packet.
    if unsafe { bpf_skb_change_tail(skb, length, 0) } != 0 {
        return Err(RewriteError);
    }
    let flags = u64::from(BPF_F_RECOMPUTE_CSUM);
    // SAFETY: the context is valid, the program holds no pointer into the packet, and the element has `length` bytes.
    let status = unsafe { bpf_skb_store_bytes(skb, 0, (&raw const (*from).frame).cast(), length, flags) };
    if status == 0 { Ok(()) } else { Err(RewriteError) }
}

/// Returns the length of a saved frame in bytes. The element stores the length minus the minimum length, so that a
/// single comparison shows the verifier both bounds of the length. The compiler would merge two comparisons into one
/// that shows the verifier neither bound.
#[inline(always)]
fn length(frame: *mut SavedFrame) -> Result<u32, RewriteError> {
    let excess = field!(frame, excess).load();
    if excess > FRAME_EXCESS { Err(RewriteError) } else { Ok(excess + MIN_FRAME) }
}
