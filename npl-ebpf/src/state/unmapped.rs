// SPDX-License-Identifier: GPL-2.0-only
//! Unmapped traffic, see [`npl_common::unmapped`].

use npl_common::mapping::Frontend;

use super::maps::Family;
use crate::base::clock::coarse_seconds;

/// Records a packet to a node port without a mapping, at most once per second, because other processors read the word.
#[inline(always)]
pub fn record<F: Family>(frontend: Frontend) {
    if let Some(last) = F::unmapped(frontend.node_port) {
        let now = coarse_seconds();
        if last.load() != now {
            last.store(now);
        }
    }
}
