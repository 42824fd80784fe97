// SPDX-License-Identifier: GPL-2.0-only
//! SCTP packets (RFC 9260): a header, and chunks one behind the other.

use aya_ebpf::programs::TcContext;

use crate::packet::{Access, Ports, load, tcp_flag};

/// The header that all chunks of a packet share. Words are as loaded.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SctpHeader {
    pub ports: Ports,
    pub tag: u32,
    pub check: u32,
}

/// The beginning of a chunk, of which every packet has one at least. Words are as loaded.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Chunk {
    kind: u8,
    flags: u8,
    /// Bytes with this beginning, and without the padding to the next multiple of four.
    length: u16,
}

/// Kinds of chunks.
mod chunk {
    pub const INIT: u8 = 1;
    pub const INIT_ACK: u8 = 2;
    pub const ABORT: u8 = 6;
    pub const SHUTDOWN: u8 = 7;
    pub const SHUTDOWN_ACK: u8 = 8;
}

impl Chunk {
    /// What a TCP segment would say with its flags.
    #[inline(always)]
    pub const fn tcp_flags(self) -> u8 {
        match self.kind {
            chunk::INIT => tcp_flag::SYN,
            chunk::INIT_ACK => tcp_flag::SYN | tcp_flag::ACK,
            chunk::ABORT => tcp_flag::RST,
            chunk::SHUTDOWN | chunk::SHUTDOWN_ACK => tcp_flag::FIN,
            _ => tcp_flag::ACK,
        }
    }
}

/// Chunks that are gone through, more than senders put ahead of one that is cut: a cookie, what acknowledges, and what
/// signs them. So few that the compiler makes no loop of it: a processor may guess that a loop goes on for ever, and the
/// verifier of a program without `CAP_PERFMON` follows it there: that of Linux 6.12 finds no end.
const MAX_CHUNKS: usize = 6;

/// The beginning of the first chunk of a packet that ends there.
#[inline(always)]
pub fn first_chunk(ctx: &impl Access, l4: usize, end: usize) -> Option<Chunk> {
    let offset = l4 + size_of::<SctpHeader>();
    if offset + size_of::<Chunk>() > end { None } else { ctx.load(offset) }
}

/// Where the whole packet most likely ends that has its first fragment here, up to `end`: where the chunk does that is cut.
///
/// Senders know what the path takes, and make fragments of nothing but a chunk that they made before they knew: it is the
/// last of its packet. 0 if no chunk is cut, or it is too far in.
#[inline(always)]
pub fn end_of_cut(ctx: &TcContext, l4: u32, end: u32) -> u32 {
    let mut offset = l4 as usize + size_of::<SctpHeader>();
    for _ in 0..MAX_CHUNKS {
        if offset + size_of::<Chunk>() > end as usize {
            return 0;
        }
        let Some(chunk) = load::<Chunk>(ctx, offset) else { return 0 };
        let length = usize::from(u16::from_be(chunk.length));
        if length < size_of::<Chunk>() {
            return 0;
        }
        offset += length.next_multiple_of(4);
        if offset > end as usize {
            return offset as u32;
        }
    }
    0
}
