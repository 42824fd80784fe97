// SPDX-License-Identifier: GPL-2.0-only
//! Parses IPv6 extension headers.

use core::mem::transmute;

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};

use super::{V6, family::HeaderChain};
use crate::base::context;

// Protocol numbers of extension headers (RFC 8200, section 4).
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;

/// Largest number of extension headers that the programs parse. In practice, senders use fewer extension headers.
const MAX_EXTENSIONS: usize = 6;
/// Mask of the fragment offset, in network byte order.
const FRAGMENT_OFFSET_MASK: u16 = 0xfff8_u16.to_be();
/// More-fragments flag in the 16-bit word of the fragment offset, in network byte order.
const MORE_FRAGMENTS: u16 = 1_u16.to_be();

/// The first eight bytes of an extension header.
#[repr(C)]
#[derive(Clone, Copy)]
struct Extension {
    protocol: u8,
    /// Length of the header after its first eight bytes, in units of eight bytes; 0 in a fragment header.
    length: u8,
    /// In a routing header: the routing type, then the number of segments left. The programs read only the number of
    /// segments left, and ignore both bytes in all other extension headers.
    type_and_segments: [u8; 2],
}

/// A fragment header (RFC 8200 section 4.5). All fields are in network byte order.
#[repr(C)]
#[derive(Clone, Copy)]
struct FragmentHeader {
    protocol: u8,
    reserved: u8,
    offset: u16,
    id: u32,
}

/// Skips the extension headers up to the transport header or, in a later fragment, up to the end of the fragment
/// header. `None` if there are too many extension headers, an extension header is cut off, or a source route has
/// segments left.
#[inline(always)]
pub fn skip_extensions(ctx: &TcContext, chain: &mut HeaderChain<V6>) -> Option<()> {
    let headers = &mut chain.headers;
    let end = ChainEnd(npl_ext_skip(context::skb(ctx), headers.l4 as u64, u32::from(headers.protocol)));
    if end.l4() == 0 {
        return None;
    }
    (headers.l4, headers.protocol) = (end.l4(), end.protocol());
    if end.fragment_header() != 0 {
        // SAFETY: both types consist of eight bytes.
        let header = unsafe {
            transmute::<u64, FragmentHeader>(npl_ext_fragment(context::skb(ctx), end.fragment_header() as u64))
        };
        chain.fragment.id = header.id;
        chain.fragment.content = header.protocol;
        let has_more = header.offset & MORE_FRAGMENTS != 0;
        chain.fragment.is_later = header.is_later();
        chain.fragment.is_first = !header.is_later() && has_more;
        chain.fragment.is_last = header.is_later() && !has_more;
        chain.fragment.offset = u16::from_be(header.offset & FRAGMENT_OFFSET_MASK);
    }
    Some(())
}

impl FragmentHeader {
    #[inline(always)]
    const fn is_later(self) -> bool {
        self.offset & FRAGMENT_OFFSET_MASK != 0
    }
}

/// The end of a chain of extension headers, as one word. The word 0 stands for a chain that the programs cannot parse.
struct ChainEnd(u64);

impl ChainEnd {
    const UNPARSED: Self = Self(0);

    /// All offsets are less than 2¹⁶: each of the at most six extension headers has at most 2048 bytes.
    #[inline(always)]
    const fn new(l4: u64, protocol: u8, fragment_header: u64) -> Self {
        Self(l4 | fragment_header << 16 | (protocol as u64) << 32)
    }

    /// Returns the offset in bytes of the transport header or, in a later fragment, of the end of the fragment header.
    #[inline(always)]
    const fn l4(&self) -> usize {
        self.0 as u16 as usize
    }

    /// Returns the offset in bytes of the last fragment header; 0 if there is none.
    #[inline(always)]
    const fn fragment_header(&self) -> usize {
        (self.0 >> 16) as u16 as usize
    }

    /// Returns the protocol number after the chain.
    #[inline(always)]
    const fn protocol(&self) -> u8 {
        (self.0 >> 32) as u8
    }
}

/// Returns the [`ChainEnd`] of the extension headers from offset `l4` on; `protocol` is the number of the first header.
///
/// The function is exported, so that the verifier checks it separately from its callers and knows nothing about the
/// returned offsets. Otherwise, the verifier of Linux 5.10 checks the rest of the program once for each number of
/// extension headers.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_ext_skip(skb: *mut __sk_buff, l4: u64, protocol: u32) -> u64 {
    find_end(&TcContext::new(skb), l4 & 0xffff, protocol as u8).unwrap_or(ChainEnd::UNPARSED).0
}

#[inline(always)]
fn find_end(ctx: &TcContext, mut l4: u64, mut protocol: u8) -> Option<ChainEnd> {
    let mut fragment_header = 0;
    for _ in 0..MAX_EXTENSIONS {
        if !is_extension(protocol) {
            return Some(ChainEnd::new(l4, protocol, fragment_header));
        }
        if protocol == FRAGMENT {
            let header = context::load::<FragmentHeader>(ctx, l4 as usize)?;
            (fragment_header, protocol) = (l4, header.protocol);
            l4 += size_of::<FragmentHeader>() as u64;
            if header.is_later() {
                return Some(ChainEnd::new(l4, protocol, fragment_header));
            }
        } else {
            let header = context::load::<Extension>(ctx, l4 as usize)?;
            if protocol == ROUTING && header.type_and_segments[1] != 0 {
                return None;
            }
            protocol = header.protocol;
            l4 += (u64::from(header.length) + 1) * 8;
        }
    }
    if is_extension(protocol) { None } else { Some(ChainEnd::new(l4, protocol, fragment_header)) }
}

/// Returns the fragment header at the offset `at`. If the packet ends before the end of the header, returns 0, which
/// stands for an unfragmented packet.
///
/// The function is exported for the same reason as [`npl_ext_skip`]; it is not inlined, because its callers have no
/// free stack space.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_ext_fragment(skb: *mut __sk_buff, at: u64) -> u64 {
    context::load::<u64>(&TcContext::new(skb), (at & 0xffff) as usize).unwrap_or(0)
}

/// Returns whether `protocol` is the number of an extension header that the programs parse.
#[inline(always)]
pub const fn is_extension(protocol: u8) -> bool {
    matches!(protocol, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION)
}
