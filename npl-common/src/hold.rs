// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Copies of fragments that wait for others of their datagram.
//!
//! Those that came before the first one: a processor keeps the last few that it has seen, since what network reorders, it
//! reorders by little. And first ones of SCTP, whose checksum depends on the length of the whole, that the last one tells:
//! all processors have their places in common, because a network card may give the first one to another than the rest.

/// Copies that a processor keeps: more than a datagram of 16 KiB has fragments on an Ethernet.
pub const PLACES: u32 = 16;
/// The element that a packet lends its own bytes to, while it stands for a copy.
pub const SAVED: u32 = PLACES;
/// The element whose `excess` is the place to be taken next, whose `time` is that of the last copy, and whose `hash` is that of
/// the datagram whose first fragment was just translated.
pub const CURSOR: u32 = PLACES + 1;
/// The element that the last fragment lends its own bytes to, while it stands for the first one. Its `whole` is what is known
/// of the packet at hand, and its `hash` that of the datagram whose last fragment it is.
pub const LAST: u32 = PLACES + 2;
/// Elements of the map.
pub const ELEMENTS: u32 = PLACES + 3;

/// Places for first fragments that wait, a power of two.
pub const FIRSTS: u32 = 64;
/// For how long one that waits keeps its place from others, in nanoseconds: who finds it taken goes on by what can be guessed, so
/// that a flood of such fragments takes nobody's packet.
pub const WAIT_NS: u64 = 1_000_000_000;
/// In [`Held::whole`], beside the bytes of the whole: its first fragment has waited, and comes again.
pub const AGAIN: u32 = 1 << 16;
/// In the same place, of the packet at hand: it is a first fragment that is to wait if it is translated, or a last one of SCTP.
pub const WAITS: u32 = 1 << 17;
/// The bytes of the whole alone.
pub const WHOLE_BYTES: u32 = AGAIN - 1;

/// The place for the first fragment of a datagram.
#[inline(always)]
#[expect(clippy::inline_always, reason = "kernel programs have no call budget to give away")]
#[expect(clippy::cast_possible_truncation, reason = "masked to the number of places")]
pub const fn first_place(hash: u64) -> u32 {
    hash as u32 & (FIRSTS - 1)
}

const _: () = assert!(FIRSTS.is_power_of_two(), "a place is chosen by a mask");

/// Bytes of the longest frame that is kept.
pub const MAX_FRAME: u32 = 2024;
/// Bytes of the shortest: an IPv4 header, and the smallest fragment.
pub const MIN_FRAME: u32 = 28;
/// The largest [`Held::excess`].
pub const FRAME_EXCESS: u32 = MAX_FRAME - MIN_FRAME;

map_type! {
    /// A copy of a frame.
    pub struct Held: 2048, align 8 {
        /// The hash of its datagram, as [`crate::fragment`]'s records have it; 0 if there is no copy.
        pub hash: u64,
        /// When it was made: [`crate::fragment::time`], and of a first one in nanoseconds.
        pub time: u64,
        /// By how many bytes it is longer than [`MIN_FRAME`].
        pub excess: u32,
        /// Of a first fragment: bytes of the whole, with [`AGAIN`] or without; 0 while it waits for the last one. Zero of others.
        pub whole: u32,
        /// The frame, from the link-layer header on.
        pub frame: [u8; MAX_FRAME as usize],
    }
}
