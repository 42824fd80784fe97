// SPDX-License-Identifier: GPL-2.0-only
//! Parses packets with ports. A program parses each packet once, and all later steps use the parsed [`Packet`].

use core::num::NonZeroUsize;

use aya_ebpf::programs::TcContext;
use npl_common::{
    conntrack::{Numbers, Segment},
    mapping::protocol,
    reason::Reason,
};

use super::{
    family::{HeaderChain, HeaderLayout, Headers},
    headers::{Ports, TcpHeader, UdpHeader, has_ports},
    sctp,
};
use crate::base::{
    context::{self, Access},
    error::Unparsed,
};

/// A parsed packet with ports.
pub struct Packet<F: HeaderLayout> {
    /// Offset in bytes of the IP header in the packet.
    pub l3: usize,
    pub headers: Headers<F>,
    pub ports: Ports,
    /// Offset of the end of the datagram that the transport header belongs to. `None` for a fast-path packet, for a
    /// first fragment that ends within its TCP header, and for a first SCTP fragment whose datagram length is unknown.
    pub end: Option<NonZeroUsize>,
    /// Length of the TCP header with options, in bytes; 0 for other protocols and for slow-path packets.
    header_length: u8,
    /// Whether a fast-path packet ends after the ports, but within its TCP or UDP header.
    is_truncated: bool,
    /// For a fast-path packet of TCP: flags, sequence number and acknowledgement number of the segment.
    segment: Segment,
}

impl TcpHeader {
    #[inline(always)]
    const fn segment(&self) -> Segment {
        Segment::new(u32::from_be(self.sequence), u32::from_be(self.acknowledgement), self.flags)
    }
}

impl<F: HeaderLayout> Packet<F> {
    /// Parses a TCP or UDP packet whose transport header follows an IP header without options.
    #[inline(always)]
    pub fn parse<const L2: usize>(ctx: &impl Access) -> Result<Self, Unparsed> {
        let headers = F::locate::<L2>(ctx)?;
        let whole = if headers.protocol == protocol::TCP {
            F::read_transport::<TcpHeader, L2>(ctx)
                .map(|header| (header.ports, header.segment(), header.length() as u8))
        } else {
            F::read_transport::<UdpHeader, L2>(ctx).map(|header| (header.ports, Segment::DATAGRAM, 0))
        };
        let is_truncated = whole.is_none();
        let (ports, segment, header_length) = match whole {
            Some(whole) => whole,
            // The kernel's helper reads the ports of a truncated header. Packets with a truncated header are rare, and
            // a helper call takes less code than direct packet access.
            None => (ctx.load::<Ports>(headers.l4).ok_or(Unparsed::Unrelated)?, Segment::DATAGRAM, 0),
        };
        Ok(Self { l3: L2, headers, ports, end: None, header_length, is_truncated, segment })
    }

    /// Parses the transport header after the IP headers in `chain`. `sctp_end` returns the end of the datagram that a
    /// first SCTP fragment belongs to.
    #[inline(always)]
    pub fn from_chain(
        ctx: &TcContext,
        chain: HeaderChain<F>,
        sctp_end: impl FnOnce(&TcContext, &HeaderChain<F>) -> Option<NonZeroUsize>,
    ) -> Option<Self> {
        if !has_ports(chain.headers.protocol) {
            return None;
        }
        let ports = context::load::<Ports>(ctx, chain.headers.l4)?;
        let end = match (chain.fragment.is_first, chain.headers.protocol) {
            (false, _) => NonZeroUsize::new(chain.end),
            (true, protocol::SCTP) => sctp_end(ctx, &chain),
            // The rest of a truncated TCP header is in another fragment. Frame bytes after the IP packet are padding,
            // and must not be read as part of the header.
            (true, protocol::TCP) if chain.headers.l4 + size_of::<TcpHeader>() > chain.end => None,
            (true, _) => NonZeroUsize::new(chain.end),
        };
        let (header_length, is_truncated, segment) = (0, false, Segment::DATAGRAM);
        Some(Self { l3: chain.l3, headers: chain.headers, ports, end, header_length, is_truncated, segment })
    }

    /// Returns a copy of this parsed packet with other TTL fields.
    #[inline(always)]
    pub fn with(&self, ttl_fields: F::TtlFields) -> Self {
        Self { headers: Headers { ttl_fields, ..self.headers }, ..*self }
    }

    /// Returns the flags and numbers of a TCP segment, or the equivalents of an SCTP packet: see [`Segment`]. `Err` if
    /// the packet cannot be translated, because it ends within its transport header, or because the length of the SCTP
    /// datagram is unknown.
    #[inline(always)]
    pub fn segment(&self, ctx: &impl Access) -> Result<Segment, Reason> {
        if self.headers.is_fast_path {
            return if self.is_truncated { Err(Reason::Truncated) } else { Ok(self.segment) };
        }
        let l4 = self.headers.l4;
        let segment = match self.headers.protocol {
            protocol::TCP if self.end.is_none() => None,
            protocol::TCP => ctx.load::<TcpHeader>(l4).map(|header| header.segment()),
            protocol::SCTP => {
                let end = self.end.ok_or(Reason::SctpFragment)?;
                sctp::segment(ctx, l4, end.get())
            }
            _ => ctx.load::<UdpHeader>(l4).map(|_| Segment::DATAGRAM),
        };
        segment.ok_or(Reason::Truncated)
    }

    /// Returns the numbers of an SCTP packet, by which a program recognizes the Pod's answer to a client's packet: see
    /// [`Numbers::are_answered_by`]. `None` for other protocols.
    #[inline(always)]
    pub fn sctp_numbers(&self, ctx: &impl Access) -> Option<Numbers> {
        if self.headers.is_fast_path || self.headers.protocol != protocol::SCTP {
            return None;
        }
        Some(sctp::numbers(ctx.skb()?, self.headers.l4, self.end?.get()))
    }

    /// Returns the number of payload bytes in a SYN of the fast path (TCP Fast Open).
    #[inline(always)]
    pub fn syn_payload<const L2: usize>(&self, ctx: &impl Access) -> u32 {
        let headers_end = self.headers.l4 as u32 + u32::from(self.header_length);
        // Most SYNs have no bytes after the TCP header. If a SYN has bytes after the TCP header, the length in the IP
        // header shows whether the bytes are payload or link-layer padding.
        if self.header_length == 0 || ctx.length() <= headers_end {
            return 0;
        }
        let length = F::packet_length::<L2>(ctx, self.headers.ttl_fields).unwrap_or(0);
        (L2 as u32 + u32::from(length)).saturating_sub(headers_end)
    }

    /// Copies a `T` from the beginning of the transport header.
    ///
    /// After IP options or extension headers, the transport header has no constant offset. Without `CAP_PERFMON`, a
    /// program may add only constants to packet pointers, so the kernel's helper copies the header.
    #[inline(always)]
    pub fn read_transport<T: Copy, const L2: usize>(&self, ctx: &impl Access) -> Option<T> {
        if self.headers.is_fast_path { F::read_transport::<T, L2>(ctx) } else { ctx.load(self.headers.l4) }
    }
}
