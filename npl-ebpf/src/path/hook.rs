// SPDX-License-Identifier: GPL-2.0-only
//! Contains the first steps of the fast path, which are the same for requests and replies. The fast path translates
//! unfragmented TCP and UDP packets without IPv4 options or IPv6 extension headers.

use aya_ebpf::programs::TcContext;

use super::trace;
use crate::{
    act::redirect,
    base::{context, verdict::Verdict},
    net::{
        V4, V6,
        family::{HeaderChain, HeaderLayout as _},
        headers::IcmpHeader,
        packet::Packet,
    },
    state::{maps::Family, tuple::NatAddress},
};

/// How one kind of program translates packets: [`Requests`](super::request::Requests) or
/// [`Replies`](super::reply::Replies).
pub trait Hook {
    /// Which address and port the program rewrites: [`SOURCE`](crate::act::rewrite::SOURCE) or
    /// [`DESTINATION`](crate::act::rewrite::DESTINATION).
    const SIDE: bool;
    /// True if the program runs at TC ingress of a device, and false if the program runs at TC egress.
    const ON_ARRIVAL: bool;

    /// Translates, passes or drops a packet with ports. The function calls `on_nat` with the NAT address if the packet
    /// is translated, or if the packet is dropped because the mapping's allow-list excludes the packet's source.
    fn packet<F: Family, const L2: usize, const FAST_PATH: bool>(
        ctx: &TcContext,
        packet: &Packet<F>,
        on_nat: impl FnOnce(&NatAddress<F>),
    ) -> Verdict;
    /// Translates, passes or drops a later fragment, which has no ports.
    fn later_fragment<F: Family, const L2: usize>(ctx: &TcContext, chain: HeaderChain<F>) -> Verdict;
    /// Translates, passes or drops an ICMP error.
    fn error<F: Family, const L2: usize>(ctx: &TcContext, outer: HeaderChain<F>, header: IcmpHeader) -> Verdict;
}

/// Translates, passes or drops one packet whose IP header starts at offset `L2`.
#[inline(always)]
pub fn translate<H: Hook, const L2: usize>(ctx: &TcContext) -> Verdict {
    match context::ether_type(ctx) {
        Some(V4::ETHER_TYPE) => trace::packet::<V4, H, L2>(ctx, translate_family::<V4, H, L2>),
        Some(V6::ETHER_TYPE) => trace::packet::<V6, H, L2>(ctx, translate_family::<V6, H, L2>),
        _ => Verdict::UNRELATED,
    }
}

#[inline(always)]
fn translate_family<F: Family, H: Hook, const L2: usize>(ctx: &TcContext) -> Verdict {
    if !H::ON_ARRIVAL && redirect::is_marked(ctx) {
        return Verdict::UNRELATED;
    }
    match Packet::<F>::parse::<L2>(ctx) {
        Ok(packet) => H::packet::<F, L2, true>(ctx, &packet, |_| ()),
        Err(unparsed) => unparsed.into(),
    }
}
