// SPDX-License-Identifier: GPL-2.0-only
//! Parses ICMP errors, and the packets that ICMP errors quote. The quoted packet has the addresses and ports that the
//! packet had when the sender of the error received it.

use core::{mem::offset_of, num::NonZeroUsize};

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use npl_common::{
    conntrack::{Numbers, Segment},
    mapping::protocol,
    reason::Reason,
};

use super::{
    family::{HeaderChain, HeaderLayout},
    headers::{IcmpHeader, Ports, TcpHeader, has_ports},
    packet::Packet,
    sctp,
};
use crate::base::{context, verdict::Verdict};

const TCP_SEQUENCE: usize = offset_of!(TcpHeader, sequence);
const TCP_ACKNOWLEDGEMENT: usize = offset_of!(TcpHeader, acknowledgement);

/// An ICMP error about a packet with ports.
pub struct IcmpError<F: HeaderLayout> {
    pub outer: HeaderChain<F>,
    pub header: IcmpHeader,
    /// The quoted packet.
    pub quote: Packet<F>,
}

/// Returns the ICMP header of a packet, if the packet is an ICMP error.
#[inline(always)]
pub fn error_header<F: HeaderLayout>(ctx: &TcContext, outer: &HeaderChain<F>) -> Option<IcmpHeader> {
    let header = context::load::<IcmpHeader>(ctx, outer.headers.l4)?;
    if F::is_error(header.kind) { Some(header) } else { None }
}

/// Parses the quoted packet. `Err` is the verdict on an ICMP error that is not translated. `sctp_end` has the same
/// meaning as in [`Packet::from_chain`].
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

/// Returns the sequence and acknowledgement numbers of the quoted segment. According to RFC 792, a quote has at least 8
/// bytes of the transport header, and these bytes include TCP's sequence number. A number that lies after the end of
/// the packet counts as 0.
#[inline(always)]
pub fn quoted_numbers<F: HeaderLayout>(ctx: &TcContext, quote: &Packet<F>) -> Numbers {
    Numbers(load_numbers(context::skb(ctx), quote.headers.l4, quote.headers.protocol))
}

/// This function is not inlined, because its callers have no free stack space.
#[inline(never)]
fn load_numbers(skb: *mut __sk_buff, l4: usize, protocol: u8) -> u64 {
    let ctx = &TcContext::new(skb);
    let word = |offset| context::load::<u32>(ctx, l4 + offset).map_or(0, u32::from_be);
    let segment = match protocol {
        protocol::TCP => Segment::new(word(TCP_SEQUENCE), word(TCP_ACKNOWLEDGEMENT), 0),
        protocol::SCTP => Segment::new(word(sctp::INITIATE_TAG).wrapping_sub(1), word(sctp::VERIFICATION_TAG), 0),
        _ => Segment::DATAGRAM,
    };
    segment.numbers.0
}
