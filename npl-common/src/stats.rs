// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Counters per mapping. One element per processor, so that counting never waits.

/// Mappings that have counters of their own, of both families together. Each takes 48 bytes on every processor that the
/// machine could have, and a container pays for all of them: 25 MiB with 128 processors.
pub const COUNTED_MAPPINGS: u32 = 4096;

/// The element of IPv4 that keeps what mappings carried that are no more, so that sums over all never go back, and that
/// counts for mappings that have no counters of their own.
pub const SHARED_V4: u32 = COUNTED_MAPPINGS;
/// The same of IPv6.
pub const SHARED_V6: u32 = COUNTED_MAPPINGS + 1;

/// Elements of the per-mapping counters.
pub const MAX_STATS: u32 = COUNTED_MAPPINGS + 2;

map_type! {
    /// Traffic of one mapping. A packet that the kernel has merged from several segments counts as one.
    pub struct MappingStats: 48, align 8 {
        /// Packets from clients that were rewritten to the Pod.
        pub request_packets: u64,
        /// Their bytes, link-layer header included.
        pub request_bytes: u64,
        /// Packets from the Pod that were rewritten to a client.
        pub reply_packets: u64,
        /// Their bytes, link-layer header included.
        pub reply_bytes: u64,
        /// Flows whose first packet was translated, and `connect` and `sendmsg` calls of local clients.
        pub new_flows: u64,
        /// Flows whose exchange was completed.
        pub established_flows: u64,
    }
}
