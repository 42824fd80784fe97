// SPDX-License-Identifier: GPL-2.0-only
//! Defines verdicts on packets, and counts packets under the reasons of verdicts. In the datapath programs, only this
//! module uses the action codes of TC and XDP.

use aya_ebpf::{
    bindings::{TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC, xdp_action},
    helpers::generated::bpf_redirect,
};
use npl_common::reason::Reason;

use super::{
    error::{RewriteError, Unparsed},
    stats,
};

/// The outcome of a program: a [`kind`] in the low bits, and the number of a reason or of a TC action in the high bits.
///
/// The type is one word instead of an enum, because an enum's variant without a payload leaves the bytes of the payload
/// uninitialized. If the loader lacks `CAP_PERFMON`, the verifier rejects a program that may read these bytes
/// speculatively.
#[must_use]
#[derive(Clone, Copy)]
pub struct Verdict(u32);

/// An interface index that no device has.
const NO_DEVICE: u32 = u32::MAX;

/// Returns the TC action for a fragment after the program has saved a copy of the fragment for later re-injection.
///
/// The action redirects the fragment to a nonexistent device, because the kernel counts a redirected packet as sent. If
/// the program dropped the fragment, a local sender would get an error and stop sending the datagram's fragments.
#[inline(always)]
pub fn consume() -> i32 {
    // SAFETY: the helper takes only integers as arguments.
    (unsafe { bpf_redirect(NO_DEVICE, 0) }) as i32
}

/// Returns whether an action redirects a packet to another device.
#[inline(always)]
pub const fn is_redirect(action: i32) -> bool {
    action == TC_ACT_REDIRECT
}

/// Kinds of verdicts, with the numbers that the records of packet tracing contain.
pub mod kind {
    use npl_common::packet_trace::verdict;

    pub const UNRELATED: u32 = verdict::UNRELATED as u32;
    pub const SLOW_PATH: u32 = verdict::SLOW_PATH as u32;
    pub const PASSED: u32 = verdict::PASSED as u32;
    pub const TRANSLATED: u32 = verdict::TRANSLATED as u32;
    pub const REDIRECTED: u32 = verdict::REDIRECTED as u32;
    pub const DROPPED: u32 = verdict::DROPPED as u32;
    /// Number of low bits of a [`Verdict`](super::Verdict) that contain the kind.
    pub const BITS: u32 = 8;
}

impl From<Result<(), RewriteError>> for Verdict {
    #[inline(always)]
    fn from(rewritten: Result<(), RewriteError>) -> Self {
        match rewritten {
            Ok(()) => Self::TRANSLATED,
            Err(RewriteError) => Self::drop(Reason::RewriteFailed),
        }
    }
}

impl From<Unparsed> for Verdict {
    #[inline(always)]
    fn from(unparsed: Unparsed) -> Self {
        match unparsed {
            Unparsed::SlowPath => Self::SLOW_PATH,
            Unparsed::Unrelated => Self::UNRELATED,
        }
    }
}

impl Verdict {
    /// The packet is passed unchanged and not counted: no mapping can match the packet, or another program of NPL
    /// handles the packet. For example, the program at a Pod's device leaves some replies to the program at the uplink.
    /// Nearly every packet of the Node has this verdict.
    pub const UNRELATED: Self = Self(kind::UNRELATED);
    /// The slow path handles the packet.
    pub const SLOW_PATH: Self = Self(kind::SLOW_PATH);
    /// The packet was rewritten, and is passed to the host's stack.
    const TRANSLATED: Self = Self(kind::TRANSLATED);

    /// The packet is passed unchanged, and counted under `reason`.
    #[inline(always)]
    pub const fn pass(reason: Reason) -> Self {
        Self((reason as u32) << kind::BITS | kind::PASSED)
    }

    /// The packet was rewritten, and the TC action `action` redirects it to another device.
    #[inline(always)]
    pub const fn redirected(action: i32) -> Self {
        Self(action.cast_unsigned() << kind::BITS | kind::REDIRECTED)
    }

    /// The packet is dropped, and counted under `reason`.
    #[inline(always)]
    pub const fn drop(reason: Reason) -> Self {
        Self((reason as u32) << kind::BITS | kind::DROPPED)
    }

    #[inline(always)]
    pub const fn kind(self) -> u32 {
        self.0 & ((1 << kind::BITS) - 1)
    }

    #[inline(always)]
    pub const fn detail(self) -> u32 {
        self.0 >> kind::BITS
    }

    /// Returns the verdict as an integer, which can be an argument of an exported function.
    #[cfg(not(feature = "trace"))]
    #[inline(always)]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Converts the result of [`Self::bits`] back to the verdict.
    #[cfg(not(feature = "trace"))]
    #[inline(always)]
    pub const fn of_bits(bits: u32) -> Self {
        Self(bits)
    }

    #[inline(always)]
    pub const fn is_slow_path(self) -> bool {
        self.kind() == kind::SLOW_PATH
    }

    /// Returns whether the packet was rewritten.
    #[inline(always)]
    pub const fn is_translated(self) -> bool {
        matches!(self.kind(), kind::TRANSLATED | kind::REDIRECTED)
    }

    /// Returns whether the packet bypasses the host's stack.
    #[inline(always)]
    pub const fn is_redirected(self) -> bool {
        self.kind() == kind::REDIRECTED
    }

    #[inline(always)]
    pub const fn is_drop(self) -> bool {
        self.kind() == kind::DROPPED
    }

    /// Counts the reason, and returns the TC action. A packet that is neither dropped nor redirected continues to the
    /// next program of the hook: `TCX_NEXT` and `TC_ACT_UNSPEC` are the same number.
    #[inline(always)]
    pub fn into_action(self) -> i32 {
        #[cfg(feature = "trace")]
        super::trace::note_verdict(self);
        match self.kind() {
            kind::PASSED => {
                stats::count_reason(self.detail());
                TC_ACT_UNSPEC
            }
            kind::REDIRECTED => self.detail().cast_signed(),
            kind::DROPPED => {
                stats::count_reason(self.detail());
                TC_ACT_SHOT
            }
            _ => TC_ACT_UNSPEC,
        }
    }

    /// Returns the XDP action of the verdict. Counts only the reason of a dropped packet: a packet that passes
    /// unchanged reaches the TC program, which counts the packet's reason.
    #[inline(always)]
    pub fn into_frame_action(self) -> u32 {
        if self.is_drop() {
            stats::count_reason(self.detail());
            return xdp_action::XDP_DROP;
        }
        xdp_action::XDP_PASS
    }
}
