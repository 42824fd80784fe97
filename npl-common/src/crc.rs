// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Updates the SCTP checksum, a `CRC32c` (RFC 9260, appendix A), incrementally, without reading the whole packet.
//!
//! For messages of equal length, a CRC is linear: the change of the CRC depends only on the changed bits, and on the
//! number of bytes after these bits. The ports are the first four bytes of an SCTP packet, so
//!
//! ```text
//! crc' = crc + (ports' - ports) x^8n   modulo the polynomial, for a packet of n bytes
//! ```
//!
//! Sum and difference of polynomials over GF(2) are both "exclusive or". The power `x^8n` is the product of two table
//! elements, one for each byte of `n`. A table of 3 KiB therefore suffices for packets of every length. The lowest bit
//! of a word is the coefficient of the highest power of `x`, and words are loaded in little-endian order.

/// The CRC polynomial without its highest power.
const POLYNOMIAL: u32 = 0x82f6_3b78;
/// The polynomial `x^0`, which is the number 1.
const ONE: u32 = 1 << 31;
/// The polynomial `x^8`. Each message byte after the changed bits multiplies the change of the CRC by `x^8`.
const BYTE: u32 = 1 << 23;
/// The number of values that a byte can have.
const BYTES: usize = 256;
/// Mask that selects every fourth bit of a word. In the integer product of two masked words, the carries from one
/// selected bit do not reach the next selected bit.
const LANES: u64 = 0x1111_1111_1111_1111;

/// Offset in [`TABLE`] of the remainders: for each byte, the product of the byte and `x^32`, modulo the CRC polynomial.
/// [`times_element`] uses the remainders to reduce a product byte by byte.
const REMAINDERS: u32 = 0;
/// Offset in [`TABLE`] of 256 powers of `x`: element `i` after this offset is `x` to the power `8i`.
const POWERS: u32 = 256;
/// Offset in [`TABLE`] of 256 powers of `x`: element `i` after this offset is `x` to the power `2048i`.
const HIGH_POWERS: u32 = 512;
/// Number of elements of [`TABLE`].
pub const ELEMENTS: usize = 3 * BYTES;

/// Precomputed remainders and powers of `x`, from which [`times_element`] computes products. The agent writes the table
/// to the map `npl_crc`, which the kernel programs read.
pub static TABLE: [u32; ELEMENTS] = table();

/// Returns the checksum of an SCTP packet of `length` bytes after a change of its ports. Checksums and ports are words
/// as loaded by a little-endian processor. `times` multiplies a polynomial by an element of [`TABLE`], as
/// [`times_element`] does.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the verifier limits the stack and the call depth of kernel programs")]
pub fn replace_ports(check: u32, ports: u32, new_ports: u32, length: u16, times: impl Fn(u32, u32) -> u32) -> u32 {
    let [high, low] = length.to_be_bytes();
    let difference = times(ports ^ new_ports, POWERS | u32::from(low));
    check ^ times(difference, HIGH_POWERS | u32::from(high))
}

/// Returns the product of `a` and the element `index` of [`TABLE`], modulo the CRC polynomial. `element` reads an
/// element of the table.
#[inline(always)]
#[expect(
    clippy::inline_always,
    reason = "the kernel programs call this function only in a function that is not inlined"
)]
#[expect(clippy::cast_possible_truncation, reason = "each cast takes one half of the product")]
pub fn times_element(a: u32, index: u32, element: impl Fn(u32) -> u32) -> u32 {
    // The product has 63 bits, and its lowest bit is the coefficient of `x^62`. After the shift, the low half of the
    // word contains the coefficients of `x^63` to `x^32`, which the loop reduces modulo the CRC polynomial.
    let product = carryless(a, element(index)) << 1;
    let mut rest = product as u32;
    for _ in 0..size_of::<u32>() {
        rest = rest >> 8 ^ element(REMAINDERS | rest & 0xff);
    }
    (product >> 32) as u32 ^ rest
}

/// Returns the carry-less product of two words.
///
/// Ordinary multiplication produces carries. If both factors contain only every fourth bit, at most eight ones are
/// added at one position, so a carry never reaches the next position that is used.
#[inline(always)]
#[expect(
    clippy::inline_always,
    reason = "the kernel programs call this function only in a function that is not inlined"
)]
const fn carryless(a: u32, b: u32) -> u64 {
    let (a, b) = (a as u64, b as u64);
    let (a0, a1, a2, a3) = (a & LANES, a & LANES << 1, a & LANES << 2, a & LANES << 3);
    let (b0, b1, b2, b3) = (b & LANES, b & LANES << 1, b & LANES << 2, b & LANES << 3);
    let lane0 = (a0 * b0) ^ (a1 * b3) ^ (a2 * b2) ^ (a3 * b1);
    let lane1 = (a0 * b1) ^ (a1 * b0) ^ (a2 * b3) ^ (a3 * b2);
    let lane2 = (a0 * b2) ^ (a1 * b1) ^ (a2 * b0) ^ (a3 * b3);
    let lane3 = (a0 * b3) ^ (a1 * b2) ^ (a2 * b1) ^ (a3 * b0);
    lane0 & LANES | lane1 & LANES << 1 | lane2 & LANES << 2 | lane3 & LANES << 3
}

const fn table() -> [u32; ELEMENTS] {
    let mut table = [0; ELEMENTS];
    let (mut power, mut high_power) = (ONE, ONE);
    let mut byte = 0_u8;
    let mut high_byte = BYTE;
    let mut doubled = 1;
    while doubled < BYTES {
        high_byte = times_bitwise(high_byte, high_byte);
        doubled *= 2;
    }
    loop {
        // A word's lowest byte contains the coefficients of x^24 to x^31. Multiplied by x^8, these terms have degree
        // 32 or more, so the table's element is their remainder modulo the CRC polynomial, which has degree 32.
        table[REMAINDERS as usize | byte as usize] = shifted(byte as u32, 8);
        table[POWERS as usize | byte as usize] = power;
        table[HIGH_POWERS as usize | byte as usize] = high_power;
        if byte == u8::MAX {
            return table;
        }
        (power, high_power) = (times_bitwise(power, BYTE), times_bitwise(high_power, high_byte));
        byte += 1;
    }
}

/// Returns the product of two polynomials modulo the CRC polynomial, computed bit by bit. This function is used only at
/// compile time, for [`TABLE`].
const fn times_bitwise(a: u32, b: u32) -> u32 {
    let mut product = 0;
    let mut power = 0;
    while power < u32::BITS {
        if a & ONE >> power != 0 {
            product ^= shifted(b, power);
        }
        power += 1;
    }
    product
}

/// Returns the product of the polynomial `word` and `x` to the power `power`, modulo the CRC polynomial.
const fn shifted(mut word: u32, power: u32) -> u32 {
    let mut step = 0;
    while step < power {
        word = if word & 1 == 0 { word >> 1 } else { word >> 1 ^ POLYNOMIAL };
        step += 1;
    }
    word
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{TABLE, carryless, shifted, times_bitwise};

    fn replace_ports(check: u32, ports: u32, new_ports: u32, length: u16) -> u32 {
        super::replace_ports(check, ports, new_ports, length, times_element)
    }

    fn times_element(a: u32, index: u32) -> u32 {
        super::times_element(a, index, |index| TABLE[index as usize])
    }

    /// Returns the CRC of a message, computed bit by bit from the definition of the CRC. The tests compare the
    /// table-driven functions with this function.
    fn full(bytes: &[u8]) -> u32 {
        let mut register = u32::MAX;
        for byte in bytes {
            register ^= u32::from(*byte);
            for _ in 0..8 {
                let out = register & 1;
                register >>= 1;
                if out == 1 {
                    register ^= 0x82f6_3b78;
                }
            }
        }
        !register
    }

    fn word(bytes: &[u8]) -> u32 {
        u32::from_le_bytes(*bytes.first_chunk().unwrap())
    }

    #[test]
    fn the_reference_is_that_of_the_standards() {
        assert_eq!(full(b"123456789"), 0xe306_9283);
        // The test vector of RFC 7143, section A.4: 32 bytes of zeros.
        assert_eq!(full(&[0; 32]), 0x8a91_36aa);
    }

    /// Tests the SCTP header alone (12 bytes), common MTUs, the longest IP packet, and lengths just below and above a
    /// change of the length's high byte.
    #[test]
    fn the_longest_packet_and_lengths_around_each_high_byte_have_the_right_crc() {
        for length in [12, 13, 255, 256, 257, 511, 512, 1500, 4095, 4096, 9000, 32_767, 32_768, 65_535] {
            let mut packet = vec![0x5a; length];
            let before = full(&packet);
            let old = word(&packet);
            packet[..4].copy_from_slice(&[0xee, 0x48, 0x1f, 0x90]);
            let check = replace_ports(before, old, word(&packet), u16::try_from(length).unwrap());
            assert_eq!(check, full(&packet), "{length} bytes");
        }
    }

    proptest! {
        #[test]
        fn replacing_ports_equals_a_full_crc(mut packet in prop::collection::vec(any::<u8>(), 12..9000), ports: [u8; 4]) {
            // The CRC is computed with the checksum field set to zero.
            packet[8..12].fill(0);
            let (before, old) = (full(&packet), word(&packet));
            packet[..4].copy_from_slice(&ports);
            let length = u16::try_from(packet.len()).unwrap();
            prop_assert_eq!(replace_ports(before, old, word(&ports), length), full(&packet));
        }

        #[test]
        fn replacing_ports_back_restores_the_checksum(check: u32, old: u32, new: u32, length: u16) {
            let there = replace_ports(check, old, new, length);
            prop_assert_eq!(replace_ports(there, new, old, length), check);
        }

        #[test]
        fn an_update_keeps_the_error_of_a_wrong_checksum(check: u32, error: u32, old: u32, new: u32, length: u16) {
            let right = replace_ports(check, old, new, length);
            prop_assert_eq!(replace_ports(check ^ error, old, new, length), right ^ error);
        }

        #[test]
        fn products_are_those_of_long_multiplication(a: u32, b: u32) {
            let mut product = 0_u64;
            for bit in 0..32 {
                if a >> bit & 1 == 1 {
                    product ^= u64::from(b) << bit;
                }
            }
            prop_assert_eq!(carryless(a, b), product);
        }

        #[test]
        fn products_with_an_element_are_those_of_long_division(a: u32, index in 0..TABLE.len()) {
            prop_assert_eq!(times_element(a, u32::try_from(index).unwrap()), times_bitwise(a, TABLE[index]));
        }

        #[test]
        fn a_power_of_x_is_a_shift(a: u32, power in 0_u32..32) {
            prop_assert_eq!(times_bitwise(a, 1 << (31 - power)), shifted(a, power));
        }
    }
}
