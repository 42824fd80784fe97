// SPDX-License-Identifier: GPL-2.0-only
//! Looks up slots of the half-open cache, see [`npl_common::half_open`].
//!
//! A flow's slot contains a copy of the flow's entry in the flow table. If the agent or a program removes the entry
//! from the flow table, the copy gets another phase or is cleared. A handshake's slot contains an entry with one of
//! three kinds of keys: [`handshake_key`](npl_common::conntrack::handshake_key),
//! [`reply_key`](npl_common::conntrack::reply_key) or [`mid_stream_key`](npl_common::conntrack::mid_stream_key). A
//! datagram slot contains the entry of a half-open UDP flow.

use npl_common::{
    half_open,
    mapping::{Endpoint, Frontend},
};

use super::{
    maps::Family,
    tuple::{FlowTuple, NatAddress},
};
use crate::base::cell::Cell;

/// A slot of the half-open cache, and the index of the slot.
pub type Slot = (Cell<u64>, u32);

/// An index that no slot of the half-open cache has.
pub const NONE: u32 = u32::MAX;

/// Returns the slot of an established flow. The slot may contain an entry of another flow.
#[inline(always)]
pub fn of_flow<F: Family>(hash: u64) -> Option<Slot> {
    let index = half_open::slot(hash);
    Some((F::half_open(index)?, index))
}

/// Returns the slot that contains a handshake's entry or, if the cache has no entry of the handshake, the slot for a
/// new entry.
#[inline(always)]
pub fn of_handshake<F: Family>(key: u64) -> Option<Slot> {
    choose::<F>(key, half_open::handshake_slot(key), half_open::second_handshake_slot(key))
}

/// Returns the slot that contains the entry of a half-open UDP flow or, if the cache has no such entry, the slot for a
/// new entry.
#[inline(always)]
pub fn of_datagram_flow<F: Family>(hash: u64) -> Option<Slot> {
    choose::<F>(hash, half_open::datagram_slot(hash), half_open::second_datagram_slot(hash))
}

/// Chooses between the two candidate slots of a key. A new entry gets the second slot only if the entry in the first
/// slot waits for a Pod's reply.
#[inline(always)]
fn choose<F: Family>(key: u64, first: u32, second: u32) -> Option<Slot> {
    let slot = F::half_open(first)?;
    let entry = slot.load();
    if half_open::matches(entry, key) {
        return Some((slot, first));
    }
    let other = F::half_open(second)?;
    let is_other = half_open::is_waiting(entry) || half_open::matches(other.load(), key);
    if is_other { Some((other, second)) } else { Some((slot, first)) }
}

/// Returns the slot that contains the entry of a handshake; `None` if the cache has no entry of the handshake.
#[inline(always)]
pub fn find_handshake<F: Family>(key: u64) -> Option<Slot> {
    let index = handshake_index::<F>(key);
    if index == NONE { None } else { Some((F::half_open(index)?, index)) }
}

/// Returns the slot that contains the entry of a half-open UDP flow; `None` if the cache has no such entry.
#[inline(always)]
pub fn find_datagram_flow<F: Family>(hash: u64) -> Option<Cell<u64>> {
    // The array has no element with the index [`NONE`].
    F::half_open(datagram_index::<F>(hash))
}

/// Like [`find_handshake`], but inlined, for callers that are not inlined themselves: there is no free stack space for
/// two nested stack frames.
#[inline(always)]
pub fn find_handshake_inlined<F: Family>(key: u64) -> Option<Slot> {
    let index = index_of_handshake::<F>(key);
    // The array has no element with the index [`NONE`].
    Some((F::half_open(index)?, index))
}

/// Returns the index of the slot that [`of_handshake`] returns, for callers without free stack space.
#[inline(never)]
pub fn index_for_handshake<F: Family>(key: u64) -> u32 {
    of_handshake::<F>(key).map_or(NONE, |(_, index)| index)
}

#[inline(never)]
fn handshake_index<F: Family>(key: u64) -> u32 {
    index_of_handshake::<F>(key)
}

#[inline(always)]
fn index_of_handshake<F: Family>(key: u64) -> u32 {
    index_of::<F>(key, half_open::handshake_slot(key), half_open::second_handshake_slot(key))
}

/// Removes the entry of a half-open UDP flow. Returns whether the cache had such an entry.
#[inline(never)]
pub fn remove_datagram_flow<F: Family>(hash: u64) -> bool {
    // The look-up is inlined: the callers have no free stack space for two nested frames.
    let Some(slot) = F::half_open(index_of_datagram_flow::<F>(hash)) else { return false };
    slot.store(0);
    true
}

#[inline(never)]
fn datagram_index<F: Family>(hash: u64) -> u32 {
    index_of_datagram_flow::<F>(hash)
}

#[inline(always)]
fn index_of_datagram_flow<F: Family>(hash: u64) -> u32 {
    index_of::<F>(hash, half_open::datagram_slot(hash), half_open::second_datagram_slot(hash))
}

/// Removes the entry of a handshake, if there is one.
#[inline(always)]
pub fn remove_handshake<F: Family>(key: u64) {
    if let Some((slot, _)) = find_handshake::<F>(key) {
        slot.store(0);
    }
}

#[inline(always)]
fn index_of<F: Family>(key: u64, first: u32, second: u32) -> u32 {
    for index in [first, second] {
        let Some(slot) = F::half_open(index) else { return NONE };
        if half_open::matches(slot.load(), key) {
            return index;
        }
    }
    NONE
}

/// Returns the NAT address of an entry in the half-open cache, if the entry's node port is still mapped to this Pod and
/// Pod port.
#[inline(always)]
pub fn half_open_nat<F: Family>(
    entry: u64,
    tuple: &FlowTuple<F>,
    protocol: u8,
    endpoint: &Endpoint,
) -> Option<NatAddress<F>> {
    let port = half_open::node_port(entry);
    let backend = F::backend(F::mapping(Frontend { node_port: port, protocol, pad: 0 })?);
    if backend.addr != tuple.pod || backend.port != tuple.pod_port || backend.generation != endpoint.generation {
        return None;
    }
    let addr_index = half_open::address_index(entry);
    Some(NatAddress { addr: F::node_address(addr_index)?, addr_index, port })
}
