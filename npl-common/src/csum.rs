// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Updates the Internet checksum incrementally (RFC 1624, equation 3).
//!
//! Checksums and words have the byte order in which they are loaded from the packet. A ones-complement sum does not
//! depend on the byte order, as long as all words have the same byte order.

/// Reduces the sum of at most 65 536 words of 16 bits to 16 bits: adds the carries, which are the high bits, to the low
/// 16 bits.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
#[expect(clippy::cast_possible_truncation, reason = "after two folds, the sum has 16 bits")]
pub const fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// Returns the checksum after one 16-bit word of the covered data changed from `old` to `new`.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn replace16(check: u16, old: u16, new: u16) -> u16 {
    !fold(!check as u32 + !old as u32 + new as u32)
}

/// Returns the contribution of a 32-bit word, at an even offset of the covered data, to the sum of an Internet
/// checksum.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn sum32(word: u32) -> u32 {
    (word & 0xffff) + (word >> 16)
}

/// Returns the checksum after a 32-bit word at an even offset of the covered data changed from `old` to `new`.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn replace32(check: u16, old: u32, new: u32) -> u16 {
    !fold(!check as u32 + difference32(old, new))
}

/// Returns the difference to pass to `bpf_l4_csum_replace` if a 32-bit word changes from `old` to `new`. The sum of
/// four differences fits in 32 bits, so the change of an IPv6 address can be passed as one difference.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn difference32(old: u32, new: u32) -> u32 {
    sum32(!old) + sum32(new)
}

/// Returns the sum of a pseudo-header (RFC 9293, RFC 8200). The transport checksum field contains this sum if hardware
/// completes the checksum. `addresses` is the sum of both addresses, and `length` is in host byte order. The result is
/// in network byte order.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn pseudo_header(addresses: u32, protocol: u8, length: u16) -> u16 {
    fold(addresses + (protocol as u16).to_be() as u32 + length.to_be() as u32)
}

/// Returns whether two ones-complement numbers are equal. Zero has two representations: 0 and 0xffff.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn same(a: u16, b: u16) -> bool {
    a == b || (a ^ b == 0xffff && (a == 0 || b == 0))
}

/// The kind of sum that a transport checksum field contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    /// A complete checksum: the complement of the sum of pseudo-header and segment.
    Checksum,
    /// Only the sum of the pseudo-header, not complemented, to which hardware adds the sum of the segment
    /// (`CHECKSUM_PARTIAL`).
    PseudoHeader,
}

/// Returns whether a transport checksum field contains a complete checksum or only the pseudo-header sum, inferred from
/// the field's values before and after the kernel's helper `bpf_l4_csum_replace` updated the field. `difference` is the
/// change of the pseudo-header's sum.
///
/// Programs cannot read whether a field contains a complete checksum or only the pseudo-header sum. The helper
/// subtracts the change from a complete checksum, and adds the change to a pseudo-header sum. The result is `None` if
/// the change is zero.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a function call in the packet path costs more than the function's body")]
pub const fn field_kind(before: u16, after: u16, difference: u32) -> Option<Field> {
    let difference = fold(difference);
    if same(difference, 0) {
        None
    } else if same(fold(after as u32 + difference as u32), before) {
        Some(Field::Checksum)
    } else {
        Some(Field::PseudoHeader)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Field, difference32, field_kind, fold, pseudo_header, replace16, replace32, same, sum32};

    /// Returns the Internet checksum, computed from its definition (RFC 1071). The tests compare the incremental
    /// updates with this checksum.
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

    #[test]
    fn the_example_of_rfc_1624_holds() {
        // RFC 1624, section 4: header checksum 0xDD2F, a word changes from 0x5555 to 0x3285, the result is 0x0000.
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
        fn a_difference_added_to_a_sum_equals_the_new_sum(words in prop::collection::vec(any::<u32>(), 4), new: u32) {
            let halves = |words: &[u32]| -> Vec<u16> {
                words.iter().flat_map(|word| {
                    let [a, b, c, d] = word.to_ne_bytes();
                    [u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])]
                }).collect()
            };
            let sum = u32::from(!full(&halves(&words)));
            let mut changed = words.clone();
            changed[0] = new;
            prop_assert!(same(fold(sum + difference32(words[0], new)), !full(&halves(&changed))));
        }

        #[test]
        fn the_change_by_the_kernel_shows_the_content_of_the_field(before: u16, old: u32, new: u32) {
            let difference = difference32(old, new);
            let checksum = !fold(u32::from(!before) + difference);
            let pseudo_header = fold(u32::from(before) + difference);
            if same(fold(difference), 0) {
                prop_assert_eq!(field_kind(before, checksum, difference), None);
            } else {
                prop_assert_eq!(field_kind(before, checksum, difference), Some(Field::Checksum));
                prop_assert_eq!(field_kind(before, pseudo_header, difference), Some(Field::PseudoHeader));
            }
        }

        #[test]
        fn the_sum_of_a_pseudo_header_follows_its_definition(source: [u8; 4], destination: [u8; 4], protocol: u8, length: u16) {
            let [a, b] = length.to_be_bytes();
            let bytes = [source, destination, [0, protocol, a, b]].concat();
            let words: Vec<u16> = bytes.chunks(2).map(|pair| u16::from_ne_bytes([pair[0], pair[1]])).collect();
            let ends = sum32(u32::from_ne_bytes(source)) + sum32(u32::from_ne_bytes(destination));
            prop_assert!(same(pseudo_header(ends, protocol, length), !full(&words)));
        }

        #[test]
        fn only_zero_has_two_representations(a: u16, b: u16) {
            prop_assert!(same(0, 0xffff) && same(0xffff, 0) && same(a, a));
            prop_assert_eq!(same(a, b), u32::from(a) % 0xffff == u32::from(b) % 0xffff);
        }
    }
}
