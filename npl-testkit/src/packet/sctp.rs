// SPDX-License-Identifier: Apache-2.0
//! SCTP packets (RFC 9260). The CRC is computed bit by bit as the standard describes.

use std::net::SocketAddr;

use super::{Packet, ParseError, Transport};

/// Chunk types.
pub mod sctp_chunks {
    /// User data.
    pub const DATA: u8 = 0;
    /// Opens an association; the only chunk of its packet.
    pub const INIT: u8 = 1;
    /// Response to INIT, with a state cookie.
    pub const INIT_ACK: u8 = 2;
    /// Acknowledges data.
    pub const SACK: u8 = 3;
    /// Asks whether the other side is reachable.
    pub const HEARTBEAT: u8 = 4;
    /// Response to HEARTBEAT, with the content of the HEARTBEAT.
    pub const HEARTBEAT_ACK: u8 = 5;
    /// Rejects or aborts the association.
    pub const ABORT: u8 = 6;
    /// The sender has no more data.
    pub const SHUTDOWN: u8 = 7;
    /// Response to SHUTDOWN.
    pub const SHUTDOWN_ACK: u8 = 8;
    /// Reports an error that does not end the association.
    pub const ERROR: u8 = 9;
    /// Returns the state cookie to the server.
    pub const COOKIE_ECHO: u8 = 10;
    /// Confirms the association.
    pub const COOKIE_ACK: u8 = 11;
    /// The association is closed.
    pub const SHUTDOWN_COMPLETE: u8 = 14;
    /// Authenticates the chunks that follow (RFC 4895).
    pub const AUTH: u8 = 15;
    /// Changes the settings of the association (RFC 6525).
    pub const RE_CONFIG: u8 = 130;
    /// Skips data up to a TSN (RFC 3758).
    pub const FORWARD_TSN: u8 = 192;
}

/// The verification tag of both directions, and the initiate tag of INIT and INIT ACK. All these tags are equal,
/// because kernel conntrack compares them.
pub const SCTP_TAG: u32 = 0x5a01_0203;

/// Length of the common header.
const HEADER: usize = 12;
/// Offset of the checksum.
const CHECKSUM: usize = 8;

/// An SCTP packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sctp {
    /// The source port.
    pub source: u16,
    /// The destination port.
    pub destination: u16,
    /// The verification tag.
    pub tag: u32,
    pub checksum: Crc,
    /// All chunks, unparsed.
    pub chunks: Vec<u8>,
}

/// The value of the checksum field, relative to the correct checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crc {
    /// The correct checksum.
    Right,
    /// Zero: the device fills in the checksum (offload).
    Zero,
    /// A wrong value: the correct checksum XOR this number.
    WrongBy(u32),
}

impl Packet {
    /// Creates an SCTP packet with one chunk, as received by the Node.
    pub fn sctp(source: SocketAddr, destination: SocketAddr, kind: u8, content: &[u8]) -> Self {
        let tag = if kind == sctp_chunks::INIT { 0 } else { SCTP_TAG };
        let (source_port, destination_port) = (source.port(), destination.port());
        let mut sctp =
            Sctp { source: source_port, destination: destination_port, tag, checksum: Crc::Right, chunks: Vec::new() };
        sctp.add_chunk(kind, content);
        Self::new(source.ip(), destination.ip(), Transport::Sctp(sctp))
    }
}

impl Sctp {
    /// Adds a chunk at the end of the packet.
    pub fn add_chunk(&mut self, kind: u8, content: &[u8]) {
        let length = u16::try_from(content.len() + 4).unwrap_or(u16::MAX);
        self.chunks.extend([&[kind, 0], length.to_be_bytes().as_slice(), content].concat());
        self.chunks.resize(self.chunks.len().next_multiple_of(4), 0);
    }

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

/// Returns the CRC of `bytes`, whose checksum field must be zero. In the packet, the lowest byte of the CRC comes
/// first.
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
    fn crc_matches_the_standards() {
        // RFC 7143, section A.4, and the common check value of CRC-32C.
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
