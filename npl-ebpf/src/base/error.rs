// SPDX-License-Identifier: GPL-2.0-only
//! Error types that several layers of the kernel programs use.

/// A helper of the kernel failed to write the packet. The packet may now be partly rewritten.
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
