// SPDX-License-Identifier: GPL-2.0-only
//! Reads and leaves hints, see [`npl_common::hint`]. `slot` is a pointer to one, as [`crate::family::Family`] has them.

use npl_common::{
    config::Config,
    direct::PodWay,
    hint::{check, no_way},
    mapping::Frontend,
    names::ABI_VERSION,
};

pub use npl_common::hint::slot;

use crate::{
    hook::{DIRECT, OFFLOAD},
    word,
};

/// An epoch, and a frontend to look up in it.
#[derive(Clone, Copy)]
pub struct Asked {
    epoch: u32,
    /// As it was; but no processor knows it before it knows the epoch. So what is found by it is no older than the epoch,
    /// also where loads overtake each other.
    pub frontend: Frontend,
}

impl Asked {
    #[inline(always)]
    pub fn new(config: &Config, frontend: Frontend) -> Self {
        // SAFETY: in the map's element, aligned; both halves are read as the one little-endian word that they are written as.
        let both = unsafe { core::ptr::from_ref(config).cast::<u64>().add(Config::EPOCH_WORD).read_volatile() };
        // Zero, since the agent of another version has another configuration; the compiler has no way to know.
        let pad = (both as u32).wrapping_sub(ABI_VERSION) as u8;
        Self { epoch: (both >> u32::BITS) as u32, frontend: Frontend { pad, ..frontend } }
    }
}

/// The words of a hint, if they are of this frontend and epoch.
#[inline(always)]
pub fn read<const WORDS: usize>(slot: *mut u64, config: &Config, asked: Asked) -> Option<[u64; WORDS]> {
    let mut words = [0; WORDS];
    for (index, word) in words.iter_mut().enumerate() {
        *word = word::load(slot.wrapping_add(index));
    }
    let is_right = word::load(slot.wrapping_add(WORDS)) == check(config, asked.epoch, asked.frontend, &words);
    if is_right { Some(words) } else { None }
}

/// Leaves a hint for the packets that follow.
#[inline(always)]
pub fn write<const WORDS: usize>(slot: *mut u64, config: &Config, asked: Asked, words: [u64; WORDS]) {
    for (index, word) in words.iter().enumerate() {
        word::store(slot.wrapping_add(index), *word);
    }
    word::store(slot.wrapping_add(WORDS), check(config, asked.epoch, asked.frontend, &words));
}

/// Whether a program that goes on by `WAY` has to know the way to the Pod.
#[inline(always)]
pub const fn asks_for_way<const WAY: u8>() -> bool {
    matches!(WAY, DIRECT | OFFLOAD)
}

/// The way as a hint has it. `way` is asked only by programs that have to know.
#[inline(always)]
pub fn way_to_leave<const WAY: u8>(way: impl FnOnce() -> Option<PodWay>) -> PodWay {
    if asks_for_way::<WAY>() { way().unwrap_or(no_way::THERE_IS_NONE) } else { no_way::NOT_ASKED }
}

/// Whether a hint has all that such a program has to know.
#[inline(always)]
pub fn is_enough<const WAY: u8>(way: &PodWay) -> bool {
    !asks_for_way::<WAY>() || *way != no_way::NOT_ASKED
}

/// The way of a hint that is enough.
#[inline(always)]
pub fn way(way: PodWay) -> Option<PodWay> {
    if way.ifindex == 0 { None } else { Some(way) }
}
