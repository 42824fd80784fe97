// SPDX-License-Identifier: GPL-2.0-only
//! What both hooks have in common: how a packet is read that is a plain one with ports, as nearly all are.

use aya_ebpf::programs::TcContext;

use crate::{
    family::{Family, V4, V6, Walk},
    flow::NodeEnd,
    packet::{self, IcmpHeader, Packet},
    verdict::Verdict,
};

/// How what was translated goes on: by the host's stack.
pub const STACK: u8 = 0;
/// Past the stack, where that can be.
pub const DIRECT: u8 = 1;
/// Past the stack, where that can be, while the stack lets the flow through.
pub const OFFLOAD: u8 = 2;
/// By the stack, and it is noted that it has let the flow through.
pub const WITNESS: u8 = 3;

/// What is done at one of the two hooks.
pub trait Hook {
    /// The end of a packet that is rewritten.
    const END: bool;
    /// Whether packets come in by their device, and do not leave by it.
    const ON_ARRIVAL: bool;

    /// Judges and rewrites a packet with ports, which is a plain one or was walked through; `note` is told what its client believes it talks to.
    fn packet<F: Family, const L2: usize, const IS_PLAIN: bool>(
        ctx: &TcContext,
        packet: &Packet<F>,
        note: impl FnOnce(&NodeEnd<F>),
    ) -> Verdict;
    /// Judges and rewrites a fragment that is not the first, and has no ports.
    fn later_fragment<F: Family, const L2: usize>(ctx: &TcContext, walk: Walk<F>) -> Verdict;
    /// Judges and rewrites an ICMP error.
    fn error<F: Family, const L2: usize>(ctx: &TcContext, outer: Walk<F>, header: IcmpHeader) -> Verdict;
}

/// Judges and rewrites one packet whose IP header starts `L2` bytes in.
#[inline(always)]
pub fn translate<H: Hook, const L2: usize>(ctx: &TcContext) -> Verdict {
    match packet::ether_type(ctx) {
        Some(V4::ETHER_TYPE) => translate_family::<V4, H, L2>(ctx),
        Some(V6::ETHER_TYPE) => translate_family::<V6, H, L2>(ctx),
        _ => Verdict::NOT_OURS,
    }
}

#[inline(always)]
fn translate_family<F: Family, H: Hook, const L2: usize>(ctx: &TcContext) -> Verdict {
    match Packet::<F>::read::<L2>(ctx) {
        Ok(packet) => H::packet::<F, L2, true>(ctx, &packet, |_| ()),
        Err(other) => other.into(),
    }
}
