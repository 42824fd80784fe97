// SPDX-License-Identifier: GPL-2.0-only
//! Forwarding modes: how the programs forward translated packets. Each program is compiled for one forwarding mode.

/// The host's stack forwards translated packets.
pub const STACK: u8 = 0;
/// `--forwarding redirect`: the program redirects packets from device to device where possible, bypassing the stack.
pub const REDIRECT: u8 = 1;
/// `--forwarding offload`: like [`REDIRECT`], but only for 256 jiffies after the stack forwarded a packet of the same
/// flow and direction. Before the first of these packets, and after these 256 jiffies, the stack forwards the packets.
pub const OFFLOAD: u8 = 2;
/// Like [`STACK`]. The program also records that the stack forwarded the packet, for programs of the mode [`OFFLOAD`].
pub const OBSERVE: u8 = 3;

/// Whether programs of this mode look up the next hop of a Pod.
#[inline(always)]
pub const fn needs_next_hop<const MODE: u8>() -> bool {
    matches!(MODE, REDIRECT | OFFLOAD)
}
