// SPDX-License-Identifier: GPL-2.0-only
//! Which packets go past the host's stack with `--forwarding offload`: see [`npl_common::offload`].

use npl_common::{
    offload::{self, Decision, Passed, since},
    syn,
};

use crate::{
    family::Family,
    flow::jiffies,
    packet::tcp_flag,
    word::{load, store},
};

/// Whether a packet of a flow may go past the host's stack, as one of its replies or of its requests.
#[inline(always)]
pub fn is_offloaded<F: Family, const REPLY: bool>(hash: u64, generation: u32, tcp_flags: u8) -> bool {
    let Some(slot) = Slot::of::<F>(hash, generation) else { return false };
    if tcp_flags & tcp_flag::OPENS_OR_ENDS != 0 {
        slot.set_both(if tcp_flags & tcp_flag::SYN != 0 { since::NEVER } else { since::ENDED });
        return false;
    }
    let (mine, other) = slot.words::<REPLY>();
    match offload::decide(load(mine), load(other), slot.tag, jiffies()) {
        Decision::Offload => true,
        Decision::Stack => false,
        Decision::Ask => {
            store(mine, offload::word(slot.tag, since::ASKED));
            false
        }
    }
}

/// Notes that the host's stack has let a packet of a flow through.
#[inline(always)]
pub fn note_passed<F: Family, const REPLY: bool>(hash: u64, generation: u32, tcp_flags: u8) {
    if tcp_flags & tcp_flag::OPENS_OR_ENDS != 0 {
        return;
    }
    let Some(slot) = Slot::of::<F>(hash, generation) else { return };
    let (mine, _) = slot.words::<REPLY>();
    if let Some(word) = offload::passed(load(mine), slot.tag, jiffies()) {
        store(mine, word);
    }
}

/// Where a flow's words are.
struct Slot {
    passed: *mut Passed,
    tag: u32,
}

impl Slot {
    #[inline(always)]
    fn of<F: Family>(hash: u64, generation: u32) -> Option<Self> {
        Some(Self { passed: F::offload_slot(syn::slot(hash))?, tag: offload::tag(hash, generation) })
    }

    /// The word of this direction, and that of the other one.
    #[inline(always)]
    const fn words<const REPLY: bool>(&self) -> (*mut u64, *mut u64) {
        // SAFETY: a pointer to a map element of this type.
        let (request, reply) = unsafe { (&raw mut (*self.passed).request, &raw mut (*self.passed).reply) };
        if REPLY { (reply, request) } else { (request, reply) }
    }

    /// Notes the same of both directions, where they are this flow's.
    #[inline(always)]
    fn set_both(&self, since: u32) {
        let (request, reply) = self.words::<false>();
        for word in [request, reply] {
            if offload::since_of(load(word), self.tag) != since::NEVER {
                store(word, offload::word(self.tag, since));
            }
        }
    }
}
