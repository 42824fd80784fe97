// SPDX-License-Identifier: GPL-2.0-only
//! ICMP errors, which quote the packet that they are about as it was where it was lost.

use core::num::NonZeroUsize;

use aya_ebpf::programs::TcContext;
use npl_common::reason::Reason;

use super::{
    family::{HeaderChain, HeaderLayout},
    headers::{IcmpHeader, Ports, has_ports},
    packet::Packet,
};
use crate::base::{context, verdict::Verdict};

/// An ICMP error about a packet with ports.
pub struct IcmpError<F: HeaderLayout> {
    pub outer: HeaderChain<F>,
    pub header: IcmpHeader,
    /// The quoted packet, as far as it is quoted.
    pub quote: Packet<F>,
}

/// The header of an ICMP error, if the packet is one.
#[inline(always)]
pub fn error_header<F: HeaderLayout>(ctx: &TcContext, outer: &HeaderChain<F>) -> Option<IcmpHeader> {
    let header = context::load::<IcmpHeader>(ctx, outer.headers.l4)?;
    if F::is_error(header.kind) { Some(header) } else { None }
}

/// Parses the quoted packet, or gives the verdict on the error. `sctp_end` is as in [`Packet::from_chain`].
#[inline(always)]
pub fn parse_quote<F: HeaderLayout>(
    ctx: &TcContext,
    outer: &HeaderChain<F>,
    sctp_end: impl FnOnce(&TcContext, &HeaderChain<F>) -> Option<NonZeroUsize>,
) -> Result<Packet<F>, Verdict> {
    const UNREADABLE: Verdict = Verdict::pass(Reason::BadQuote);
    let Some(chain) = F::parse_chain(ctx, outer.headers.l4 + size_of::<IcmpHeader>()) else { return Err(UNREADABLE) };
    if !has_ports(chain.headers.protocol) {
        return Err(Verdict::UNRELATED);
    }
    if chain.fragment.is_later || chain.headers.l4 + size_of::<Ports>() > outer.end {
        return Err(UNREADABLE);
    }
    Packet::from_chain(ctx, chain, sctp_end).ok_or(UNREADABLE)
}
