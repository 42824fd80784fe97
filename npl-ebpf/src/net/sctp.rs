// SPDX-License-Identifier: GPL-2.0-only
//! Parses SCTP packets (RFC 9260): a common header, followed by chunks.

use core::mem::offset_of;

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use npl_common::{
    conntrack::{Numbers, Segment},
    hash::absorb,
};

use super::headers::{Ports, tcp_flag};
use crate::base::context::{self, Access};

/// The common header of an SCTP packet. All fields are in network byte order.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SctpHeader {
    pub ports: Ports,
    pub tag: u32,
    pub check: u32,
}

/// A chunk's header. All fields are in network byte order.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Chunk {
    kind: u8,
    flags: u8,
    /// Length of the chunk in bytes, including this header, without the padding to a multiple of four bytes.
    length: u16,
}

/// Chunk types.
mod chunk {
    pub const DATA: u8 = 0;
    pub const INIT: u8 = 1;
    pub const INIT_ACK: u8 = 2;
    pub const SACK: u8 = 3;
    pub const HEARTBEAT: u8 = 4;
    pub const HEARTBEAT_ACK: u8 = 5;
    pub const ABORT: u8 = 6;
    pub const SHUTDOWN: u8 = 7;
    pub const SHUTDOWN_ACK: u8 = 8;
    /// DATA with message interleaving (RFC 8260).
    pub const I_DATA: u8 = 64;
    /// Skips data up to a TSN (RFC 3758).
    pub const FORWARD_TSN: u8 = 192;
    /// FORWARD TSN with message interleaving (RFC 8260).
    pub const I_FORWARD_TSN: u8 = 194;
}

impl Chunk {
    /// Returns the TCP flags that have the same meaning as this chunk.
    #[inline(always)]
    pub const fn tcp_flags(self) -> u8 {
        match self.kind {
            chunk::INIT => tcp_flag::SYN,
            chunk::INIT_ACK => tcp_flag::SYN | tcp_flag::ACK,
            chunk::ABORT => tcp_flag::RST,
            chunk::SHUTDOWN | chunk::SHUTDOWN_ACK => tcp_flag::FIN | tcp_flag::ACK,
            _ => tcp_flag::ACK,
        }
    }
}

/// Largest number of chunks that the program parses. In practice, fewer chunks than this number precede the chunk that
/// IP fragmentation cuts. The number is small enough for the compiler to unroll the loop: without `CAP_PERFMON`, the
/// verifier of Linux 6.12 also follows mispredicted branches, and could not prove that a loop ends.
const MAX_CHUNKS: usize = 6;

/// Largest number of chunks in which [`numbers`] looks for transmission sequence numbers (TSNs). In practice,
/// few chunks precede DATA, such as AUTH, COOKIE ACK and SACK.
const MAX_NUMBERED: usize = 4;
/// Largest number of 64-bit words that [`numbers`] reads of a HEARTBEAT. The random number that Linux writes to a
/// HEARTBEAT is the sixth word.
const MAX_WORDS: usize = 7;

/// The header of a chunk, and the first 32-bit field after the header. All fields are in network byte order.
#[repr(C)]
#[derive(Clone, Copy)]
struct Numbered {
    chunk: Chunk,
    /// INIT, INIT ACK: the initiate tag. DATA: the TSN. SACK, SHUTDOWN: the acknowledged TSN.
    number: u32,
}

/// Offset of the verification tag in the SCTP packet.
pub const VERIFICATION_TAG: usize = offset_of!(SctpHeader, tag);
/// Offset of the initiate tag of a packet that begins with an INIT or INIT ACK chunk.
pub const INITIATE_TAG: usize = size_of::<SctpHeader>() + offset_of!(Numbered, number);

/// Returns the TCP equivalent of an SCTP packet that ends at the offset `end`: see [`Segment`]. The packet's first
/// chunk determines the flags. `None` if the packet has no chunk.
#[inline(always)]
pub fn segment(ctx: &impl Access, l4: usize, end: usize) -> Option<Segment> {
    let offset = l4 + size_of::<SctpHeader>();
    if offset + size_of::<Chunk>() > end {
        return None;
    }
    let flags = ctx.load::<Chunk>(offset)?.tcp_flags();
    let tag = u32::from_be(ctx.load::<SctpHeader>(l4)?.tag);
    let init = if flags & tcp_flag::SYN != 0 { ctx.load::<Numbered>(offset) } else { None };
    let sequence = init.map_or(tag, |init| u32::from_be(init.number).wrapping_sub(1));
    Some(Segment::new(sequence, tag, flags))
}

/// Returns the numbers by which a program recognizes a reply as the answer to a client's packet: see
/// [`Numbers::are_answered_by`].
#[inline(always)]
pub fn numbers(skb: *mut __sk_buff, l4: usize, end: usize) -> Numbers {
    Numbers(npl_sctp_numbers(skb, l4 as u32, end as u32))
}

/// Implements [`numbers`]. The function is exported, so that the verifier checks it separately from its callers.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn npl_sctp_numbers(skb: *mut __sk_buff, l4: u32, end: u32) -> u64 {
    let ctx = &TcContext::new(skb);
    let (mut sequence, mut acknowledgement) = (0, 0);
    let mut offset = l4 as usize + size_of::<SctpHeader>();
    let mut heartbeat = None;
    for _ in 0..MAX_NUMBERED {
        if offset + size_of::<Numbered>() > end as usize {
            break;
        }
        let Some(Numbered { chunk, number }) = context::load::<Numbered>(ctx, offset) else { break };
        let number = u32::from_be(number);
        match chunk.kind {
            // The Pod answers each of these chunks by a SACK of at least this TSN.
            chunk::DATA | chunk::I_DATA | chunk::FORWARD_TSN | chunk::I_FORWARD_TSN => {
                sequence = number;
                break;
            }
            chunk::HEARTBEAT | chunk::HEARTBEAT_ACK => {
                heartbeat = Some(chunk);
                break;
            }
            chunk::SACK | chunk::SHUTDOWN => acknowledgement = number,
            _ => {}
        }
        offset += usize::from(u16::from_be(chunk.length)).next_multiple_of(4);
    }
    if let Some(chunk) = heartbeat {
        let hash = heartbeat_hash(ctx, offset, u16::from_be(chunk.length).into());
        if chunk.kind == chunk::HEARTBEAT {
            sequence = hash;
        } else if acknowledgement == 0 {
            acknowledgement = hash;
        }
    }
    Segment::new(sequence, acknowledgement, 0).numbers.0
}

/// Returns a hash of the content of a HEARTBEAT or HEARTBEAT ACK; never 0. The HEARTBEAT ACK repeats the content of the
/// HEARTBEAT, so both have the same hash. On Linux, the content includes a random number.
#[inline(always)]
fn heartbeat_hash(ctx: &TcContext, offset: usize, length: usize) -> u32 {
    let mut hash = 0;
    let mut at = size_of::<Chunk>();
    for _ in 0..MAX_WORDS {
        if at + size_of::<u64>() > length {
            break;
        }
        let Some(word) = context::load::<u64>(ctx, offset + at) else { break };
        hash = absorb(hash, word);
        at += size_of::<u64>();
    }
    (hash >> u32::BITS) as u32 | 1
}

/// Returns the likely end of the packet whose first fragment ends at the offset `end`: the end of the chunk that
/// extends beyond the fragment. Returns 0 if none of the first [`MAX_CHUNKS`] chunks extends beyond the fragment.
///
/// The result is correct if the sender itself, not a router, fragmented the packet. A sender limits each chunk to the
/// path MTU. The sender therefore fragments a packet only if the path MTU became smaller after the sender had built a
/// chunk. The sender adds no further chunk to a packet with such a chunk.
#[inline(always)]
pub fn end_of_cut_chunk(ctx: &TcContext, l4: u32, end: u32) -> u32 {
    let mut offset = l4 as usize + size_of::<SctpHeader>();
    for _ in 0..MAX_CHUNKS {
        if offset + size_of::<Chunk>() > end as usize {
            return 0;
        }
        let Some(chunk) = context::load::<Chunk>(ctx, offset) else { return 0 };
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
