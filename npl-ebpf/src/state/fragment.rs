// SPDX-License-Identifier: GPL-2.0-only
//! Tracks fragments, see [`npl_common::fragment`]. Only the first fragment of a datagram has ports, so the programs
//! translate later fragments according to a record of the first fragment.

use npl_common::{
    config::Config,
    fragment::{self, Record},
};

use super::{maps::Family, tuple::NatAddress};
use crate::{
    base::{clock::coarse_seconds, maps::CONFIG},
    net::family::HeaderChain,
};

/// Returns the hash that identifies a datagram in fragment tracking. `end` states whether the program rewrites the
/// source or the destination.
#[inline(always)]
pub fn hash<F: Family>(config: &Config, chain: &HeaderChain<F>, end: bool) -> u64 {
    let rest = u64::from(chain.fragment.id) << 32 | u64::from(chain.fragment.protocol) << 8 | u64::from(end);
    F::hash(config.seed, chain.headers.source, chain.headers.destination, rest)
}

/// Returns the record of a datagram's first fragment; `None` if there is no record, or if the record has expired.
#[inline(always)]
pub fn record<F: Family>(hash: u64) -> Option<Record> {
    let slot = F::fragment(fragment::slot(hash))?;
    Record::from_word(slot.load(), hash, coarse_seconds())
}

/// Records that the first fragment was translated.
#[inline(always)]
pub fn record_translated<F: Family>(hash: u64, nat: &NatAddress<F>, protocol: u8) {
    let Some(config) = CONFIG.get(0) else { return };
    // If the node address has no index, the address was removed from the Node. The program then writes no record, so
    // the later fragments are not translated.
    if let Some(address_index) = F::node_address_index(config, nat.addr) {
        store::<F>(hash, Record { node_port: nat.port, address_index, protocol });
    }
}

/// Records that the first fragment was not translated, so that the program does not save the later fragments as early
/// fragments. A valid record that translates another datagram keeps the slot. `may_be_early` returns whether the
/// program would save later fragments of a datagram without a record: for a reply, always; for a request, only if the
/// destination is a node address.
#[inline(always)]
pub fn record_untranslated<F: Family>(hash: u64, may_be_early: impl FnOnce(&Config) -> bool) {
    let (Some(config), Some(slot)) = (CONFIG.get(0), F::fragment(fragment::slot(hash))) else { return };
    let word = slot.load();
    if fragment::is_of(word, hash) || !fragment::translates(word, coarse_seconds()) && may_be_early(config) {
        store::<F>(hash, Record::UNTRANSLATED);
    }
}

/// Records that the host's stack forwarded the translated first fragment: see [`fragment::by_stack`].
#[inline(always)]
pub fn record_by_stack<F: Family>(hash: u64) {
    if let Some(slot) = F::fragment(fragment::slot(hash)) {
        slot.store(fragment::by_stack(slot.load()));
    }
}

/// Returns whether the host's stack forwarded the first fragment.
#[inline(always)]
pub fn is_by_stack<F: Family>(hash: u64) -> bool {
    F::fragment(fragment::slot(hash)).is_some_and(|slot| fragment::is_by_stack(slot.load()))
}

#[inline(always)]
fn store<F: Family>(hash: u64, record: Record) {
    if let Some(slot) = F::fragment(fragment::slot(hash)) {
        slot.store(record.to_word(hash, coarse_seconds()));
    }
}
