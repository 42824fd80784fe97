// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Which flows go past the host's stack, with `--forwarding offload`.
//!
//! The stack decides: a direction of a flow is offloaded for a moment after a packet of it has been seen behind the stack,
//! when that has let it through. Then the next packet takes the stack again, and shows whether it still does. So FORWARD
//! rules and connection tracking see each direction of a live flow every [`INTERVAL_JIFFIES`], and end it as they like.
//!
//! What opens or ends a connection always takes the stack, and all that follows its end. A flow has one slot, which others
//! may have too: the first one keeps it while it is offloaded, and the others take the stack.
//!
//! A direction is one aligned 64-bit word, so that a reader sees an old or a new one and never a mixture:
//!
//! ```text
//! 63           32 31            0
//! [ tag: 32 bits ][ jiffies, or one of `since` ]
//! ```

/// Slots of a family: 1 MiB. A flow has the one that [`crate::syn::slot`] gives.
pub const SLOTS: u32 = crate::syn::SLOTS;

/// How long a direction is offloaded after the stack has let a packet through, in jiffies: 0.25 to 2.6 s, as the kernel was
/// built. Connection tracking remembers every established flow for far longer.
pub const INTERVAL_JIFFIES: u32 = 256;

map_type! {
    /// When the host's stack has let a flow's packets through.
    pub struct Passed: 16, align 8 {
        /// A word for the client's packets.
        pub request: u64,
        /// A word for the Pod's.
        pub reply: u64,
    }
}

/// What stands in the place of a time.
pub mod since {
    /// The stack has not let anything through.
    pub const NEVER: u32 = 0;
    /// It did, and the next packet shows whether it still does.
    pub const ASKED: u32 = 1;
    /// The connection is over, or about to be.
    pub const ENDED: u32 = 2;
    /// The first time.
    pub const FIRST: u32 = 3;
}

/// Where a packet goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Past the host's stack.
    Offload,
    /// By the stack.
    Stack,
    /// By the stack, and its direction is [`since::ASKED`] now.
    Ask,
}

/// What tells a flow from others of its slot; another Pod's with the same address has another generation.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn tag(hash: u64, generation: u32) -> u32 {
    (hash >> u32::BITS) as u32 ^ generation
}

/// The word of a flow's direction; `since` is a time or one of [`mod@since`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn word(tag: u32, since: u32) -> u64 {
    (tag as u64) << u32::BITS | since as u64
}

/// Since when a word says that this flow's packets pass; [`since::NEVER`] if it is another flow's.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
#[expect(clippy::cast_possible_truncation, reason = "the low half")]
pub const fn since_of(word: u64, tag: u32) -> u32 {
    if (word >> u32::BITS) as u32 == tag { word as u32 } else { since::NEVER }
}

/// Where a packet that neither opens nor ends a connection goes, by the word of its direction and that of the other one.
/// `now` is the low half of `jiffies`.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn decide(mine: u64, other: u64, tag: u32, now: u32) -> Decision {
    let (mine, other) = (since_of(mine, tag), since_of(other, tag));
    // Until the Pod has answered, there is no exchange that the stack could have let through.
    if mine < since::FIRST || other == since::NEVER || other == since::ENDED {
        return Decision::Stack;
    }
    if now.wrapping_sub(mine) < INTERVAL_JIFFIES { Decision::Offload } else { Decision::Ask }
}

/// What a direction's word becomes when the stack has let a packet through; nothing if it stays.
///
/// One that is offloaded stays: on a bridge, its packets come by where those of the stack do, and show nothing.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
#[expect(clippy::cast_possible_truncation, reason = "the low half")]
pub const fn passed(old: u64, tag: u32, now: u32) -> Option<u64> {
    let time = if now < since::FIRST { since::FIRST } else { now };
    let since = since_of(old, tag);
    if since == since::ASKED {
        return Some(word(tag, time));
    }
    // Another flow's word, or none's; one that is offloaded has it to itself.
    let is_taken = old as u32 >= since::FIRST && now.wrapping_sub(old as u32) < INTERVAL_JIFFIES;
    if since != since::NEVER || is_taken { None } else { Some(word(tag, time)) }
}

#[cfg(test)]
mod tests {
    use super::{Decision, INTERVAL_JIFFIES, decide, passed, since, tag, word};

    const TAG: u32 = 0x4e50_4c01;
    const OTHER: u32 = 0x4e50_4c02;
    const NOW: u32 = 1_000_000;

    fn at(time: u32) -> u64 {
        word(TAG, time)
    }

    #[test]
    fn a_direction_is_offloaded_once_both_have_passed() {
        assert_eq!(decide(0, 0, TAG, NOW), Decision::Stack);
        assert_eq!(decide(at(NOW), 0, TAG, NOW), Decision::Stack);
        assert_eq!(decide(0, at(NOW), TAG, NOW), Decision::Stack);
        assert_eq!(decide(at(NOW), at(NOW), TAG, NOW), Decision::Offload);
        assert_eq!(decide(at(NOW), at(since::ASKED), TAG, NOW), Decision::Offload);
        assert_eq!(decide(at(NOW), word(OTHER, NOW), TAG, NOW), Decision::Stack);
        assert_eq!(decide(word(OTHER, NOW), at(NOW), TAG, NOW), Decision::Stack);
    }

    #[test]
    fn it_is_asked_for_again_after_a_while_also_where_jiffies_wrap() {
        for passed in [NOW, u32::MAX - 5, since::FIRST] {
            let (last, next) = (passed.wrapping_add(INTERVAL_JIFFIES - 1), passed.wrapping_add(INTERVAL_JIFFIES));
            assert_eq!(decide(at(passed), at(passed), TAG, last), Decision::Offload);
            assert_eq!(decide(at(passed), at(passed), TAG, next), Decision::Ask);
        }
        assert_eq!(decide(at(since::ASKED), at(NOW), TAG, NOW), Decision::Stack);
        assert_eq!(passed(at(since::ASKED), TAG, NOW), Some(at(NOW)));
    }

    #[test]
    fn after_the_end_nothing_is_offloaded_again() {
        let ended = at(since::ENDED);
        assert_eq!(decide(ended, at(NOW), TAG, NOW), Decision::Stack);
        assert_eq!(decide(at(NOW), ended, TAG, NOW), Decision::Stack);
        assert_eq!(passed(ended, TAG, NOW), None);
    }

    #[test]
    fn what_is_offloaded_shows_nothing_of_the_stack() {
        assert_eq!(passed(at(NOW), TAG, NOW + 5), None);
        assert_eq!(passed(at(NOW), TAG, NOW + INTERVAL_JIFFIES), None, "until the next packet has asked");
    }

    #[test]
    fn a_slot_is_taken_over_when_its_flow_has_gone_quiet() {
        let theirs = |time| word(OTHER, time);
        assert_eq!(passed(0, TAG, NOW), Some(at(NOW)));
        assert_eq!(passed(theirs(NOW), TAG, NOW + 5), None);
        for quiet in [theirs(NOW - INTERVAL_JIFFIES), theirs(since::ASKED), theirs(since::ENDED)] {
            assert_eq!(passed(quiet, TAG, NOW), Some(at(NOW)));
        }
    }

    #[test]
    fn a_time_is_never_taken_for_a_word_that_is_none() {
        for now in 0..since::FIRST {
            assert_eq!(passed(0, TAG, now), Some(at(since::FIRST)));
        }
    }

    #[test]
    fn another_pod_with_the_address_has_another_tag() {
        assert_ne!(tag(7 << 40, 1), tag(7 << 40, 2));
    }
}
