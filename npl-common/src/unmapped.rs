// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Unmapped traffic: datagrams to a node port without a mapping. Their sender still talks to the Pod that had the port
//! before, and would reach the port's next Pod. The allocator reuses such a port last: before the traffic ceases only
//! if no other port is free.
//!
//! One word per port: the time of the last datagram in units of 1.07 s ([`crate::fragment::time`]), or 0.

/// Elements, one per port: 512 KiB.
pub const PORTS: u32 = 65_536;

/// Silence after which unmapped traffic has ceased, in units of 1.07 s ([`crate::fragment::time`]): 129 s, near the 120
/// s of `nf_conntrack_udp_timeout_stream`.
pub const LIFETIME: u64 = 120;

/// Units of 1.07 s from the last datagram to `now`; `None` if there are more than [`LIFETIME`], or if there was no
/// datagram.
pub const fn silence(word: u64, now: u64) -> Option<u64> {
    let silence = now.saturating_sub(word);
    if word == 0 || silence > LIFETIME { None } else { Some(silence) }
}

#[cfg(test)]
mod tests {
    use super::{LIFETIME, silence};

    #[test]
    fn traffic_has_ceased_after_its_lifetime() {
        assert_eq!(silence(1_000, 1_000), Some(0));
        assert_eq!(silence(1_000, 1_000 + LIFETIME), Some(LIFETIME));
        assert_eq!(silence(1_000, 1_001 + LIFETIME), None);
    }

    #[test]
    fn a_port_without_traffic_is_silent_and_one_with_traffic_after_the_clock_was_read_is_not() {
        assert_eq!(silence(0, 5), None);
        assert_eq!(silence(1_001, 1_000), Some(0));
    }
}
