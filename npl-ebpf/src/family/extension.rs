// SPDX-License-Identifier: GPL-2.0-only
//! IPv6 extension headers: what stands between a header and what the packet is about.

use aya_ebpf::programs::TcContext;

use super::{V6, Walk};
use crate::packet;

/// Their numbers (RFC 8200 section 4).
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;

/// More extension headers than any sender has a use for.
const MAX_EXTENSIONS: usize = 6;
/// Fragment offset, as loaded.
const FRAGMENT_OFFSET_MASK: u16 = 0xfff8_u16.to_be();
/// More-fragments flag in the same word.
const MORE_FRAGMENTS: u16 = 1_u16.to_be();

/// The beginning of an extension header.
#[repr(C)]
#[derive(Clone, Copy)]
struct Extension {
    protocol: u8,
    /// In units of eight bytes, without the first; a fragment header has a zero here, and is eight bytes long.
    length: u8,
    /// Of a routing header: its type, and the segments left.
    rest: [u8; 2],
}

/// A fragment header (RFC 8200 section 4.5). Words are as loaded.
#[repr(C)]
#[derive(Clone, Copy)]
struct FragmentHeader {
    protocol: u8,
    reserved: u8,
    offset: u16,
    id: u32,
}

/// Walks over extension headers to what they precede, or to the fragment header of a fragment that is not the first.
/// Nothing if there are too many, one is cut off, or the packet is not for its destination address yet.
#[inline(always)]
pub fn skip_extensions(ctx: &TcContext, walk: &mut Walk<V6>) -> Option<()> {
    let location = &mut walk.location;
    for _ in 0..MAX_EXTENSIONS {
        let kind = location.protocol;
        if !is_extension(kind) {
            return Some(());
        }
        if kind == FRAGMENT {
            let header = packet::load::<FragmentHeader>(ctx, location.l4)?;
            location.protocol = header.protocol;
            location.l4 += size_of::<FragmentHeader>();
            walk.fragment.id = header.id;
            walk.fragment.content = header.protocol;
            walk.fragment.is_later = header.offset & FRAGMENT_OFFSET_MASK != 0;
            if walk.fragment.is_later {
                walk.fragment.is_last = header.offset & MORE_FRAGMENTS == 0;
                walk.fragment.ahead = u16::from_be(header.offset & FRAGMENT_OFFSET_MASK);
                return Some(());
            }
            walk.fragment.is_first = header.offset & MORE_FRAGMENTS != 0;
        } else {
            let header = packet::load::<Extension>(ctx, location.l4)?;
            if kind == ROUTING && header.rest[1] != 0 {
                return None;
            }
            location.protocol = header.protocol;
            location.l4 += (usize::from(header.length) + 1) * 8;
        }
    }
    if is_extension(location.protocol) { None } else { Some(()) }
}

/// Whether a header of this number precedes another one.
#[inline(always)]
pub const fn is_extension(protocol: u8) -> bool {
    matches!(protocol, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION)
}
