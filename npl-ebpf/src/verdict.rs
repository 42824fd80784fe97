// SPDX-License-Identifier: GPL-2.0-only
//! What happens to a packet, and why; the only place that knows the hooks' action codes.

use aya_ebpf::{
    bindings::{TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC, xdp_action},
    helpers::generated::bpf_redirect,
};
use npl_common::reason::Reason;

use crate::{rewrite::Refused, stats};

/// The outcome of a program: its [`kind`], and above that the number of the reason, or the kernel's action.
///
/// One word, and no enum with a detail in some of its variants: in the others that is uninitialised, and the verifier of a
/// program without `CAP_PERFMON` refuses one that reads it where a processor may guess the variant wrongly.
#[must_use]
#[derive(Clone, Copy)]
pub struct Verdict(u32);

/// No device's number.
const NO_DEVICE: u32 = u32::MAX;

/// The action for a packet of which a copy is kept, to go on later.
///
/// A host that cuts a packet sends no more of its fragments after one that was dropped. One that is sent to no device counts as
/// sent, and so does one that is received there.
#[inline(always)]
pub fn take() -> i32 {
    // SAFETY: a helper that takes numbers.
    (unsafe { bpf_redirect(NO_DEVICE, 0) }) as i32
}

/// Whether an action has a packet go on by another device.
#[inline(always)]
pub const fn is_redirect(action: i32) -> bool {
    action == TC_ACT_REDIRECT
}

/// What becomes of a packet.
mod kind {
    pub const NOT_OURS: u32 = 0;
    pub const UNUSUAL: u32 = 1;
    pub const PASSED: u32 = 2;
    pub const TRANSLATED: u32 = 3;
    pub const REDIRECTED: u32 = 4;
    pub const DROPPED: u32 = 5;
    /// Bits that a kind has.
    pub const BITS: u32 = 8;
}

impl From<Result<(), Refused>> for Verdict {
    #[inline(always)]
    fn from(rewritten: Result<(), Refused>) -> Self {
        match rewritten {
            Ok(()) => Self::TRANSLATED,
            Err(Refused) => Self::drop(Reason::RewriteFailed),
        }
    }
}

impl Verdict {
    /// Certainly nothing of ours; not counted, since it is nearly every packet of the Node.
    pub const NOT_OURS: Self = Self(kind::NOT_OURS);
    /// May be ours, and takes a closer look than nearly every packet needs: see [`crate::rest`].
    pub const UNUSUAL: Self = Self(kind::UNUSUAL);
    /// Was rewritten and goes on.
    const TRANSLATED: Self = Self(kind::TRANSLATED);

    /// Came near a mapping and goes on untranslated.
    #[inline(always)]
    pub const fn pass(reason: Reason) -> Self {
        Self((reason as u32) << kind::BITS | kind::PASSED)
    }

    /// Was rewritten and leaves by another device; the kernel's action for that.
    #[inline(always)]
    pub const fn redirected(action: i32) -> Self {
        Self(action.cast_unsigned() << kind::BITS | kind::REDIRECTED)
    }

    /// Ours, and not to go on.
    #[inline(always)]
    pub const fn drop(reason: Reason) -> Self {
        Self((reason as u32) << kind::BITS | kind::DROPPED)
    }

    #[inline(always)]
    const fn kind(self) -> u32 {
        self.0 & ((1 << kind::BITS) - 1)
    }

    #[inline(always)]
    const fn detail(self) -> u32 {
        self.0 >> kind::BITS
    }

    #[inline(always)]
    pub const fn is_unusual(self) -> bool {
        self.kind() == kind::UNUSUAL
    }

    /// Whether the packet was rewritten and goes on.
    #[inline(always)]
    pub const fn is_translated(self) -> bool {
        matches!(self.kind(), kind::TRANSLATED | kind::REDIRECTED)
    }

    /// Whether it was, and does not take the host's stack.
    #[inline(always)]
    pub const fn is_redirected(self) -> bool {
        self.kind() == kind::REDIRECTED
    }

    #[inline(always)]
    pub const fn is_drop(self) -> bool {
        self.kind() == kind::DROPPED
    }

    /// Counts the reason and gives TC's action: "next program", which is `TCX_NEXT` and `TC_ACT_UNSPEC` alike, or a drop.
    #[inline(always)]
    pub fn into_action(self) -> i32 {
        match self.kind() {
            kind::PASSED => {
                stats::count_number(self.detail());
                TC_ACT_UNSPEC
            }
            kind::REDIRECTED => self.detail().cast_signed(),
            kind::DROPPED => {
                stats::count_number(self.detail());
                TC_ACT_SHOT
            }
            _ => TC_ACT_UNSPEC,
        }
    }

    /// XDP's action. Whatever goes on untranslated meets TC's program, which counts the reason. Frames are not redirected:
    /// their replies could not be.
    #[inline(always)]
    pub fn into_frame_action(self) -> u32 {
        if self.is_drop() {
            stats::count_number(self.detail());
            return xdp_action::XDP_DROP;
        }
        xdp_action::XDP_PASS
    }
}
