// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Two buffers contain copies of fragments that cannot be translated before another fragment of their datagram has
//! arrived.
//!
//! The fragment buffer contains, for each processor, copies of the latest fragments that arrived before the first
//! fragment of their datagram. The SCTP reassembly buffer contains copies of first fragments of SCTP packets. The
//! update of an SCTP checksum needs the datagram's length, which only the last fragment shows. All processors share the
//! SCTP reassembly buffer: a network card may deliver the first fragment to another processor than the later fragments.

/// Number of early fragments that each processor saves. With an MTU of 1500 bytes, a datagram of 16 KiB has 12
/// fragments, so the buffer has room for all of them.
pub const FRAGMENTS: u32 = 16;
/// Index of the element that contains a copy of the first fragment while the saved fragments, one after another,
/// overwrite the first fragment's skb.
pub const SAVED: u32 = FRAGMENTS;
/// Index of the element with the state of the fragment buffer: `excess` is the next slot to overwrite, `time` is the
/// time of the last save, and `hash` is the key of the datagram whose first fragment the current program has
/// translated.
pub const CURSOR: u32 = FRAGMENTS + 1;
/// Index of the element that contains the last fragment of an SCTP packet while the last fragment's skb contains the
/// first fragment. While a program processes a first or last SCTP fragment, `datagram_length` contains the datagram's
/// length, if known, and may contain the flag [`WAITING`]; for a last fragment, `hash` contains the datagram's key.
pub const LAST: u32 = FRAGMENTS + 2;
/// Number of elements of the map `npl_early_frags`.
pub const ELEMENTS: u32 = FRAGMENTS + 3;

/// Number of slots of the SCTP reassembly buffer, a power of two.
pub const SCTP_FRAGMENTS: u32 = 64;
/// Time in nanoseconds for which a waiting first fragment keeps its slot. A flood of fragments evicts no waiting
/// fragment. While the slot is occupied, the first fragment of another datagram with the same slot does not wait: the
/// program estimates the length of this datagram from its chunks.
pub const WAIT_NS: u64 = 1_000_000_000;
/// Flag in [`SavedFrame::datagram_length`]: the first fragment has waited for the last fragment, and is being
/// re-injected.
pub const REINJECTED: u32 = 1 << 16;
/// Flag in [`SavedFrame::datagram_length`] of the element [`LAST`], about the packet that the program processes. For a
/// first SCTP fragment, the flag means that the fragment must wait in the buffer after its translation. For a last
/// fragment, the flag means that the fragment names SCTP as the transport protocol, which a later IPv6 fragment need
/// not do.
pub const WAITING: u32 = 1 << 17;
/// Mask of the length in [`SavedFrame::datagram_length`], without the flags.
pub const LENGTH_MASK: u32 = REINJECTED - 1;

/// Returns the slot of the SCTP reassembly buffer for the first fragment of a datagram.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
#[expect(clippy::cast_possible_truncation, reason = "the mask limits the value to the number of slots")]
pub const fn sctp_slot(hash: u64) -> u32 {
    hash as u32 & (SCTP_FRAGMENTS - 1)
}

const _: () = assert!(SCTP_FRAGMENTS.is_power_of_two(), "slots are chosen by a mask");

/// Length in bytes of the longest frame that is saved.
pub const MAX_FRAME: u32 = 2024;
/// Length in bytes of the shortest frame that can be a fragment: on a device without link-layer header, a last fragment
/// that consists of an IPv4 header and one byte of payload.
pub const MIN_FRAME: u32 = 21;
/// The largest [`SavedFrame::excess`].
pub const FRAME_EXCESS: u32 = MAX_FRAME - MIN_FRAME;

map_type! {
    /// A saved copy of a fragment's frame.
    pub struct SavedFrame: 2048, align 8 {
        /// Key of the fragment's datagram: a hash of its addresses, identifier and protocol, inverted for fragments
        /// that were saved at egress; 0 if the element is free.
        pub hash: u64,
        /// Time at which the frame was saved, in units of 1.07 s ([`crate::fragment::time`]); in the SCTP reassembly
        /// buffer, in nanoseconds.
        pub time: u64,
        /// Length of the frame in bytes, minus 21 ([`MIN_FRAME`]).
        pub excess: u32,
        /// In the SCTP reassembly buffer: length of the datagram in bytes, plus [`REINJECTED`] (65 536) if the first
        /// fragment waited in the buffer for the last fragment; 0 while the last fragment is missing. In the fragment
        /// buffer, only the working element 18 uses this field, for the SCTP fragment that a program processes.
        pub datagram_length: u32,
        /// The frame, starting at the link-layer header.
        pub frame: [u8; MAX_FRAME as usize],
    }
}
