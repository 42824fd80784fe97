// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Unmapped traffic: packets to a node port that match no mapping. The sender may be a load balancer that still probes
//! a removed member; if the agent assigned the node port to a new mapping, the sender would reach the new Pod. The
//! agent therefore assigns a port with unmapped traffic only if no other port is free.
//!
//! The array has one word for each port: the time of the last unmapped packet to the port, or of the last removal of
//! one of the port's mappings, whichever is later. The unit is that of [`crate::fragment::time`]. The word is 0 if
//! there was neither a packet nor a removal. The words outlive the agent, so that a restarted agent knows which ports
//! are still in quarantine.

/// Number of elements of the array, one for each port. The elements take 512 KiB.
pub const PORTS: u32 = 65_536;

/// Time without packets after which unmapped traffic counts as ceased, in units of [`crate::fragment::time`]: 129 s,
/// near the 120 s of `nf_conntrack_udp_timeout_stream`.
pub const LIFETIME: u64 = 120;

/// Returns the time since the last unmapped packet to a port, or since the removal of a mapping of the port, in units
/// of [`crate::fragment::time`]. `None` if this time is longer than [`LIFETIME`], or if there was neither a packet nor
/// a removal.
pub const fn silence(word: u64, now: u64) -> Option<u64> {
    let silence = now.saturating_sub(word);
    if word == 0 || silence > LIFETIME { None } else { Some(silence) }
}

/// Returns a lower bound of the nanoseconds between the last packet, or the removal of the mapping, and `now`; `None`
/// if there was neither a packet nor a removal. The recorded time and `now` are rounded down, so one unit is
/// subtracted.
pub const fn least_age(word: u64, now: u64) -> Option<u64> {
    if word == 0 { None } else { Some(now.saturating_sub(word).saturating_sub(1).saturating_mul(1 << 30)) }
}

#[cfg(test)]
mod tests {
    use super::{LIFETIME, least_age, silence};

    #[test]
    fn an_age_is_never_longer_than_the_time_since_the_last_packet() {
        assert_eq!(least_age(0, 5), None);
        assert_eq!(least_age(6, 5), Some(0));
        assert_eq!(least_age(5, 6), Some(0), "a packet at the end of unit 5 may be a nanosecond old");
        assert_eq!(least_age(5, 8), Some(2 << 30));
    }

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
