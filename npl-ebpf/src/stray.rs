// SPDX-License-Identifier: GPL-2.0-only
//! Takes note of datagrams to node ports that lead nowhere, see [`npl_common::stray`].

use npl_common::mapping::{Frontend, protocol};

use crate::{family::Family, fragment::now, word};

/// Notes a packet to a frontend without a mapping, unless one has come within this second or so: other processors read it.
#[inline(always)]
pub fn note<F: Family>(frontend: Frontend) {
    if frontend.protocol != protocol::UDP {
        return;
    }
    if let Some(last) = F::stray(frontend.node_port) {
        let now = now();
        if word::load(last) != now {
            word::store(last, now);
        }
    }
}
