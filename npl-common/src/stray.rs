// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Stray datagrams: those that come to a node port that leads nowhere. Whoever sends them talks to the Pod that had the port
//! before, and takes whichever has it next for that one; so the next owner comes when they have ceased.
//!
//! A word for each port says when the last one came, in [`crate::fragment::time`]'s unit, or zero if none has.

/// One for each port that there is: 512 KiB.
pub const PORTS: u32 = 65_536;

/// For how long nobody may have sent before conversations count as over, in seconds: as connection tracking remembers one
/// that went both ways.
pub const LIFETIME: u64 = 120;

/// How long ago the last one came by the clock of `now`, in seconds; nothing if that is longer than [`LIFETIME`].
pub const fn silence(word: u64, now: u64) -> Option<u64> {
    let silence = now.saturating_sub(word);
    if word == 0 || silence > LIFETIME { None } else { Some(silence) }
}

#[cfg(test)]
mod tests {
    use super::{LIFETIME, silence};

    #[test]
    fn a_conversation_is_over_when_nobody_has_said_anything_for_its_lifetime() {
        assert_eq!(silence(1_000, 1_000), Some(0));
        assert_eq!(silence(1_000, 1_000 + LIFETIME), Some(LIFETIME));
        assert_eq!(silence(1_000, 1_001 + LIFETIME), None);
    }

    #[test]
    fn a_port_that_nobody_ever_sent_to_is_silent_and_one_that_was_sent_to_since_the_clock_was_read_is_not() {
        assert_eq!(silence(0, 5), None);
        assert_eq!(silence(1_001, 1_000), Some(0));
    }
}
