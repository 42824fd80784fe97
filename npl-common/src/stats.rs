// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! The programs count packets, bytes and flows for each mapping. Each processor has its own counters, so that counting
//! needs no lock.

/// Largest number of mappings with separate counters, of both IP families together. The counters of a mapping take 48
/// bytes per possible processor. With 128 processors, all counters take 24 MiB, which count against the container's
/// memory limit.
pub const COUNTED_MAPPINGS: u32 = 4096;

/// Index of the element to which the agent adds the counters of a removed IPv4 mapping, so that the sum over all
/// elements never decreases. The element also contains the counts of IPv4 mappings that have no separate element.
pub const SHARED_V4: u32 = COUNTED_MAPPINGS;
/// Like [`SHARED_V4`], but for IPv6 mappings.
pub const SHARED_V6: u32 = COUNTED_MAPPINGS + 1;

/// Number of elements of the map of per-mapping counters.
pub const MAX_STATS: u32 = COUNTED_MAPPINGS + 2;

map_type! {
    /// Counters of one mapping. A GRO or GSO packet, which consists of several segments, counts as one packet.
    pub struct MappingStats: 48, align 8 {
        /// Number of translated packets from clients to the Pod.
        pub request_packets: u64,
        /// Length of the packets in `request_packets` in bytes, including link-layer headers.
        pub request_bytes: u64,
        /// Number of translated packets from the Pod to clients.
        pub reply_packets: u64,
        /// Length of the packets in `reply_packets` in bytes, including link-layer headers.
        pub reply_bytes: u64,
        /// Number of flows whose first packet was translated, plus the number of local clients' sockets whose first
        /// `connect` or `sendmsg` call to the Pod was translated.
        pub new_flows: u64,
        /// Number of flows whose handshake or first exchange of packets is complete.
        pub established_flows: u64,
    }
}

impl MappingStats {
    /// The counters of a new mapping.
    pub const ZERO: Self = Self {
        request_packets: 0,
        request_bytes: 0,
        reply_packets: 0,
        reply_bytes: 0,
        new_flows: 0,
        established_flows: 0,
    };
}
