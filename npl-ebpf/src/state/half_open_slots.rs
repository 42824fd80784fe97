// SPDX-License-Identifier: GPL-2.0-only
//! Slots of the half-open cache, see [`npl_common::half_open`].
//!
//! A flow's slot holds an established flow, or a half-open flow of UDP or SCTP. A handshake's slot holds an entry with
//! one of three kinds of keys: [`handshake_key`](npl_common::conntrack::handshake_key),
//! [`reply_key`](npl_common::conntrack::reply_key) or [`mid_stream_key`](npl_common::conntrack::mid_stream_key); or a
//! half-open flow's entry, under the flow's hash, if other established flows have the flow's slots.

use npl_common::{
    half_open,
    mapping::{Endpoint, Frontend},
};

use super::{
    lookup_cache,
    maps::Family,
    tuple::{FlowTuple, NatAddress},
};
use crate::base::cell::Cell;

/// A slot, and its index.
pub type Slot = (Cell<u64>, u32);

/// No slot has this index.
const NONE: u32 = u32::MAX;

/// The slot that has a flow's entry, or the slot for a new entry.
#[inline(always)]
pub fn of_flow<F: Family>(hash: u64) -> Option<Slot> {
    let first = half_open::slot(hash);
    let slot = F::half_open(first)?;
    if half_open::matches(slot.load(), hash) {
        return Some((slot, first));
    }
    let index = other_index::<F>(hash);
    Some((F::half_open(index)?, index))
}

/// As [`of_flow`], if the first slot does not have the flow's entry. Not inlined, because every program would have
/// several copies. Few values live across a look-up, because the stack of the slow path is full.
#[inline(never)]
fn other_index<F: Family>(hash: u64) -> u32 {
    let Some(second) = F::half_open(half_open::second_slot(hash)) else { return NONE };
    let second = second.load();
    if half_open::matches(second, hash) {
        return half_open::second_slot(hash);
    }
    // The flows that had both slots may have ended since the flow's entry was written.
    let overflow = half_open::overflow_slot(hash);
    if F::half_open(overflow).is_some_and(|slot| half_open::matches(slot.load(), hash)) {
        return overflow;
    }
    let Some(first) = F::half_open(half_open::slot(hash)) else { return NONE };
    half_open::new_slot(hash, first.load(), second)
}

/// Moves an established flow's word from the overflow slot to the flow's first slot. Only here a flow takes another
/// established flow's slot.
#[inline(never)]
pub fn leave_overflow<F: Family>(hash: u64, word: u64) {
    if let Some(overflow) = F::half_open(half_open::overflow_slot(hash)) {
        overflow.store(0);
    }
    if let Some(cached) = F::cached_reply(half_open::slot(hash)) {
        // The reply cache may have a copy for the tuple's previous connection.
        lookup_cache::invalidate_reply(cached);
    }
    if let Some(slot) = F::half_open(half_open::slot(hash)) {
        slot.store(word);
    }
}

/// Whether both slots of a flow are empty: then the flow table has no entry of the flow either.
#[inline(never)]
pub fn is_vacant<F: Family>(hash: u64) -> bool {
    let is_empty = |index| F::half_open(index).is_none_or(|slot| slot.load() == 0);
    is_empty(half_open::slot(hash)) && is_empty(half_open::second_slot(hash))
}

/// The slot that has a handshake's entry, or the slot for a new entry: the second slot only if the entry in the first
/// slot waits for a reply.
#[inline(always)]
pub fn of_handshake<F: Family>(key: u64) -> Option<Slot> {
    let (first, second) = (half_open::handshake_slot(key), half_open::second_handshake_slot(key));
    let slot = F::half_open(first)?;
    let entry = slot.load();
    if half_open::matches(entry, key) {
        return Some((slot, first));
    }
    let other = F::half_open(second)?;
    let is_other = half_open::is_waiting(entry) || half_open::matches(other.load(), key);
    if is_other { Some((other, second)) } else { Some((slot, first)) }
}

/// The slot that has the entry of a handshake.
#[inline(always)]
pub fn find_handshake<F: Family>(key: u64) -> Option<Slot> {
    let index = handshake_index::<F>(key);
    if index == NONE { None } else { Some((F::half_open(index)?, index)) }
}

/// Removes the entry of a handshake, if there is one.
#[inline(always)]
pub fn remove_handshake<F: Family>(key: u64) {
    if let Some((slot, _)) = find_handshake::<F>(key) {
        slot.store(0);
    }
}

#[inline(never)]
fn handshake_index<F: Family>(key: u64) -> u32 {
    for index in [half_open::handshake_slot(key), half_open::second_handshake_slot(key)] {
        let Some(slot) = F::half_open(index) else { return NONE };
        if half_open::matches(slot.load(), key) {
            return index;
        }
    }
    NONE
}

/// The NAT address of an entry in the half-open cache, if its node port is still mapped to this Pod.
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
