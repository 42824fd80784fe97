// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Lookup caches: arrays in which programs keep the results of hash table look-ups for later packets. For a request, a
//! cached mapping replaces the look-ups of mapping and next hop. For a reply, a cached reply replaces the look-ups of
//! endpoint and flow.
//!
//! Each cached result is a copy of values in hash tables, with a checksum over the copy, the look-up's key, the seed
//! and the epoch. If the checksum does not match, the copy is invalid, and the program looks up the values in the hash
//! tables. After each change of a mapping, an endpoint, a next hop or a node address, the agent writes a new epoch,
//! which invalidates all copies atomically.

use crate::{
    config::Config,
    flow::REFRESH_INTERVAL_JIFFIES,
    hash::absorb,
    mapping::{BackendV4, BackendV6, Endpoint, Frontend, MAX_MAPPINGS, protocol},
    next_hop::PodNextHop,
};

/// Number of cached mappings per IP family, a power of two. One half of the cache is for UDP, the other half is for TCP
/// and SCTP.
pub const CACHED_MAPPINGS: u32 = 2 * PER_PROTOCOL;
const PER_PROTOCOL: u32 = MAX_MAPPINGS;

const _: () = assert!(PER_PROTOCOL.is_power_of_two(), "slots are chosen by a mask");

map_type! {
    /// A cached mapping, with the Pod's next hop.
    pub struct CachedMappingV4: 32, align 8 {
        /// Copy of the mapping's value in `npl_mapping_v4` or `npl_mapping_v6`.
        pub backend: BackendV4,
        /// Copy of the Pod's next hop. The device index is 0 if there is no next hop.
        pub next_hop: PodNextHop,
        /// Checksum over the copy, its key and the epoch ([`checksum`]); with any other value, the copy is invalid.
        pub checksum: u64,
    }
}

map_type! {
    /// Like [`CachedMappingV4`], for IPv6.
    pub struct CachedMappingV6: 48, align 8 {
        /// As in [`CachedMappingV4`].
        pub backend: BackendV6,
        /// Always zero.
        pub pad: u32,
        /// As in [`CachedMappingV4`].
        pub next_hop: PodNextHop,
        /// Checksum over the copy, its key and the epoch ([`checksum`]); with any other value, the copy is invalid.
        pub checksum: u64,
    }
}

impl CachedMappingV4 {
    /// The content of an empty slot.
    pub const NONE: Self = Self {
        backend: BackendV4 { pod_addr: [0; 4], pod_port: 0, flags: 0, generation: 0, stats_index: 0 },
        next_hop: no_next_hop::UNREACHABLE,
        checksum: 0,
    };
}

impl CachedMappingV6 {
    /// Like [`CachedMappingV4::NONE`].
    pub const NONE: Self = Self {
        backend: BackendV6 { pod_addr: [0; 16], pod_port: 0, flags: 0, generation: 0, stats_index: 0 },
        pad: 0,
        next_hop: no_next_hop::UNREACHABLE,
        checksum: 0,
    };
}

/// Values of [`CachedMappingV4::next_hop`] and [`CachedMappingV6::next_hop`] if a cached mapping has no next hop.
pub mod no_next_hop {
    use crate::next_hop::PodNextHop;

    /// The Pod has no next hop: the host's stack forwards packets to the Pod.
    pub const UNREACHABLE: PodNextHop = PodNextHop { ifindex: 0, mtu: 0, kind: 0 };
    /// The program that stored the copy forwards through the host's stack and did not look up the next hop.
    pub const NOT_LOOKED_UP: PodNextHop = PodNextHop { kind: 1, ..UNREACHABLE };
}

/// Returns the slot for the cached mapping of a frontend; several frontends may share one slot. Consecutive ports have
/// adjacent slots, so that in IPv4, a cache line contains the copies of two ports.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn slot(frontend: Frontend) -> u32 {
    let is_udp = frontend.protocol == protocol::UDP;
    let half = if is_udp { PER_PROTOCOL } else { 0 };
    half | frontend.node_port as u32 & (PER_PROTOCOL - 1)
}

/// Returns the checksum of a cached mapping: of its `words`, its frontend, the seed in `config`, and the `epoch`
/// ([`Config::epoch`]).
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub fn checksum(config: &Config, epoch: u32, frontend: Frontend, words: &[u64]) -> u64 {
    let key = u64::from(frontend.node_port) << 8 | u64::from(frontend.protocol);
    let mut sum = absorb(config.seed, u64::from(epoch) << 32 | key);
    for word in words {
        sum = absorb(sum, *word);
    }
    sum
}

map_type! {
    /// The cached result for a reply: a copy of the endpoint that sends the flow's replies. A valid copy also shows
    /// that the flow table contains the flow. The element's index is the flow's slot in the half-open cache. Elements
    /// from 65 536 on, which correspond to slots of handshakes, contain the sequence and acknowledgement numbers of a
    /// client's segment instead.
    pub struct CachedReply: 16, align 8 {
        /// Copy of the endpoint's value in `npl_endpoint_v4` or `npl_endpoint_v6`.
        pub endpoint: Endpoint,
        /// Checksum over the copy, its flow and the epoch ([`reply_checksum`]); with any other value, the copy is
        /// invalid.
        pub checksum: u64,
    }
}

/// Returns the checksum of a cached reply. `hash` is the flow's hash, and `entry` is the flow's entry in the half-open
/// cache. `epoch` is [`Config::epoch`], and `jiffies` is the low 32 bits of the kernel's `jiffies`.
///
/// The cached reply expires when `jiffies` reaches the next multiple of [`REFRESH_INTERVAL_JIFFIES`]. For the flow's
/// next reply after this time, the program looks up the flow's entry in the flow table and refreshes the entry.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn reply_checksum(hash: u64, entry: u64, epoch: u32, jiffies: u32, endpoint: &Endpoint) -> u64 {
    let when = (epoch as u64) << u32::BITS | (jiffies / REFRESH_INTERVAL_JIFFIES) as u64;
    let what = (endpoint.generation as u64) << u32::BITS | endpoint.stats_index as u64;
    absorb(absorb(absorb(hash, entry), when), what)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{CACHED_MAPPINGS, checksum, slot};
    use crate::{
        config::Config,
        mapping::{Frontend, MAX_MAPPINGS, protocol},
    };

    const CONFIG: Config = Config {
        seed: 0x0123_4567_89ab_cdef,
        primary_v4: [0; 4],
        primary_v4_index: 0,
        port_min: 61_000,
        port_max: 62_000,
        flags: 0,
        abi: 1,
        epoch: 7,
        netns_cookie: 0,
    };

    fn tcp(node_port: u16) -> Frontend {
        Frontend { node_port, protocol: protocol::TCP, pad: 0 }
    }

    #[test]
    fn neighboring_frontends_do_not_share_a_slot() {
        let ports = 48_000..48_000 + u16::try_from(MAX_MAPPINGS).unwrap();
        let frontends = ports.flat_map(|port| {
            [protocol::TCP, protocol::UDP].map(|protocol| Frontend { node_port: port, protocol, pad: 0 })
        });
        let frontends: Vec<_> = frontends.collect();
        let slots: BTreeSet<_> = frontends.iter().map(|frontend| slot(*frontend)).collect();
        assert_eq!(slots.len(), frontends.len());
        assert!(slots.iter().all(|slot| *slot < CACHED_MAPPINGS));
    }

    /// The checksum must not match if parts of the copy come from two programs that wrote at the same time, or if the
    /// copy was stored for another epoch, node port, protocol or seed.
    #[test]
    fn a_change_of_any_input_changes_the_checksum() {
        let (words, others) = ([0x0a0a_0a0a_0000_1f90, 1], [0x0b0b_0b0b_0000_1f90, 2]);
        let of = |words: [u64; 2], epoch, frontend| checksum(&CONFIG, epoch, frontend, &words);
        let checks = [
            of(words, 7, tcp(61_000)),
            of(words, 8, tcp(61_000)),
            of(words, 7, tcp(61_000 - 16_384)),
            of(words, 7, Frontend { protocol: protocol::SCTP, ..tcp(61_000) }),
            of(others, 7, tcp(61_000)),
            of([words[0], others[1]], 7, tcp(61_000)),
            of([others[0], words[1]], 7, tcp(61_000)),
            of([words[1], words[0]], 7, tcp(61_000)),
            checksum(&Config { seed: 1, ..CONFIG }, 7, tcp(61_000), &words),
            // Zero is the content of an array element that no program has written.
            0,
        ];
        assert_eq!(checks.iter().collect::<BTreeSet<_>>().len(), checks.len(), "{checks:x?}");
        assert_ne!(of([0, 0], 7, tcp(61_000)), 0);
    }
}
