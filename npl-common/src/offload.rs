// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Decides which packets bypass the host's stack with `--forwarding offload`.
//!
//! A stack observation proves that the stack has forwarded a packet of one direction of a flow. For
//! [`INTERVAL_JIFFIES`] after an observation, packets of this direction bypass the stack. After the interval, the stack
//! forwards packets of this direction until the next observation. FORWARD rules and kernel conntrack therefore process
//! packets of each direction of a live flow again after every interval, so a new rule that drops the flow takes effect
//! within one interval.
//!
//! The stack forwards all packets that open or end a connection, and all packets after the connection's end. Several
//! flows may have the same slot. While one of these flows is offloaded, it keeps the slot, and the stack forwards the
//! packets of the other flows.
//!
//! Each direction of a flow has one aligned 64-bit word, which the programs read and write atomically:
//!
//! ```text
//! 63           32 31            0
//! [ tag: 32 bits ][ jiffies, or one of `since` ]
//! ```

/// Number of slots for stack observations per IP family. The slots of a family take 1 MiB. [`crate::half_open::slot`]
/// gives the slot of a flow.
pub const SLOTS: u32 = crate::half_open::SLOTS;

/// Time in jiffies for which packets of a direction bypass the stack after a stack observation: 0.25 s (HZ=1000) to 2.6
/// s (HZ=100). Kernel conntrack's timeouts of established flows are far longer, so no entry of kernel conntrack expires
/// during the interval.
pub const INTERVAL_JIFFIES: u32 = 256;

map_type! {
    /// Stack observations of a flow.
    pub struct StackSeen: 16, align 8 {
        /// Observation of the client's packets. Bits 0-31: time of the observation in jiffies; 0 if there was none, 1
        /// if the observation has expired and the stack forwards a packet for a new observation, 2 if the connection
        /// has ended or is ending ([`since`]). Bits 32-63: tag of the flow.
        pub request: u64,
        /// Observation of the Pod's packets; bits as in `request`.
        pub reply: u64,
    }
}

/// Special values of the low half of a direction's word, which otherwise contains the time of the last stack
/// observation.
pub mod since {
    /// The stack has not been observed to forward a packet of this direction.
    pub const NEVER: u32 = 0;
    /// The observation has expired, and the program has passed a packet to the stack for a new observation.
    pub const PENDING: u32 = 1;
    /// The connection has ended or is ending.
    pub const ENDED: u32 = 2;
    /// The lowest value that is a time in jiffies. The values below this number are [`NEVER`], [`PENDING`] and
    /// [`ENDED`].
    pub const FIRST_TIME: u32 = 3;
}

/// How the program forwards a packet of an established flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// The packet bypasses the stack.
    Offload,
    /// The stack forwards the packet.
    Stack,
    /// The stack forwards the packet, and the direction becomes [`since::PENDING`].
    Observe,
}

/// Returns the tag that distinguishes a flow from other flows with the same slot. The tag depends on the Pod's
/// generation, so that flows of a later Pod with the same address have other tags.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn tag(hash: u64, generation: u32) -> u32 {
    (hash >> u32::BITS) as u32 ^ generation
}

/// Packs the word that stores the stack observation of a direction. `since` is a time or one of the values in
/// [`mod@since`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn word(tag: u32, since: u32) -> u64 {
    (tag as u64) << u32::BITS | since as u64
}

/// Unpacks the low half of a direction's word: the time of the stack observation, or one of the values in
/// [`mod@since`]. Returns [`since::NEVER`] if the word has the tag of another flow.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
#[expect(clippy::cast_possible_truncation, reason = "only the low half is used")]
pub const fn since_of(word: u64, tag: u32) -> u32 {
    if (word >> u32::BITS) as u32 == tag { word as u32 } else { since::NEVER }
}

/// Decides whether a packet that neither opens nor ends a connection bypasses the stack. `mine` is the word of the
/// packet's direction, and `other` is the word of the opposite direction. `now` is the low 32 bits of `jiffies`.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn decide(mine: u64, other: u64, tag: u32, now: u32) -> Decision {
    let (mine, other) = (since_of(mine, tag), since_of(other, tag));
    // Offload needs an observation of both directions, so the Pod must have replied.
    if mine < since::FIRST_TIME || other == since::NEVER || other == since::ENDED {
        return Decision::Stack;
    }
    if now.wrapping_sub(mine) < INTERVAL_JIFFIES { Decision::Offload } else { Decision::Observe }
}

/// Returns the word of a direction after a program has observed that the stack forwarded a packet of this direction.
/// Returns `None` if the word does not change, because the word already contains a time, the connection has ended, or
/// another offloaded flow has the slot.
///
/// A new time replaces an old time only after [`decide`] has returned [`Decision::Observe`] and the program has stored
/// [`since::PENDING`]. On a bridge, the observing program also runs for redirected packets, so an observation while the
/// direction is offloaded would not prove that the stack forwarded the packet.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
#[expect(clippy::cast_possible_truncation, reason = "only the low half is used")]
pub const fn observe(old: u64, tag: u32, now: u32) -> Option<u64> {
    let time = if now < since::FIRST_TIME { since::FIRST_TIME } else { now };
    let since = since_of(old, tag);
    if since == since::PENDING {
        return Some(word(tag, time));
    }
    // If another flow with the same slot is offloaded, the other flow keeps the slot.
    let is_taken = old as u32 >= since::FIRST_TIME && now.wrapping_sub(old as u32) < INTERVAL_JIFFIES;
    if since != since::NEVER || is_taken { None } else { Some(word(tag, time)) }
}

#[cfg(test)]
mod tests {
    use super::{Decision, INTERVAL_JIFFIES, decide, observe, since, tag, word};

    const TAG: u32 = 0x4e50_4c01;
    const OTHER: u32 = 0x4e50_4c02;
    const NOW: u32 = 1_000_000;

    fn at(time: u32) -> u64 {
        word(TAG, time)
    }

    #[test]
    fn a_direction_is_offloaded_once_both_are_observed() {
        assert_eq!(decide(0, 0, TAG, NOW), Decision::Stack);
        assert_eq!(decide(at(NOW), 0, TAG, NOW), Decision::Stack);
        assert_eq!(decide(0, at(NOW), TAG, NOW), Decision::Stack);
        assert_eq!(decide(at(NOW), at(NOW), TAG, NOW), Decision::Offload);
        assert_eq!(decide(at(NOW), at(since::PENDING), TAG, NOW), Decision::Offload);
        assert_eq!(decide(at(NOW), word(OTHER, NOW), TAG, NOW), Decision::Stack);
        assert_eq!(decide(word(OTHER, NOW), at(NOW), TAG, NOW), Decision::Stack);
    }

    #[test]
    fn an_observation_expires_also_where_jiffies_wrap() {
        for passed in [NOW, u32::MAX - 5, since::FIRST_TIME] {
            let (last, next) = (passed.wrapping_add(INTERVAL_JIFFIES - 1), passed.wrapping_add(INTERVAL_JIFFIES));
            assert_eq!(decide(at(passed), at(passed), TAG, last), Decision::Offload);
            assert_eq!(decide(at(passed), at(passed), TAG, next), Decision::Observe);
        }
        assert_eq!(decide(at(since::PENDING), at(NOW), TAG, NOW), Decision::Stack);
        assert_eq!(observe(at(since::PENDING), TAG, NOW), Some(at(NOW)));
    }

    #[test]
    fn no_packet_is_offloaded_after_the_end_of_a_connection() {
        let ended = at(since::ENDED);
        assert_eq!(decide(ended, at(NOW), TAG, NOW), Decision::Stack);
        assert_eq!(decide(at(NOW), ended, TAG, NOW), Decision::Stack);
        assert_eq!(observe(ended, TAG, NOW), None);
    }

    #[test]
    fn an_offloaded_packet_is_no_observation() {
        assert_eq!(observe(at(NOW), TAG, NOW + 5), None);
        assert_eq!(
            observe(at(NOW), TAG, NOW + INTERVAL_JIFFIES),
            None,
            "an expired direction becomes pending before it is observed again"
        );
    }

    #[test]
    fn another_flow_gets_the_slot_once_its_flow_is_no_longer_offloaded() {
        let theirs = |time| word(OTHER, time);
        assert_eq!(observe(0, TAG, NOW), Some(at(NOW)));
        assert_eq!(observe(theirs(NOW), TAG, NOW + 5), None);
        for quiet in [theirs(NOW - INTERVAL_JIFFIES), theirs(since::PENDING), theirs(since::ENDED)] {
            assert_eq!(observe(quiet, TAG, NOW), Some(at(NOW)));
        }
    }

    #[test]
    fn a_time_is_never_one_of_the_special_values() {
        for now in 0..since::FIRST_TIME {
            assert_eq!(observe(0, TAG, now), Some(at(since::FIRST_TIME)));
        }
    }

    #[test]
    fn another_pod_with_the_address_has_another_tag() {
        assert_ne!(tag(7 << 40, 1), tag(7 << 40, 2));
    }
}
