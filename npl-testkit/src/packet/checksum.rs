// SPDX-License-Identifier: Apache-2.0
//! Full Internet checksums, computed byte by byte as RFC 1071 describes.

use super::{Checksum, Ip};

/// Returns the folded one's complement sum of `bytes`, before inversion.
pub fn ones_complement_sum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = 0;
    for pair in bytes.chunks(2) {
        let high = pair.first().copied().unwrap_or_default();
        let low = pair.get(1).copied().unwrap_or_default();
        sum += u32::from(u16::from_be_bytes([high, low]));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // After the last folding, the sum is at most 0x1_0000, which folds to 1.
    u16::try_from(sum).unwrap_or(1)
}

/// Returns the pseudo header of a transport checksum.
pub(super) fn pseudo_header(ip: &Ip, protocol: u8, length: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let length = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    match ip {
        Ip::V4(header) => {
            bytes.extend(header.source.octets());
            bytes.extend(header.destination.octets());
            bytes.extend([0, protocol, length[2], length[3]]);
        }
        Ip::V6(header) => {
            bytes.extend(header.source.octets());
            bytes.extend(header.destination.octets());
            bytes.extend(length);
            bytes.extend([0, 0, 0, protocol]);
        }
    }
    bytes
}

/// The values of a checksum field that have a meaning.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    /// The complete checksum.
    pub(super) right: u16,
    /// The sum of the pseudo header only, if the protocol has one.
    pub(super) partial: Option<u16>,
}

impl Sums {
    /// Returns the values for a checksum without a pseudo-header: the checksum of an IPv4 header or of an
    /// ICMP message.
    pub(super) fn plain(bytes: &[u8]) -> Self {
        Self { right: !ones_complement_sum(bytes), partial: None }
    }

    /// Returns the values for a transport header and payload whose checksum field is zero.
    pub(super) fn transport(pseudo: &[u8], bytes: &[u8], is_udp: bool) -> Self {
        let right = !ones_complement_sum(&[pseudo, bytes].concat());
        // In UDP, zero means "no checksum", so a computed zero is sent as 0xffff (RFC 768).
        let right = if is_udp && right == 0 { 0xffff } else { right };
        Self { right, partial: Some(ones_complement_sum(pseudo)) }
    }

    pub(super) fn value(self, wanted: Checksum) -> u16 {
        match wanted {
            Checksum::Right => self.right,
            Checksum::Zero => 0,
            Checksum::Partial => self.partial.unwrap_or_default(),
            Checksum::Wrong(value) => value,
        }
    }

    pub(super) fn meaning(self, value: u16) -> Checksum {
        match value {
            right if right == self.right => Checksum::Right,
            0 => Checksum::Zero,
            partial if Some(partial) == self.partial => Checksum::Partial,
            wrong => Checksum::Wrong(wrong),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_matches_the_example_of_the_rfc() {
        // RFC 1071, section 3.
        assert_eq!(ones_complement_sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), 0xddf2);
        assert_eq!(ones_complement_sum(&[0xff, 0xff, 0x00, 0x01]), 1);
        assert_eq!(ones_complement_sum(&[0xab]), 0xab00);
    }

    #[test]
    fn header_checksum_matches_a_captured_packet() {
        let header = [
            0x45, 0x00, 0x00, 0x73, 0x00, 0x00, 0x40, 0x00, 0x40, 0x11, 0x00, 0x00, 0xc0, 0xa8, 0x00, 0x01, 0xc0, 0xa8,
            0x00, 0xc7,
        ];
        assert_eq!(Sums::plain(&header).right, 0xb861);
    }
}
