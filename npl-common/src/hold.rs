// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Copies of fragments that came before the first of their datagram. A processor keeps the last few that it has seen:
//! what network reorders, it reorders by little.

/// Copies that a processor keeps: more than a datagram of 16 KiB has fragments on an Ethernet.
pub const PLACES: u32 = 16;
/// The element that a packet lends its own bytes to, while it stands for a copy.
pub const SAVED: u32 = PLACES;
/// The element whose `excess` is the place to be taken next, whose `time` is that of the last copy, and whose `hash` is that of
/// the datagram whose first fragment was just translated.
pub const CURSOR: u32 = PLACES + 1;
/// Elements of the map.
pub const ELEMENTS: u32 = PLACES + 2;

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
        /// When it was made: [`crate::fragment::time`].
        pub time: u64,
        /// By how many bytes it is longer than [`MIN_FRAME`].
        pub excess: u32,
        /// Always zero.
        pub pad: u32,
        /// The frame, from the link-layer header on.
        pub frame: [u8; MAX_FRAME as usize],
    }
}
