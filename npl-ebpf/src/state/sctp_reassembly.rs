// SPDX-License-Identifier: GPL-2.0-only
//! Accesses the SCTP reassembly buffer. A first fragment of an SCTP packet waits in this buffer until the last fragment
//! shows the datagram's length. The program needs the datagram's length to update the SCTP checksum, which is in the
//! first fragment.
//!
//! The saved first fragment then overwrites the last fragment's skb and is re-injected. Fragments between the first and
//! the last do not wait, because the receiver accepts fragments in any order.

use core::num::NonZeroUsize;

use aya_ebpf::{
    bindings::{__sk_buff, BPF_CSUM_LEVEL_RESET, BPF_F_INGRESS},
    helpers::generated::{bpf_clone_redirect, bpf_csum_level},
    programs::TcContext,
};
use npl_common::{
    fragment_buffer::{LAST, LENGTH_MASK, REINJECTED, SavedFrame, WAIT_NS, WAITING, sctp_slot},
    mapping::protocol,
};

use super::fragment_buffer::{self, key, load_frame, save_frame};
use crate::{
    base::{
        cell::field,
        clock::nanoseconds,
        context::skb,
        maps::{FRAGMENT_BUFFER, SCTP_BUFFER},
    },
    net::{
        family::{HeaderChain, HeaderLayout, Headers},
        sctp,
    },
};

/// For a first fragment, looks up the length of the datagram. If the last fragment has not arrived yet and the
/// datagram's slot is available, saves a copy of the first fragment.
#[inline(always)]
pub fn begin(ctx: &TcContext, hash: u64, on_arrival: bool) {
    set_noted(npl_sctp_lookup(skb(ctx), key(hash, on_arrival)));
}

/// Returns the offset of the end of a first fragment's datagram. If the last fragment has already arrived, the
/// datagram's length is known, and the result is exact. If the first fragment waits for the last fragment, the result
/// is the end of the first fragment itself: the checksum is updated later, when the first fragment is re-injected.
/// Otherwise, the function estimates the end from the fragment's chunks, and returns `None` if no chunk extends beyond
/// the fragment.
#[inline(always)]
pub fn datagram_end<F: HeaderLayout>(ctx: &TcContext, chain: &HeaderChain<F>) -> Option<NonZeroUsize> {
    NonZeroUsize::new(npl_sctp_end(skb(ctx), chain.headers.l4 as u32, chain.end as u32) as usize)
}

/// Returns whether the packet is a re-injected first fragment, which was already counted on arrival.
#[inline(always)]
pub fn is_reinjected<F: HeaderLayout>(headers: &Headers<F>) -> bool {
    !headers.is_fast_path && npl_sctp_noted() & REINJECTED != 0
}

/// If the current packet is a translated first fragment that must wait, keeps its saved copy in the buffer for the last
/// fragment. Returns whether the copy is kept.
#[inline(always)]
pub fn hold_noted() -> bool {
    npl_sctp_wait() != 0
}

/// Returns whether the packet is the first fragment of an SCTP packet.
#[inline(always)]
pub const fn is_first<F: HeaderLayout>(chain: &HeaderChain<F>) -> bool {
    chain.fragment.is_first && chain.fragment.content == protocol::SCTP
}

/// Returns whether the packet can be the last fragment of an SCTP packet: a later IPv6 fragment need not name the
/// transport protocol.
#[inline(always)]
pub const fn may_be_last<F: HeaderLayout>(chain: &HeaderChain<F>) -> bool {
    chain.fragment.is_last && (chain.fragment.content == protocol::SCTP || chain.fragment.protocol == 0)
}

/// Stores the key and the length of a last fragment's datagram for [`reinject_first`], which runs later in another
/// stack frame.
#[inline(always)]
pub fn note_last<F: HeaderLayout>(hash: u64, chain: &HeaderChain<F>, on_arrival: bool) {
    let is_sctp = if chain.fragment.content == protocol::SCTP { WAITING } else { 0 };
    if let Some(last) = FRAGMENT_BUFFER.get_ptr_mut(LAST) {
        field!(last, hash).store(key(hash, on_arrival));
        field!(last, datagram_length).store(chain.datagram_length() as u32 & LENGTH_MASK | is_sctp);
    }
}

/// If the current packet is a last fragment whose key [`note_last`] has stored, re-injects the saved first fragment of
/// the same datagram. If no first fragment of the datagram is saved, but the slot is free, stores the length of the
/// SCTP datagram for a first fragment that arrives later. Returns `false` if the last fragment is lost, because the
/// function could not write it back to the skb after the re-injection.
#[inline(always)]
pub fn reinject_first(skb: *mut __sk_buff, on_arrival: bool) -> bool {
    let Some(last) = FRAGMENT_BUFFER.get_ptr_mut(LAST) else { return true };
    let (key, length) = (field!(last, hash).replace(0), field!(last, datagram_length).replace(0));
    let direction = if on_arrival { BPF_F_INGRESS } else { 0 };
    key == 0 || npl_sctp_recall(skb, key, length, direction) == 0
}

/// Implements [`begin`]. The function is exported, so that the verifier checks it separately from its callers.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_sctp_lookup(skb: *mut __sk_buff, key: u64) -> u32 {
    let Some(slot) = SCTP_BUFFER.get_ptr_mut(sctp_slot(key)) else { return 0 };
    let hash = field!(slot, hash);
    let is_same = is_fresh(slot) && hash.load() == key;
    if !is_same && is_occupied(slot) {
        return 0;
    }
    hash.store(0);
    let length = field!(slot, datagram_length).load();
    if is_same && length != 0 {
        return length;
    }
    if save_frame(skb, slot).is_ok() { WAITING } else { 0 }
}

/// Implements [`noted`]. The function is exported for the same reason as [`npl_sctp_lookup`]; it is not inlined,
/// because its callers have no free stack space.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_sctp_noted() -> u32 {
    noted()
}

/// Implements [`hold_noted`]. The function is exported for the same reason as [`npl_sctp_lookup`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_sctp_wait() -> u32 {
    let waits = noted() & WAITING != 0;
    set_noted(0);
    let key = fragment_buffer::noted();
    if !waits || key == 0 {
        return 0;
    }
    let Some(slot) = SCTP_BUFFER.get_ptr_mut(sctp_slot(key)) else { return 0 };
    // If two processors write one slot concurrently, the slot contains a mixture of two packets. The receiver drops the
    // mixture, because the checksum does not match.
    field!(slot, time).store(nanoseconds());
    field!(slot, datagram_length).store(0);
    field!(slot, hash).store(key);
    1
}

/// Implements [`datagram_end`]. Returns 0 if the end is unknown. The function is exported, so that the verifier checks
/// the instructions after the call once, and not once for each number of chunks that the function may parse.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_sctp_end(skb: *mut __sk_buff, l4: u32, end: u32) -> u32 {
    let noted = noted();
    match noted & LENGTH_MASK {
        0 if noted & WAITING != 0 => end,
        0 => sctp::end_of_cut_chunk(&TcContext::new(skb), l4, end),
        length => l4 + length,
    }
}

/// Implements [`reinject_first`]. Returns 1 if the last fragment could not be restored to its skb and is lost;
/// otherwise 0. The function is exported for the same reason as [`npl_sctp_lookup`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_sctp_recall(skb: *mut __sk_buff, key: u64, length: u32, direction: u32) -> u32 {
    let (Some(first), Some(last)) = (SCTP_BUFFER.get_ptr_mut(sctp_slot(key)), FRAGMENT_BUFFER.get_ptr_mut(LAST)) else {
        return 0;
    };
    let (time, known_length, hash) = (field!(first, time), field!(first, datagram_length), field!(first, hash));
    let is_same = is_fresh(first) && hash.load() == key;
    if !is_same || known_length.load() != 0 {
        if length & WAITING != 0 && (is_same || !is_occupied(first)) {
            // If the last fragment arrives before the first fragment, the datagram's length is stored, and the first
            // fragment does not wait.
            time.store(nanoseconds());
            known_length.store(length & LENGTH_MASK);
            hash.store(key);
        }
        return 0;
    }
    if save_frame(skb, last).is_err() {
        return 0;
    }
    time.store(nanoseconds());
    known_length.store(length & LENGTH_MASK | REINJECTED);
    // The device has not verified the checksum of a re-injected packet. SAFETY: the context is valid. If the skb has no
    // checksum level to reset, the helper returns an error.
    let _level = unsafe { bpf_csum_level(skb, u64::from(BPF_CSUM_LEVEL_RESET)) };
    if load_frame(skb, first).is_ok() {
        // SAFETY: the context is valid. If the queue of the device is full, the kernel drops the fragment, as it drops
        // any packet.
        let _lost = unsafe { bpf_clone_redirect(skb, (*skb).ifindex, u64::from(direction)) };
    }
    u32::from(load_frame(skb, last).is_err())
}

/// Returns whether a slot contains a first fragment or a datagram's length, and this content has not expired.
#[inline(always)]
fn is_fresh(slot: *mut SavedFrame) -> bool {
    field!(slot, hash).load() != 0 && nanoseconds().wrapping_sub(field!(slot, time).load()) < WAIT_NS
}

/// Returns whether a slot contains a first fragment that waits or is being re-injected. A slot that contains only the
/// length of a datagram counts as free.
#[inline(always)]
fn is_occupied(slot: *mut SavedFrame) -> bool {
    let length = field!(slot, datagram_length).load();
    is_fresh(slot) && (length == 0 || length & REINJECTED != 0)
}

/// Stores the value that [`noted`] returns in the later steps. For a first fragment, `length` is the datagram's length
/// if the last fragment has already arrived, [`WAITING`] if a copy of the first fragment was saved, and otherwise 0.
#[inline(always)]
fn set_noted(length: u32) {
    if let Some(last) = FRAGMENT_BUFFER.get_ptr_mut(LAST) {
        field!(last, datagram_length).store(length);
    }
}

/// Returns the value that [`set_noted`] or [`note_last`] has stored; 0 unless the current packet is a first SCTP
/// fragment, or may be a last SCTP fragment.
#[inline(always)]
fn noted() -> u32 {
    FRAGMENT_BUFFER.get_ptr_mut(LAST).map_or(0, |last| field!(last, datagram_length).load())
}
