// SPDX-License-Identifier: GPL-2.0-only
//! Reads and writes stack observations for `--forwarding offload`, see [`npl_common::offload`].

use npl_common::{
    half_open,
    offload::{self, Decision, StackSeen, since},
};

use super::maps::Family;
use crate::{
    base::{
        cell::{Cell, field},
        clock::jiffies,
    },
    net::headers::tcp_flag,
};

/// Returns whether a packet of a flow bypasses the host's stack. If the packet opens or ends the connection, or if the
/// stack observation of the packet's direction has expired, also updates the flow's stack observations. `REPLY` is true
/// for a packet from the Pod.
#[inline(always)]
pub fn decide_offload<F: Family, const REPLY: bool>(hash: u64, generation: u32, tcp_flags: u8) -> bool {
    let Some(flow) = ObservedFlow::of::<F>(hash, generation) else { return false };
    if tcp_flags & tcp_flag::OPENS_OR_ENDS != 0 {
        flow.set_both(if tcp_flags & tcp_flag::SYN != 0 { since::NEVER } else { since::ENDED });
        return false;
    }
    let (own, other) = flow.directions::<REPLY>();
    match offload::decide(own.load(), other.load(), flow.tag, jiffies()) {
        Decision::Offload => true,
        Decision::Stack => false,
        Decision::Observe => {
            own.store(offload::word(flow.tag, since::PENDING));
            false
        }
    }
}

/// Records that the host's stack forwarded a packet of a flow.
#[inline(always)]
pub fn record<F: Family, const REPLY: bool>(hash: u64, generation: u32, tcp_flags: u8) {
    if tcp_flags & tcp_flag::OPENS_OR_ENDS != 0 {
        return;
    }
    let Some(flow) = ObservedFlow::of::<F>(hash, generation) else { return };
    let (own, _) = flow.directions::<REPLY>();
    if let Some(word) = offload::observe(own.load(), flow.tag, jiffies()) {
        own.store(word);
    }
}

/// A flow's slot in `npl_stkseen_v4` or `npl_stkseen_v6`, and the flow's tag in this slot.
struct ObservedFlow {
    seen: *mut StackSeen,
    tag: u32,
}

impl ObservedFlow {
    #[inline(always)]
    fn of<F: Family>(hash: u64, generation: u32) -> Option<Self> {
        Some(Self { seen: F::stack_seen(half_open::slot(hash))?, tag: offload::tag(hash, generation) })
    }

    /// Returns the words of the flow's slot: first the word of the packet's own direction, then the word of the
    /// opposite direction.
    #[inline(always)]
    fn directions<const REPLY: bool>(&self) -> (Cell<u64>, Cell<u64>) {
        let (request, reply) = (field!(self.seen, request), field!(self.seen, reply));
        if REPLY { (reply, request) } else { (request, reply) }
    }

    /// Writes `since` to the word of each direction, unless the word belongs to another flow or contains
    /// [`since::NEVER`].
    #[inline(always)]
    fn set_both(&self, since: u32) {
        let (request, reply) = self.directions::<false>();
        for word in [request, reply] {
            if offload::since_of(word.load(), self.tag) != since::NEVER {
                word.store(offload::word(self.tag, since));
            }
        }
    }
}
