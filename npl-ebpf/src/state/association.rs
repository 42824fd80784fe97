// SPDX-License-Identifier: GPL-2.0-only
//! Verification tags of SCTP associations in the flow table: see [`npl_common::association`].

use npl_common::{association::Tags, conntrack::Segment, flow::FlowState};

use crate::{base::cell::field, net::headers::tcp_flag};

/// Whether a Pod's packet has a verification tag of the entry's association.
#[inline(always)]
pub fn has_tag(entry: *mut FlowState, reply: Segment) -> bool {
    Tags(field!(entry, pod_acknowledgement).load()).admit_pod_packet(reply.acknowledgement())
}

/// Records the verification tag of the Pod's first packet after the handshake. The tag of an INIT ACK is not recorded,
/// because a Pod also answers a forged INIT.
#[inline(always)]
pub fn learn_tag(entry: *mut FlowState, reply: Segment) {
    if reply.flags & tcp_flag::SYN != 0 {
        return;
    }
    let tags = field!(entry, pod_acknowledgement);
    let before = Tags(tags.load());
    let after = before.with_pod_packet(reply.acknowledgement());
    if after != before {
        tags.store(after.0);
    }
}
