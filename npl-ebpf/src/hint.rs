// SPDX-License-Identifier: GPL-2.0-only
//! Reads and leaves hints, see [`npl_common::hint`]. `slot` is a pointer to one, as [`crate::family::Family`] has them.

use npl_common::{
    config::Config,
    direct::PodWay,
    hint::{check, no_way, reply_check},
    mapping::{Endpoint, Frontend},
    names::ABI_VERSION,
};

pub use npl_common::hint::slot;

use crate::{
    flow::jiffies,
    hook::{DIRECT, OFFLOAD},
    word,
};

/// An epoch, to look things up in.
#[derive(Clone, Copy)]
pub struct Epoch {
    number: u32,
    /// Always zero; but no processor knows that before it knows the epoch. So what is found by a key that has it is no older
    /// than the epoch, also where loads overtake each other.
    pub zero: u8,
}

impl Epoch {
    #[inline(always)]
    pub fn now(config: &Config) -> Self {
        // SAFETY: in the map's element, aligned; both halves are read as the one little-endian word that they are written as.
        let both = unsafe { core::ptr::from_ref(config).cast::<u64>().add(Config::EPOCH_WORD).read_volatile() };
        // The agent of another version has another configuration; the compiler has no way to know.
        Self { number: (both >> u32::BITS) as u32, zero: (both as u32).wrapping_sub(ABI_VERSION) as u8 }
    }
}

/// An epoch, and a frontend to look up in it.
#[derive(Clone, Copy)]
pub struct Asked {
    epoch: u32,
    /// As it was, with the epoch's zero.
    pub frontend: Frontend,
}

impl Asked {
    #[inline(always)]
    pub fn new(config: &Config, frontend: Frontend) -> Self {
        let Epoch { number, zero } = Epoch::now(config);
        Self { epoch: number, frontend: Frontend { pad: zero, ..frontend } }
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

/// The hint of a reply's flow: its sender, if it is right. `slot` points to the hint, `hash` and `word` are the flow's.
#[inline(always)]
pub fn read_reply(slot: *mut u64, hash: u64, word: u64, epoch: Epoch) -> Option<Endpoint> {
    let (copy, left) = (word::load(slot), word::load(slot.wrapping_add(1)));
    let endpoint = Endpoint { generation: copy as u32, stats_index: (copy >> u32::BITS) as u32 };
    let is_right = left == reply_check(hash, word, epoch.number, jiffies(), &endpoint);
    if is_right { Some(endpoint) } else { None }
}

/// Takes a hint away.
#[inline(always)]
pub fn discard_reply(slot: *mut u64) {
    word::store(slot.wrapping_add(1), 0);
}

/// Leaves a hint for the replies that follow.
#[inline(always)]
pub fn write_reply(slot: *mut u64, hash: u64, word: u64, epoch: Epoch, endpoint: &Endpoint) {
    word::store(slot, u64::from(endpoint.stats_index) << u32::BITS | u64::from(endpoint.generation));
    word::store(slot.wrapping_add(1), reply_check(hash, word, epoch.number, jiffies(), endpoint));
}
