// SPDX-License-Identifier: Apache-2.0
//! SCTP packets (RFC 9260), with their checksum bit by bit as the standard describes it.

use std::net::SocketAddr;

use super::{Packet, ParseError, Transport};

/// Kinds of chunks.
pub mod sctp_chunks {
    /// What the application sends.
    pub const DATA: u8 = 0;
    /// Opens an association; the only chunk of its packet.
    pub const INIT: u8 = 1;
    /// The answer to that, with a cookie.
    pub const INIT_ACK: u8 = 2;
    /// Refused or broken off.
    pub const ABORT: u8 = 6;
    /// No more data from the sender.
    pub const SHUTDOWN: u8 = 7;
    /// The answer to that.
    pub const SHUTDOWN_ACK: u8 = 8;
    /// The cookie, back from the client.
    pub const COOKIE_ECHO: u8 = 10;
    /// The association is there.
    pub const COOKIE_ACK: u8 = 11;
    /// The association is over.
    pub const SHUTDOWN_COMPLETE: u8 = 14;
}

/// The verification tag of both directions, which INIT and INIT ACK begin with: connection tracking compares.
pub const SCTP_TAG: u32 = 0x5a01_0203;

/// Bytes of the header that all chunks share.
const HEADER: usize = 12;
/// Offset of the checksum.
const CHECKSUM: usize = 8;

/// An SCTP packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sctp {
    /// From which port.
    pub source: u16,
    /// To which port.
    pub destination: u16,
    /// The verification tag.
    pub tag: u32,
    /// The checksum.
    pub checksum: Crc,
    /// All chunks, as they are.
    pub chunks: Vec<u8>,
}

/// The checksum field, in terms of what ought to be in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crc {
    /// The right one.
    Right,
    /// Zero: a device is to fill it in.
    Zero,
    /// Something else, as bits that differ from the right one.
    WrongBy(u32),
}

impl Packet {
    /// An SCTP packet with one chunk, as the Node sees it.
    pub fn sctp(source: SocketAddr, destination: SocketAddr, kind: u8, content: &[u8]) -> Self {
        let length = u16::try_from(content.len() + 4).unwrap_or(u16::MAX);
        let mut chunks = [&[kind, 0], length.to_be_bytes().as_slice(), content].concat();
        chunks.resize(chunks.len().next_multiple_of(4), 0);
        let tag = if kind == sctp_chunks::INIT { 0 } else { SCTP_TAG };
        let (source_port, destination_port) = (source.port(), destination.port());
        let sctp = Sctp { source: source_port, destination: destination_port, tag, checksum: Crc::Right, chunks };
        Self::new(source.ip(), destination.ip(), Transport::Sctp(sctp))
    }
}

impl Sctp {
    pub(super) fn build(&self) -> Vec<u8> {
        let mut bytes = [self.source, self.destination].map(u16::to_be_bytes).concat();
        bytes.extend(self.tag.to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend(&self.chunks);
        let value = match self.checksum {
            Crc::Right => crc32c(&bytes),
            Crc::Zero => 0,
            Crc::WrongBy(bits) => crc32c(&bytes) ^ bits,
        };
        bytes[CHECKSUM..HEADER].copy_from_slice(&value.to_le_bytes());
        bytes
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let Some((header, chunks)) = bytes.split_first_chunk::<HEADER>() else { return Err(ParseError::Short("SCTP")) };
        let [s0, s1, d0, d1, t0, t1, t2, t3, value @ ..] = *header;
        let mut covered = bytes.to_vec();
        covered[CHECKSUM..HEADER].fill(0);
        let checksum = match (u32::from_le_bytes(value), crc32c(&covered)) {
            (value, right) if value == right => Crc::Right,
            (0, _) => Crc::Zero,
            (value, right) => Crc::WrongBy(value ^ right),
        };
        let (source, destination) = (u16::from_be_bytes([s0, s1]), u16::from_be_bytes([d0, d1]));
        let tag = u32::from_be_bytes([t0, t1, t2, t3]);
        Ok(Self { source, destination, tag, checksum, chunks: chunks.to_vec() })
    }
}

/// The CRC of `bytes`, in which the checksum's own field is zero. Its lowest byte is sent first.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut register = u32::MAX;
    for byte in bytes {
        register ^= u32::from(*byte);
        for _bit in 0..8 {
            let quotient = if register & 1 == 1 { 0x82f6_3b78 } else { 0 };
            register = register >> 1 ^ quotient;
        }
    }
    !register
}

#[cfg(test)]
mod tests {
    use super::{Crc, Packet, Transport, crc32c, sctp_chunks};

    #[test]
    fn crc_is_that_of_the_standards() {
        // RFC 7143, section A.4, and the value that catalogues of CRCs give.
        assert_eq!(crc32c(&[0; 32]).to_le_bytes(), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn every_checksum_survives_the_round_trip() {
        let (client, node) = ("198.51.100.2:43210".parse().unwrap(), "192.0.2.10:61000".parse().unwrap());
        for checksum in [Crc::Right, Crc::Zero, Crc::WrongBy(0x1234)] {
            let mut packet = Packet::sctp(client, node, sctp_chunks::DATA, b"odd length");
            let Transport::Sctp(sctp) = &mut packet.transport else { unreachable!() };
            sctp.checksum = checksum;
            assert_eq!(Packet::parse(&packet.build()), Ok(packet));
        }
    }
}
