// SPDX-License-Identifier: GPL-2.0-only
//! Unmapped traffic, see [`npl_common::unmapped`].

use npl_common::mapping::{Frontend, protocol};

use super::maps::Family;
use crate::base::clock::coarse_seconds;

/// Records a datagram to a node port without a mapping, at most once per 1.07 s, because other processors read the
/// word.
#[inline(always)]
pub fn record<F: Family>(frontend: Frontend) {
    if frontend.protocol != protocol::UDP {
        return;
    }
    if let Some(last) = F::unmapped(frontend.node_port) {
        let now = coarse_seconds();
        if last.load() != now {
            last.store(now);
        }
    }
}
