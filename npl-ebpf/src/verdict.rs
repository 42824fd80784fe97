// SPDX-License-Identifier: GPL-2.0-only
//! What happens to a packet, and why; the only place that knows TC's action codes.

use aya_ebpf::bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC};
use npl_common::reason::Reason;

use crate::stats;

/// The outcome of a program.
#[must_use]
pub enum Verdict {
    /// Certainly nothing of ours; not counted, since it is nearly every packet of the Node.
    NotOurs,
    /// Came near a mapping and goes on untranslated.
    Pass(Reason),
    /// Was rewritten and goes on.
    Translated,
    /// Ours, and broken beyond passing on.
    Drop(Reason),
}

impl Verdict {
    /// Counts the reason and gives TC's action: "next program", which is `TCX_NEXT` and `TC_ACT_UNSPEC` alike, or a drop.
    #[inline(always)]
    pub fn into_action(self) -> i32 {
        match self {
            Self::NotOurs | Self::Translated => TC_ACT_UNSPEC,
            Self::Pass(reason) => {
                stats::count(reason);
                TC_ACT_UNSPEC
            }
            Self::Drop(reason) => {
                stats::count(reason);
                TC_ACT_SHOT
            }
        }
    }
}
