// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Hints: copies of mappings, and of the ways to their Pods, that programs leave for each other in an array, so that nearly
//! every request is spared the look-ups in hashes, which cost more calls than all else that is decided of it.
//!
//! A hint is several words, which are not written as one, and nobody takes it away when its mapping changes. So it counts
//! only together with its check, over all of it, its frontend, the seed and the epoch that it was left in, and the agent
//! begins another epoch whenever a mapping or a way changes or goes. What does not fit is looked up, and left again.

use crate::{
    config::Config,
    direct::PodWay,
    flow::TOUCH_INTERVAL_JIFFIES,
    mapping::{BackendV4, BackendV6, Endpoint, Frontend, MAX_MAPPINGS, protocol},
    syn::absorb,
};

/// Hints per family, a power of two: for UDP and for all other protocols, of as many neighbouring ports as there may be
/// mappings.
pub const HINTS: u32 = 2 * OF_PROTOCOL;
const OF_PROTOCOL: u32 = MAX_MAPPINGS;

const _: () = assert!(OF_PROTOCOL.is_power_of_two(), "a hint is chosen by a mask");

map_type! {
    /// A copy of an IPv4 mapping.
    pub struct HintV4: 32, align 8 {
        /// The copy.
        pub backend: BackendV4,
        /// How the Pod is reached past the host's stack, or one of [`no_way`].
        pub way: PodWay,
        /// See [`check`]; anything else where there is no hint.
        pub check: u64,
    }
}

map_type! {
    /// A copy of an IPv6 mapping.
    pub struct HintV6: 48, align 8 {
        /// The copy.
        pub backend: BackendV6,
        /// Always zero.
        pub pad: u32,
        /// As in [`HintV4`].
        pub way: PodWay,
        /// See [`check`]; anything else where there is no hint.
        pub check: u64,
    }
}

impl HintV4 {
    /// What stands in a slot that nothing was left in.
    pub const NONE: Self = Self {
        backend: BackendV4 { pod_addr: [0; 4], pod_port: 0, flags: 0, generation: 0, stats_index: 0 },
        way: no_way::THERE_IS_NONE,
        check: 0,
    };
}

impl HintV6 {
    /// As [`HintV4::NONE`].
    pub const NONE: Self = Self {
        backend: BackendV6 { pod_addr: [0; 16], pod_port: 0, flags: 0, generation: 0, stats_index: 0 },
        pad: 0,
        way: no_way::THERE_IS_NONE,
        check: 0,
    };
}

/// What stands in the place of a way.
pub mod no_way {
    use crate::direct::PodWay;

    /// To this Pod all takes the host's stack.
    pub const THERE_IS_NONE: PodWay = PodWay { ifindex: 0, mtu: 0, kind: 0 };
    /// The program that has left the hint goes by the host's stack, and has not asked.
    pub const NOT_ASKED: PodWay = PodWay { kind: 1, ..THERE_IS_NONE };
}

/// Where a frontend's hint is. Others may have the same place. Neighbouring ports of a protocol lie side by side, so that
/// the processor loads two at once.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn slot(frontend: Frontend) -> u32 {
    let is_udp = frontend.protocol == protocol::UDP;
    (is_udp as u32 * OF_PROTOCOL) | (frontend.node_port as u32 & (OF_PROTOCOL - 1))
}

/// What stands beside the words of a frontend's hint that is left in `epoch`, as of [`Config::epoch`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub fn check<const WORDS: usize>(config: &Config, epoch: u32, frontend: Frontend, words: &[u64; WORDS]) -> u64 {
    let whose = u64::from(frontend.node_port) << 8 | u64::from(frontend.protocol);
    let mut check = absorb(config.seed, u64::from(epoch) << 32 | whose);
    for word in words {
        check = absorb(check, *word);
    }
    check
}

map_type! {
    /// A copy of what a reply's sender was found to be, beside the slot that its flow has in the half-open cache: that it is an
    /// endpoint, and the flow table has the flow as the slot says.
    pub struct ReplyHint: 16, align 8 {
        /// The copy.
        pub endpoint: Endpoint,
        /// See [`reply_check`]; anything else where there is no hint.
        pub check: u64,
    }
}

/// What stands beside the copy in a flow's hint: `hash` and `slot` are the flow's, as of [`crate::syn`]; `epoch` is
/// [`Config::epoch`] and `jiffies` their low half, when it was left.
///
/// It counts until the next multiple of [`TOUCH_INTERVAL_JIFFIES`], so that the flow table is asked at times, and knows which
/// flows are in use.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn reply_check(hash: u64, slot: u64, epoch: u32, jiffies: u32, endpoint: &Endpoint) -> u64 {
    let when = (epoch as u64) << u32::BITS | (jiffies / TOUCH_INTERVAL_JIFFIES) as u64;
    let what = (endpoint.generation as u64) << u32::BITS | endpoint.stats_index as u64;
    absorb(absorb(absorb(hash, slot), when), what)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{HINTS, check, slot};
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
    fn neighbouring_frontends_do_not_meet() {
        let ports = 48_000..48_000 + u16::try_from(MAX_MAPPINGS).unwrap();
        let frontends = ports.flat_map(|port| {
            [protocol::TCP, protocol::UDP].map(|protocol| Frontend { node_port: port, protocol, pad: 0 })
        });
        let frontends: Vec<_> = frontends.collect();
        let slots: BTreeSet<_> = frontends.iter().map(|frontend| slot(*frontend)).collect();
        assert_eq!(slots.len(), frontends.len());
        assert!(slots.iter().all(|slot| *slot < HINTS));
    }

    /// A hint that two programs, or one in two epochs, have left half of each is none of either.
    #[test]
    fn whatever_differs_changes_the_check() {
        let (words, others) = ([0x0a0a_0a0a_0000_1f90, 1], [0x0b0b_0b0b_0000_1f90, 2]);
        let of = |words, epoch, frontend| check(&CONFIG, epoch, frontend, &words);
        let checks = [
            of(words, 7, tcp(61_000)),
            of(words, 8, tcp(61_000)),
            of(words, 7, tcp(61_000 - 16_384)),
            of(words, 7, Frontend { protocol: protocol::SCTP, ..tcp(61_000) }),
            of(others, 7, tcp(61_000)),
            of([words[0], others[1]], 7, tcp(61_000)),
            of([others[0], words[1]], 7, tcp(61_000)),
            of([words[1], words[0]], 7, tcp(61_000)),
            check(&Config { seed: 1, ..CONFIG }, 7, tcp(61_000), &words),
            // What an array holds that nobody has written to.
            0,
        ];
        assert_eq!(checks.iter().collect::<BTreeSet<_>>().len(), checks.len(), "{checks:x?}");
        assert_ne!(of([0, 0], 7, tcp(61_000)), 0);
    }
}
