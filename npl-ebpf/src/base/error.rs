// SPDX-License-Identifier: GPL-2.0-only
//! Failures that cross layers.

/// The kernel refused to write the packet, which may be half rewritten.
pub struct RewriteError;

/// Why the fast path does not translate a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Unparsed {
    /// A fragment, an ICMP message, SCTP, or a packet with options or extension headers: for the slow path.
    SlowPath,
    /// No packet that a mapping can match.
    Unrelated,
}
