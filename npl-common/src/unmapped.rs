// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Unmapped traffic: packets to a node port without a mapping, by any protocol. Their sender, such as a load balancer
//! that still probes a removed member, would reach the port's next Pod. The allocator assigns such a port last, and
//! before the traffic ceases only if no other port is free.
//!
//! One word per port: the time of the last packet in [`crate::fragment::time`]'s unit, or 0.

/// Elements, one per port: 512 KiB.
pub const PORTS: u32 = 65_536;

/// Time without packets after which unmapped traffic has ceased, in units of [`crate::fragment::time`]: 129 s, near the
/// 120 s of `nf_conntrack_udp_timeout_stream`.
pub const LIFETIME: u64 = 120;

/// Units since the last packet at `now`; `None` if more than [`LIFETIME`], or if there was none.
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
    fn a_port_without_traffic_has_no_silence_and_a_later_packet_has_a_silence_of_zero() {
        assert_eq!(silence(0, 5), None);
        assert_eq!(silence(1_001, 1_000), Some(0));
    }
}
