// SPDX-License-Identifier: GPL-2.0-only
//! What happens to a packet, and why; the only place that knows the hooks' action codes.

use aya_ebpf::bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC, xdp_action};
use npl_common::reason::Reason;

use crate::{rewrite::Refused, stats};

/// The outcome of a program.
#[must_use]
pub enum Verdict {
    /// Certainly nothing of ours; not counted, since it is nearly every packet of the Node.
    NotOurs,
    /// May be ours, and takes a closer look than nearly every packet needs: see [`crate::rest`].
    Unusual,
    /// Came near a mapping and goes on untranslated.
    Pass(Reason),
    /// Was rewritten and goes on.
    Translated,
    /// Was rewritten and leaves by another device; the kernel's action for that.
    Redirected(i32),
    /// Ours, and broken beyond passing on.
    Drop(Reason),
}

impl From<Result<(), Refused>> for Verdict {
    #[inline(always)]
    fn from(rewritten: Result<(), Refused>) -> Self {
        match rewritten {
            Ok(()) => Self::Translated,
            Err(Refused) => Self::Drop(Reason::RewriteFailed),
        }
    }
}

impl Verdict {
    /// Counts the reason and gives TC's action: "next program", which is `TCX_NEXT` and `TC_ACT_UNSPEC` alike, or a drop.
    #[inline(always)]
    pub fn into_action(self) -> i32 {
        match self {
            Self::NotOurs | Self::Unusual | Self::Translated => TC_ACT_UNSPEC,
            Self::Pass(reason) => {
                stats::count(reason);
                TC_ACT_UNSPEC
            }
            Self::Redirected(action) => action,
            Self::Drop(reason) => {
                stats::count(reason);
                TC_ACT_SHOT
            }
        }
    }

    /// XDP's action. Whatever goes on untranslated meets TC's program, which counts the reason.
    #[inline(always)]
    pub fn into_frame_action(self) -> u32 {
        match self {
            // Frames are not redirected: their replies could not be.
            Self::NotOurs | Self::Unusual | Self::Pass(_) | Self::Translated | Self::Redirected(_) => {
                xdp_action::XDP_PASS
            }
            Self::Drop(reason) => {
                stats::count(reason);
                xdp_action::XDP_DROP
            }
        }
    }
}
