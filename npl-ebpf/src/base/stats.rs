// SPDX-License-Identifier: GPL-2.0-only
//! Counts packets per mapping and per reason, in maps with one element for each processor.

use npl_common::stats::MappingStats;

use super::{
    cell::field,
    maps::{REASONS, STATS},
};

/// Counts one packet under the reason with the number `reason`.
#[inline(always)]
pub fn count_reason(reason: u32) {
    if let Some(counter) = REASONS.get_ptr_mut(reason) {
        // SAFETY: the pointer points to this processor's element of the map, and no other program writes this element
        // during the update.
        unsafe { *counter = (*counter).wrapping_add(1) };
    }
}

/// Counts a flow of a local client.
///
/// The update is not atomic: if another program interrupts a cgroup program and updates the same counter, one of the
/// two updates may be lost.
#[inline(always)]
pub fn count_local_flow(stats_index: u32) {
    if let Some(stats) = STATS.get_ptr_mut(stats_index) {
        let new_flows = field!(stats, new_flows);
        new_flows.store(new_flows.load().wrapping_add(1));
    }
}

/// Calls `update` with this processor's counters of a mapping.
#[inline(always)]
pub fn update_mapping(stats_index: u32, update: impl FnOnce(&mut MappingStats)) {
    if let Some(stats) = STATS.get_ptr_mut(stats_index) {
        // SAFETY: the pointer points to this processor's element of the map, and no other program writes this element
        // during the update.
        update(unsafe { &mut *stats });
    }
}
