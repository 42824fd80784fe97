// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Incremental Internet checksum, RFC 1624 equation 3.
//!
//! A checksum is taken and given as it stands in the packet, and so are the words: loaded from memory in whatever
//! byte order the processor has. The sum of ones-complement words does not depend on it as long as all agree.

/// Folds the carries of a sum of up to 65 536 words into 16 bits.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
#[expect(clippy::cast_possible_truncation, reason = "two folds leave 16 bits")]
pub const fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// The checksum after one 16-bit word of what it covers changed from `old` to `new`.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn replace16(check: u16, old: u16, new: u16) -> u16 {
    !fold(!check as u32 + !old as u32 + new as u32)
}

/// The checksum after a 32-bit word that it covers, at an even offset, changed from `old` to `new`.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn replace32(check: u16, old: u32, new: u32) -> u16 {
    let removed = (!old & 0xffff) + (!old >> 16);
    let added = (new & 0xffff) + (new >> 16);
    !fold(!check as u32 + removed + added)
}

/// The ones-complement sum of what changed when a 16-bit word went from `old` to `new`: what `bpf_csum_update` takes.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call in the packet path costs more than the body")]
pub const fn difference16(old: u16, new: u16) -> u32 {
    !old as u32 + new as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{difference16, fold, replace16, replace32};

    /// The checksum from its definition (RFC 1071), as the independent check of the shortcuts.
    fn full(words: &[u16]) -> u16 {
        let mut sum = 0_u64;
        for word in words {
            sum += u64::from(*word);
        }
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !u16::try_from(sum).unwrap()
    }

    /// Zero has two forms in ones-complement arithmetic; both mean the same to a receiver.
    fn same(a: u16, b: u16) -> bool {
        a == b || (a == 0 && b == 0xffff) || (a == 0xffff && b == 0)
    }

    #[test]
    fn the_example_of_rfc_1624_holds() {
        // Section 4: header checksum 0xDD2F, a word changes from 0x5555 to 0x3285, the result is 0x0000.
        assert_eq!(replace16(0xdd2f, 0x5555, 0x3285), 0x0000);
    }

    proptest! {
        #[test]
        fn replacing_a_word_equals_a_full_sum(mut words in prop::collection::vec(any::<u16>(), 1..40), at: prop::sample::Index, new: u16) {
            let before = full(&words);
            let at = at.index(words.len());
            let old = words[at];
            words[at] = new;
            prop_assert!(same(replace16(before, old, new), full(&words)));
        }

        #[test]
        fn replacing_an_address_equals_two_words(check: u16, old: u32, new: u32) {
            let [old_words, new_words] = [old, new].map(|word| {
                let [a, b, c, d] = word.to_be_bytes();
                (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]))
            });
            let by_words = replace16(replace16(check, old_words.0, new_words.0), old_words.1, new_words.1);
            prop_assert!(same(replace32(check, old, new), by_words));
        }

        #[test]
        fn replacing_back_restores_the_checksum(check: u16, old: u32, new: u32) {
            prop_assert!(same(replace32(replace32(check, old, new), new, old), check));
        }

        #[test]
        fn a_difference_added_to_a_sum_equals_the_new_sum(words in prop::collection::vec(any::<u16>(), 1..40), new: u16) {
            let sum = u32::from(!full(&words));
            let mut changed = words.clone();
            changed[0] = new;
            prop_assert!(same(fold(sum + difference16(words[0], new)), !full(&changed)));
        }
    }
}
