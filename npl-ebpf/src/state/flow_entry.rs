// SPDX-License-Identifier: GPL-2.0-only
//! Reads and writes conntrack entries in the flow table, see [`npl_common::flow`]. Several processors may write the
//! fields of an entry at the same time.

use npl_common::{
    conntrack::{Action, Event, Segment, State, step},
    flow::{FlowState, REFRESH_INTERVAL_JIFFIES},
};

use super::{maps::Family, tuple::NatAddress};
use crate::base::{
    cell::field,
    clock::{jiffies, nanoseconds},
};

/// Returns the NAT address of an entry in the flow table.
#[inline(always)]
pub fn established_nat<F: Family>(entry: *mut F::FlowEntry) -> NatAddress<F> {
    let port = field!(flow_state::<F>(entry), node_port).load();
    NatAddress { addr: F::nat_address(entry), addr_index: 0, port }
}

/// Returns the first part of an entry, which IPv4 and IPv6 entries have in common.
#[inline(always)]
pub fn flow_state<F: Family>(entry: *mut F::FlowEntry) -> *mut FlowState {
    entry.cast()
}

/// Returns the state of an entry, built from the entry's TCP flags, as the argument of the state machine's function
/// [`step`].
#[inline(always)]
pub fn state_of(state: *mut FlowState) -> State {
    State::established(field!(state, client_tcp_flags).load(), field!(state, pod_tcp_flags).load())
}

/// Applies an event of the state machine to an established entry. At most once in each refresh interval, also updates
/// the entry's time and the Pod's last acknowledgement number. Returns `false` if the caller must remove the entry.
#[inline(always)]
pub fn refresh(entry: *mut FlowState, event: Event, acknowledgement: Option<u32>) -> bool {
    let before = state_of(entry);
    let (after, action) = step(before, event);
    if action == Action::Remove {
        return false;
    }
    if after.client_flags != before.client_flags {
        field!(entry, client_tcp_flags).store(after.client_flags);
    }
    if after.pod_flags != before.pod_flags {
        field!(entry, pod_tcp_flags).store(after.pod_flags);
    }
    let (now, refreshed) = (jiffies(), field!(entry, refreshed));
    if now.wrapping_sub(refreshed.load()) >= REFRESH_INTERVAL_JIFFIES {
        refreshed.store(now);
        field!(entry, last_seen_ns).store(nanoseconds());
        if let Some(acknowledgement) = acknowledgement {
            field!(entry, pod_acknowledgement).store(acknowledgement);
        }
    }
    true
}

/// Returns a new entry for a flow that a packet establishes. `segment` is this packet's segment if the client sent the
/// packet, and [`Segment::DATAGRAM`] if the Pod sent the packet.
#[inline(always)]
pub fn new_entry<F: Family>(nat: &NatAddress<F>, generation: u32, segment: Segment) -> F::FlowEntry {
    let state = FlowState {
        last_seen_ns: nanoseconds(),
        generation,
        refreshed: jiffies(),
        // TCP: a refresh records the Pod's acknowledgement number in place of the client's sequence number.
        pod_acknowledgement: segment.sequence(),
        node_port: nat.port,
        client_tcp_flags: segment.flags,
        pod_tcp_flags: 0,
    };
    F::new_flow_entry(state, nat.addr)
}
