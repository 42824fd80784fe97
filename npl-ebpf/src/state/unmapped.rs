// SPDX-License-Identifier: GPL-2.0-only
//! Records the times of packets to node ports that match no mapping, see [`npl_common::unmapped`].

use npl_common::mapping::Frontend;

use super::maps::Family;
use crate::base::clock::coarse_seconds;

/// Records the time of a packet to a node port that matches no mapping. The word of a node port is written at most once
/// per 1.07 s, because each write invalidates the cache line on other processors.
#[inline(always)]
pub fn record<F: Family>(frontend: Frontend) {
    if let Some(last) = F::unmapped(frontend.node_port) {
        let now = coarse_seconds();
        if last.load() != now {
            last.store(now);
        }
    }
}
