// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Buffers of fragments that wait for another fragment of their datagram.
//!
//! The fragment buffer has, for each processor, copies of the latest fragments that arrived before the first fragment
//! of their datagram. The SCTP reassembly buffer has first fragments of SCTP: their checksum depends on the datagram's
//! length, which only the last fragment shows. All processors share this buffer, because a network card may steer the
//! first fragment to another processor than the later ones.

/// Number of fragments that a processor saves: more than a datagram of 16 KiB has with an MTU of 1500 bytes.
pub const FRAGMENTS: u32 = 16;
/// Element for the first fragment while its skb is overwritten with saved fragments.
pub const SAVED: u32 = FRAGMENTS;
/// Bookkeeping element: `excess` is the next slot to overwrite, `time` is the time of the last save, and `hash` is the
/// key of the datagram whose first fragment was just translated.
pub const CURSOR: u32 = FRAGMENTS + 1;
/// Element for the last fragment of an SCTP datagram while its skb contains the first fragment. `datagram_length`
/// describes the current packet. `hash` is the key of the datagram if the current packet is its last fragment.
pub const LAST: u32 = FRAGMENTS + 2;
/// Elements of the map.
pub const ELEMENTS: u32 = FRAGMENTS + 3;

/// Slots of the SCTP reassembly buffer, a power of two.
pub const SCTP_FRAGMENTS: u32 = 64;
/// Time for which a waiting first fragment keeps its slot, nanoseconds. During this time, another datagram of the same
/// slot is translated by the length that its chunks suggest, so that a flood of fragments evicts no packet.
pub const WAIT_NS: u64 = 1_000_000_000;
/// Flag in [`SavedFrame::datagram_length`]: the first fragment has waited for the last one, and is being re-injected.
pub const REINJECTED: u32 = 1 << 16;
/// Flag in [`SavedFrame::datagram_length`] of [`LAST`]: the current packet is either a first SCTP fragment, which is
/// buffered if it is translated, or known to be a last SCTP fragment.
pub const WAITING: u32 = 1 << 17;
/// Mask of the length in [`SavedFrame::datagram_length`], without the flags.
pub const LENGTH_MASK: u32 = REINJECTED - 1;

/// The slot of a datagram's first fragment.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the verifier limits the stack and depth of calls in kernel programs")]
#[expect(clippy::cast_possible_truncation, reason = "masked to the number of places")]
pub const fn sctp_slot(hash: u64) -> u32 {
    hash as u32 & (SCTP_FRAGMENTS - 1)
}

const _: () = assert!(SCTP_FRAGMENTS.is_power_of_two(), "a slot is chosen by a mask");

/// Bytes of the longest frame that is saved.
pub const MAX_FRAME: u32 = 2024;
/// Bytes of the shortest frame: an IPv4 header without a link-layer header, and one byte, which a last fragment may
/// have.
pub const MIN_FRAME: u32 = 21;
/// The largest [`SavedFrame::excess`].
pub const FRAME_EXCESS: u32 = MAX_FRAME - MIN_FRAME;

map_type! {
    /// A saved frame.
    pub struct SavedFrame: 2048, align 8 {
        /// Key of the frame's datagram, from its hash as in [`crate::fragment`]; 0 if the element is free.
        pub hash: u64,
        /// Time of saving: in units of 1.07 s ([`crate::fragment::time`]), in the SCTP reassembly buffer in
        /// nanoseconds.
        pub time: u64,
        /// Bytes of the frame beyond 21, [`MIN_FRAME`].
        pub excess: u32,
        /// SCTP reassembly buffer: bytes of the datagram, plus [`REINJECTED`] (65 536) if the first fragment has
        /// waited; 0 while the last fragment is missing.
        pub datagram_length: u32,
        /// The frame, from the link-layer header on.
        pub frame: [u8; MAX_FRAME as usize],
    }
}
