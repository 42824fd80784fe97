// SPDX-License-Identifier: Apache-2.0
//! Computes the maximum numbers of connections. Each connection needs a file descriptor, so the numbers depend on the
//! limit of open files (`RLIMIT_NOFILE`). Each interface has its own maximum, so that idle connections to one interface
//! do not take the descriptors of the other interfaces.

/// The number of file descriptors that the feed needs besides those of the connections within the limits. The feed
/// needs these descriptors for the log, timers, listening sockets, watches, token and TLS files, and for one accepted
/// connection of each interface above the interface's limit.
const RESERVED: u64 = 64;

/// The maximum number of connections of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Connections from admitted clients to the HTTP interface. If a further client connects, the feed closes the
    /// oldest connection, so that waiting clients do not prevent the kubelet's probes.
    pub http: usize,
    /// Connections from admitted clients to the xDS interface. If a further client connects, the feed closes the oldest
    /// connection without a stream. If all connections have streams, the feed closes the new connection, so that open
    /// streams continue.
    pub xds: usize,
    /// TCP connections to the DNS interface. If a further client connects, the feed closes the oldest connection.
    pub dns: usize,
    /// Connections to the HTTP interface from clients outside the allow list, which can request only the probes. If a
    /// further client connects, the feed closes the oldest connection, so that idle connections do not prevent the
    /// kubelet's probes.
    pub probes: usize,
}

impl ConnectionLimits {
    /// The limits of a process that may open enough files. For each DNS connection, the feed keeps one answer of up to
    /// 64 KiB until the kernel's send buffer has room for the answer, so the answers of all DNS connections take at
    /// most 16 MiB.
    pub const LARGEST: Self = Self { http: 1024, xds: 1024, dns: 256, probes: 64 };

    /// The lowest limit of open files with which the connection limits are [`Self::LARGEST`].
    pub const OPEN_FILES: u64 = RESERVED + Self::LARGEST.sum();

    /// Computes the limits of a process that may open `limit` files. Below [`Self::OPEN_FILES`], all limits are reduced
    /// in the same proportion, but each limit is at least one connection.
    pub fn for_open_files(limit: u64) -> Self {
        let available = limit.clamp(RESERVED, Self::OPEN_FILES) - RESERVED;
        let share = |largest: usize| {
            let share = largest as u64 * available / Self::LARGEST.sum();
            usize::try_from(share).map_or(largest, |share| share.max(1))
        };
        let Self { http, xds, dns, probes } = Self::LARGEST;
        Self { http: share(http), xds: share(xds), dns: share(dns), probes: share(probes) }
    }

    const fn sum(self) -> u64 {
        self.http as u64 + self.xds as u64 + self.dns as u64 + self.probes as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{ConnectionLimits, RESERVED};

    proptest! {
        #[test]
        fn all_connections_together_leave_the_reserved_descriptors(limit in RESERVED + 40..10_000_u64) {
            let limits = ConnectionLimits::for_open_files(limit);
            prop_assert!(limits.sum() + RESERVED <= limit);
            prop_assert!(limits.probes >= 1 && limits.http >= limits.dns && limits.dns >= limits.probes);
            prop_assert_eq!(limits == ConnectionLimits::LARGEST, limit >= ConnectionLimits::OPEN_FILES);
        }
    }

    #[test]
    fn each_interface_accepts_a_connection_whatever_the_limit() {
        for limit in [0, 1, RESERVED, RESERVED + 1] {
            let one = ConnectionLimits { http: 1, xds: 1, dns: 1, probes: 1 };
            assert_eq!(ConnectionLimits::for_open_files(limit), one);
        }
        assert_eq!(ConnectionLimits::for_open_files(u64::MAX), ConnectionLimits::LARGEST);
    }
}
