// SPDX-License-Identifier: GPL-2.0-only
//! ICMP errors, which quote the packet that they are about. The quote has the addresses and ports that the packet had
//! where it was lost; whoever the error is for knows the packet by others.

use aya_ebpf::programs::TcContext;
use npl_common::reason::Reason;

use crate::{
    family::{Family, Walk},
    packet::{self, IcmpHeader, Packet, Ports},
    verdict::Verdict,
};

/// An ICMP error about a packet with ports.
pub struct Error<F: Family> {
    pub outer: Walk<F>,
    pub header: IcmpHeader,
    /// The packet that it is about, as far as it is quoted.
    pub quote: Packet<F>,
}

/// The header of an ICMP error, if the packet is one.
#[inline(always)]
pub fn header<F: Family>(ctx: &TcContext, outer: &Walk<F>) -> Option<IcmpHeader> {
    let header = packet::load::<IcmpHeader>(ctx, outer.location.l4)?;
    if F::is_error(header.kind) { Some(header) } else { None }
}

/// Reads what an error quotes; otherwise what becomes of the error.
#[inline(always)]
pub fn quote<F: Family>(ctx: &TcContext, outer: &Walk<F>) -> Result<Packet<F>, Verdict> {
    const UNREADABLE: Verdict = Verdict::pass(Reason::BadQuote);
    let Some(walk) = F::walk(ctx, outer.location.l4 + size_of::<IcmpHeader>()) else { return Err(UNREADABLE) };
    if !packet::has_ports(walk.location.protocol) {
        return Err(Verdict::NOT_OURS);
    }
    if walk.fragment.is_later || walk.location.l4 + size_of::<Ports>() > outer.end {
        return Err(UNREADABLE);
    }
    Packet::of(ctx, walk).ok_or(UNREADABLE)
}
