// SPDX-License-Identifier: GPL-2.0-only
//! Forwarding modes. Each program is compiled for one mode.

/// Translated packets are forwarded by the host's stack.
pub const STACK: u8 = 0;
/// `--forwarding redirect`: from device to device where possible, bypassing the stack.
pub const REDIRECT: u8 = 1;
/// `--forwarding offload`: from device to device for 256 jiffies after the stack forwarded a packet of the same flow
/// and direction; otherwise through the stack.
pub const OFFLOAD: u8 = 2;
/// Through the stack, recording for [`OFFLOAD`] that the stack forwarded the packet.
pub const OBSERVE: u8 = 3;

/// Whether a program of this mode needs the next hop of a Pod.
#[inline(always)]
pub const fn needs_next_hop<const MODE: u8>() -> bool {
    matches!(MODE, REDIRECT | OFFLOAD)
}
