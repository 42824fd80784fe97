// SPDX-License-Identifier: GPL-2.0-only
//! A forwarding mode determines how the programs forward translated packets. Each program is compiled for one
//! forwarding mode.

/// The host's stack forwards translated packets.
pub const STACK: u8 = 0;
/// `--forwarding redirect`: the program redirects packets from device to device where possible, bypassing the stack.
pub const REDIRECT: u8 = 1;
/// `--forwarding offload`: the stack forwards the packets of each direction of a flow until a program observes that the
/// stack has forwarded one. For the next 256 jiffies, the program redirects packets of this direction as with
/// [`REDIRECT`]; then the stack forwards packets until the next observation (see [`npl_common::offload`]).
pub const OFFLOAD: u8 = 2;
/// Like [`STACK`]. The program also records that the stack has forwarded the packet, and programs of the mode
/// [`OFFLOAD`] read this record.
pub const OBSERVE: u8 = 3;

/// Returns whether programs of this mode look up the next hop of a Pod.
#[inline(always)]
pub const fn needs_next_hop<const MODE: u8>() -> bool {
    matches!(MODE, REDIRECT | OFFLOAD)
}
