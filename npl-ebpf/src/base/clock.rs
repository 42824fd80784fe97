// SPDX-License-Identifier: GPL-2.0-only
//! Reads the kernel's clocks.

use aya_ebpf::helpers::generated::{bpf_jiffies64, bpf_ktime_get_ns};
use npl_common::fragment;

/// Returns the low 32 bits of the kernel's `jiffies`. Reading `jiffies` is cheaper than reading a clock, because the
/// verifier replaces the helper call by a single load from memory.
#[inline(always)]
pub fn jiffies() -> u32 {
    // SAFETY: the helper has no arguments, and only reads a clock.
    (unsafe { bpf_jiffies64() }) as u32
}

/// Returns the time of `CLOCK_MONOTONIC` in nanoseconds.
#[inline(always)]
pub fn nanoseconds() -> u64 {
    // SAFETY: the helper has no arguments, and only reads a clock.
    unsafe { bpf_ktime_get_ns() }
}

/// Returns the time of `CLOCK_MONOTONIC` in units of 2^30 ns (1.07 s): see [`fragment::time`].
#[inline(always)]
pub fn coarse_seconds() -> u64 {
    fragment::time(nanoseconds())
}
