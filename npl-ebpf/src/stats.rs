// SPDX-License-Identifier: GPL-2.0-only
//! Counters. Each processor has its own, so plain additions are enough.

use npl_common::{reason::Reason, stats::MappingStats};

use crate::maps::{REASONS, STATS};

/// Counts one packet under a reason.
#[inline(always)]
pub fn count(reason: Reason) {
    count_number(reason as u32);
}

/// The same, by the reason's number.
#[inline(always)]
pub fn count_number(reason: u32) {
    if let Some(counter) = REASONS.get_ptr_mut(reason) {
        // SAFETY: this processor's element; nothing else on it runs in between.
        unsafe { *counter = (*counter).wrapping_add(1) };
    }
}

/// Counts a flow of a local client.
///
/// Unlike a packet's, its program may be interrupted by one that counts the same on this processor. The virtual machine
/// has no addition in memory that Rust could name, so one of two such counts may be lost; nothing else is touched.
#[inline(always)]
pub fn count_local_flow(stats_index: u32) {
    if let Some(stats) = STATS.get_ptr_mut(stats_index) {
        // SAFETY: within this processor's element, aligned.
        let new_flows = unsafe { &raw mut (*stats).new_flows };
        // SAFETY: as above.
        let count = unsafe { new_flows.read_volatile() };
        // SAFETY: as above.
        unsafe { new_flows.write_volatile(count.wrapping_add(1)) };
    }
}

/// Lets `update` change this processor's counters of a mapping.
#[inline(always)]
pub fn of_mapping(stats_index: u32, update: impl FnOnce(&mut MappingStats)) {
    if let Some(stats) = STATS.get_ptr_mut(stats_index) {
        // SAFETY: this processor's element; nothing else on it runs in between.
        update(unsafe { &mut *stats });
    }
}
