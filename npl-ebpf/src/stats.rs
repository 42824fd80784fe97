// SPDX-License-Identifier: GPL-2.0-only
//! Counters. Each processor has its own, so plain additions are enough.

use npl_common::{reason::Reason, stats::MappingStats};

use crate::maps::{REASONS, STATS};

/// Counts one packet under a reason.
#[inline(always)]
pub fn count(reason: Reason) {
    if let Some(counter) = REASONS.get_ptr_mut(reason as u32) {
        // SAFETY: this processor's element; nothing else on it runs in between.
        unsafe { *counter = (*counter).wrapping_add(1) };
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
