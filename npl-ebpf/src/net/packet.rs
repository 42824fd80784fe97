// SPDX-License-Identifier: GPL-2.0-only
//! Parsing of packets with ports: once per packet, for all later stages.

use core::num::NonZeroUsize;

use aya_ebpf::programs::TcContext;
use npl_common::{mapping::protocol, reason::Reason};

use super::{
    family::{HeaderChain, HeaderLayout, Headers},
    headers::{Ports, TcpHeader, UdpHeader, has_ports},
    sctp::{self, Chunk},
};
use crate::base::{
    context::{self, Access},
    error::Unparsed,
};

/// A parsed packet with ports.
pub struct Packet<F: HeaderLayout> {
    /// Offset of the IP header.
    pub l3: usize,
    pub headers: Headers<F>,
    pub ports: Ports,
    /// End of the datagram that the transport header belongs to. `None` on the fast path, which does not need it, for a TCP header that
    /// is cut off, and for a first SCTP fragment whose datagram length is unknown.
    pub end: Option<NonZeroUsize>,
    flags: Flags,
}

/// TCP flags, or the mark that the transport header is cut off: one word, see [`crate::base::verdict::Verdict`].
#[derive(Clone, Copy)]
struct Flags(u16);

impl Flags {
    const TRUNCATED: Self = Self(1 << 8);
    /// Not read at parse time.
    const UNREAD: Self = Self(1 << 9);
}

impl<F: HeaderLayout> Packet<F> {
    /// Parses a TCP or UDP packet whose transport header follows an IP header without options.
    #[inline(always)]
    pub fn parse<const L2: usize>(ctx: &impl Access) -> Result<Self, Unparsed> {
        let headers = F::locate::<L2>(ctx)?;
        let whole = if headers.protocol == protocol::TCP {
            F::read_transport::<TcpHeader, L2>(ctx).map(|header| (header.ports, Flags(header.flags as u16)))
        } else {
            F::read_transport::<UdpHeader, L2>(ctx).map(|header| (header.ports, Flags(0)))
        };
        let (ports, flags) = match whole {
            Some(whole) => whole,
            // Without a whole header the packet is rare: the helper takes less code than direct access.
            None => (ctx.load::<Ports>(headers.l4).ok_or(Unparsed::Unrelated)?, Flags::TRUNCATED),
        };
        Ok(Self { l3: L2, headers, ports, end: None, flags })
    }

    /// Parses the transport header behind a chain. `sctp_end` gives the end of the datagram that a first SCTP fragment belongs to.
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
            // The rest of a cut-off TCP header is in another fragment, not in what the frame has behind the packet.
            (true, protocol::TCP) if chain.headers.l4 + size_of::<TcpHeader>() > chain.end => None,
            (true, _) => NonZeroUsize::new(chain.end),
        };
        Some(Self { l3: chain.l3, headers: chain.headers, ports, end, flags: Flags::UNREAD })
    }

    /// The same packet with other TTL fields.
    #[inline(always)]
    pub fn with(&self, ttl_fields: F::TtlFields) -> Self {
        Self { headers: Headers { ttl_fields, ..self.headers }, ..*self }
    }

    /// TCP flags, or those with the meaning of an SCTP chunk, or 0 for UDP. `Err` if the packet cannot be translated: its transport
    /// header is cut off, or its SCTP datagram's length is unknown.
    #[inline(always)]
    pub fn tcp_flags(&self, ctx: &impl Access) -> Result<u8, Reason> {
        if self.headers.is_fast_path {
            return if self.flags.0 == Flags::TRUNCATED.0 { Err(Reason::Truncated) } else { Ok(self.flags.0 as u8) };
        }
        let l4 = self.headers.l4;
        let flags = match self.headers.protocol {
            protocol::TCP if self.end.is_none() => None,
            protocol::TCP => ctx.load::<TcpHeader>(l4).map(|header| header.flags),
            protocol::SCTP => {
                let end = self.end.ok_or(Reason::SctpFragment)?;
                sctp::first_chunk(ctx, l4, end.get()).map(Chunk::tcp_flags)
            }
            _ => ctx.load::<UdpHeader>(l4).map(|_| 0),
        };
        flags.ok_or(Reason::Truncated)
    }

    /// Copies the beginning of the transport header.
    ///
    /// Behind options its offset is not a constant: a program without `CAP_PERFMON` may move packet pointers by constants only, so the
    /// kernel's helper copies it.
    #[inline(always)]
    pub fn read_transport<T: Copy, const L2: usize>(&self, ctx: &impl Access) -> Option<T> {
        if self.headers.is_fast_path { F::read_transport::<T, L2>(ctx) } else { ctx.load(self.headers.l4) }
    }
}
