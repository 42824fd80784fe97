// SPDX-License-Identifier: GPL-2.0-only
//! Slots of the half-open cache, see [`npl_common::half_open`].

use npl_common::{
    half_open,
    mapping::{Endpoint, Frontend},
};

use super::{
    maps::Family,
    tuple::{FlowTuple, NatAddress},
};
use crate::base::cell::Cell;

/// The slot of two that has the flow's entry, or the one that a new entry takes: the second only if the first one's entry waits for a
/// reply.
#[inline(always)]
pub fn find<F: Family>(hash: u64, (first, second): (u32, u32)) -> Option<(Cell<u64>, u32)> {
    let slot = F::half_open(first)?;
    let entry = slot.load();
    if half_open::matches(entry, hash) {
        return Some((slot, first));
    }
    let other = F::half_open(second)?;
    let is_other = half_open::is_waiting(entry) || half_open::matches(other.load(), hash);
    if is_other { Some((other, second)) } else { Some((slot, first)) }
}

/// The entry of the last handshake; 0 if there is none.
#[inline(never)]
pub fn handshake_entry<F: Family>(hash: u64) -> u64 {
    handshake_slot::<F>(hash).map_or(0, Cell::load)
}

/// Replaces the entry of the last handshake; whether there was one.
#[inline(never)]
pub fn store_handshake<F: Family>(hash: u64, entry: u64) -> bool {
    match handshake_slot::<F>(hash) {
        Some(slot) => {
            slot.store(entry);
            true
        }
        None => false,
    }
}

#[inline(always)]
fn handshake_slot<F: Family>(hash: u64) -> Option<Cell<u64>> {
    for index in [half_open::handshake_slot(hash), half_open::second_handshake_slot(hash)] {
        let slot = F::half_open(index)?;
        if half_open::matches(slot.load(), hash) {
            return Some(slot);
        }
    }
    None
}

/// The NAT address of an entry in the half-open cache, if its mapping still leads to this Pod.
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
