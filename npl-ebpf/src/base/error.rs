// SPDX-License-Identifier: GPL-2.0-only
//! Defines error types that several layers of the kernel programs use.

/// The rewrite of a packet failed, for example because a helper of the kernel could not write the packet. The packet
/// may now be partly rewritten.
pub struct RewriteError;

/// Why the fast path does not translate a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Unparsed {
    /// The slow path handles the packet: a fragment, an ICMP message, SCTP, or a packet with options or extension
    /// headers.
    SlowPath,
    /// No mapping can match the packet.
    Unrelated,
}
