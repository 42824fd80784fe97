// SPDX-License-Identifier: GPL-2.0-only
//! Reads and writes the lookup caches of requests and of replies, see [`npl_common::lookup_cache`].

use npl_common::{
    config::Config,
    lookup_cache::{checksum, no_next_hop, reply_checksum, slot},
    mapping::{Endpoint, Frontend},
    names::ABI_VERSION,
    next_hop::PodNextHop,
};

use super::{maps::Family, tuple::Backend};
use crate::base::{cell::Cell, clock::jiffies, mode::needs_next_hop};

/// The current epoch: the programs use only cached copies that were stored in this epoch.
#[derive(Clone, Copy)]
pub struct Epoch {
    number: u32,
    /// Always 0, but computed from the loaded epoch. A look-up whose key contains this value depends on the load of the
    /// epoch, so the processor cannot execute the look-up before this load. The result of the look-up is therefore no
    /// older than the epoch.
    pub zero: u8,
}

impl Epoch {
    #[inline(always)]
    pub fn now(config: &Config) -> Self {
        // SAFETY: the pointer points to an aligned word of the map's element; the agent writes `abi` and `epoch` as one
        // little-endian word.
        let both = unsafe { core::ptr::from_ref(config).cast::<u64>().add(Config::EPOCH_WORD).read_volatile() };
        // `zero` is always 0, because an agent of another ABI version uses another map. The compiler does not know that
        // the value is always 0, so it keeps the data dependency on the load.
        Self { number: (both >> u32::BITS) as u32, zero: (both as u32).wrapping_sub(ABI_VERSION) as u8 }
    }
}

/// Returns the backend of a frontend and, in redirect and offload mode, the next hop to its Pod; `None` if no mapping
/// exists. The function reads backend and next hop from the lookup cache. If the cache has no valid copy, the function
/// reads them from the maps, and writes a copy to the cache.
#[inline(always)]
pub fn backend<F: Family, const MODE: u8>(config: &Config, frontend: Frontend) -> Option<(Backend<F>, PodNextHop)> {
    let cached = F::cached_mapping(slot(frontend))?;
    let Epoch { number, zero } = Epoch::now(config);
    let frontend = Frontend { pad: zero, ..frontend };
    if let Some(words) = load::<F>(cached, config, number, frontend) {
        let (backend, next_hop) = F::from_cache_words(words);
        if !needs_next_hop::<MODE>() || next_hop != no_next_hop::NOT_LOOKED_UP {
            return Some((backend, next_hop));
        }
    }
    let value = F::mapping(frontend)?;
    let backend = F::backend(value);
    let next_hop = if needs_next_hop::<MODE>() { F::next_hop(backend.addr) } else { no_next_hop::NOT_LOOKED_UP };
    store(cached, config, number, frontend, F::cache_words(value, next_hop).as_ref());
    Some((backend, next_hop))
}

#[inline(always)]
fn load<F: Family>(cached: Cell<u64>, config: &Config, epoch: u32, frontend: Frontend) -> Option<F::CacheWords> {
    let mut words = F::NO_CACHE_WORDS;
    for (index, word) in words.as_mut().iter_mut().enumerate() {
        *word = cached.at(index).load();
    }
    let expected = checksum(config, epoch, frontend, words.as_ref());
    if cached.at(words.as_ref().len()).load() == expected { Some(words) } else { None }
}

#[inline(always)]
fn store(cached: Cell<u64>, config: &Config, epoch: u32, frontend: Frontend, words: &[u64]) {
    for (index, word) in words.iter().enumerate() {
        cached.at(index).store(*word);
    }
    cached.at(words.len()).store(checksum(config, epoch, frontend, words));
}

/// Loads an [`Endpoint`] from a slot of the reply cache; `None` if the copy is invalid. `hash` is the flow's hash, and
/// `entry` is the flow's entry in the half-open cache.
#[inline(always)]
pub fn load_reply(cached: Cell<u64>, hash: u64, entry: u64, epoch: Epoch) -> Option<Endpoint> {
    let (copy, sum) = (cached.load(), cached.at(1).load());
    let endpoint = Endpoint { generation: copy as u32, stats_index: (copy >> u32::BITS) as u32 };
    if sum == reply_checksum(hash, entry, epoch.number, jiffies(), &endpoint) { Some(endpoint) } else { None }
}

/// Invalidates an element of the reply cache.
#[inline(always)]
pub fn invalidate_reply(cached: Cell<u64>) {
    cached.at(1).store(0);
}

/// Stores a reply's [`Endpoint`] in a slot of the reply cache, with the checksum that makes the copy valid.
#[inline(always)]
pub fn store_reply(cached: Cell<u64>, hash: u64, entry: u64, epoch: Epoch, endpoint: &Endpoint) {
    cached.store(u64::from(endpoint.stats_index) << u32::BITS | u64::from(endpoint.generation));
    cached.at(1).store(reply_checksum(hash, entry, epoch.number, jiffies(), endpoint));
}
