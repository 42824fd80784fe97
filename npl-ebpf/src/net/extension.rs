// SPDX-License-Identifier: GPL-2.0-only
//! IPv6 extension headers.

use aya_ebpf::programs::TcContext;

use super::{V6, family::HeaderChain};
use crate::base::context;

// Protocol numbers of extension headers (RFC 8200, section 4).
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;

/// Largest number of extension headers that the programs parse. Senders in practice use fewer extension headers.
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
    for _ in 0..MAX_EXTENSIONS {
        let kind = headers.protocol;
        if !is_extension(kind) {
            return Some(());
        }
        if kind == FRAGMENT {
            let header = context::load::<FragmentHeader>(ctx, headers.l4)?;
            headers.protocol = header.protocol;
            headers.l4 += size_of::<FragmentHeader>();
            chain.fragment.id = header.id;
            chain.fragment.content = header.protocol;
            chain.fragment.is_later = header.offset & FRAGMENT_OFFSET_MASK != 0;
            if chain.fragment.is_later {
                chain.fragment.is_last = header.offset & MORE_FRAGMENTS == 0;
                chain.fragment.offset = u16::from_be(header.offset & FRAGMENT_OFFSET_MASK);
                return Some(());
            }
            chain.fragment.is_first = header.offset & MORE_FRAGMENTS != 0;
        } else {
            let header = context::load::<Extension>(ctx, headers.l4)?;
            if kind == ROUTING && header.type_and_segments[1] != 0 {
                return None;
            }
            headers.protocol = header.protocol;
            headers.l4 += (usize::from(header.length) + 1) * 8;
        }
    }
    if is_extension(headers.protocol) { None } else { Some(()) }
}

/// Whether `protocol` is the number of an extension header that the programs parse.
#[inline(always)]
pub const fn is_extension(protocol: u8) -> bool {
    matches!(protocol, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION)
}
