// SPDX-License-Identifier: Apache-2.0
//! The first frame of each kind of packet. The packet generator derives all further frames from the first frame.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use npl_common::traffic::FRAME_BYTES;

use crate::echo::Protocol;
use crate::packet::{Ethernet, Packet, sctp_chunks, tcp_flags};
use crate::topology::Device;

/// The size of the Ethernet, IPv4 and UDP headers together, in bytes.
const UDP_HEADERS: usize = 14 + 20 + 8;

/// The payload size of a first fragment. Payload and UDP header together are a multiple of eight bytes, as in all
/// fragments except the last one.
const FRAGMENT_PAYLOAD: usize = 16;

/// The content of an SCTP chunk. The content is shorter than the content of a real client's INIT, so that the packet
/// fits into [`FRAME_BYTES`].
const CHUNK_CONTENT: [u8; 8] = [1; 8];

/// A generated packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// A UDP datagram.
    Datagram,
    /// A TCP segment with the flag SYN.
    Syn,
    /// A TCP segment with the flag ACK.
    Ack,
    /// A TCP segment with the flag RST.
    Rst,
    /// A TCP segment without flags.
    Null,
    /// A TCP segment with the flags SYN and ACK.
    SynAck,
    /// An SCTP packet with an INIT chunk. The CRC and the verification tag are wrong in all packets except the first.
    /// The generator does not update the CRC. At the position of a UDP checksum, an SCTP packet has half of its tag,
    /// which the generator overwrites.
    SctpInit,
    /// An SCTP packet with a DATA chunk. As in [`Self::SctpInit`], the CRC and the tag are wrong in all packets except
    /// the first.
    SctpData,
    /// The first fragment of a UDP datagram whose other fragments never follow.
    FirstFragment,
}

impl Segment {
    /// The transport protocol.
    pub const fn protocol(self) -> Protocol {
        match self {
            Self::Datagram | Self::FirstFragment => Protocol::Udp,
            Self::Syn | Self::Ack | Self::Rst | Self::Null | Self::SynAck => Protocol::Tcp,
            Self::SctpInit | Self::SctpData => Protocol::Sctp,
        }
    }

    fn packet(self, source: SocketAddr, destination: SocketAddr) -> Packet {
        match self {
            Self::Datagram => Packet::udp(source, destination, &[0; FRAME_BYTES - UDP_HEADERS]),
            Self::Syn => Packet::tcp(source, destination, tcp_flags::SYN, &[]),
            Self::Ack => Packet::tcp(source, destination, tcp_flags::ACK, &[]),
            Self::Rst => Packet::tcp(source, destination, tcp_flags::RST, &[]),
            Self::Null => Packet::tcp(source, destination, 0, &[]),
            Self::SynAck => Packet::tcp(source, destination, tcp_flags::SYN | tcp_flags::ACK, &[]),
            Self::SctpInit => Packet::sctp(source, destination, sctp_chunks::INIT, &CHUNK_CONTENT),
            Self::SctpData => Packet::sctp(source, destination, sctp_chunks::DATA, &CHUNK_CONTENT),
            Self::FirstFragment => Packet::udp(source, destination, &[0; FRAGMENT_PAYLOAD]),
        }
    }
}

/// Builds the first frame, as sent by device `from` to device `to`. The IPv4 identification contains the port
/// `arrives_at`, so that the counter recognizes packets that arrive at the expected port.
pub fn frame(
    segment: Segment,
    [from, to]: [&Device; 2],
    [source, destination]: [SocketAddr; 2],
    arrives_at: u16,
) -> Result<[u8; FRAME_BYTES]> {
    let mut packet = segment.packet(source, destination);
    packet.ethernet =
        Some(Ethernet { destination: to.link_address()?, source: from.link_address()?, vlans: Vec::new() });
    let header = packet.ipv4_mut().context("the generator sends IPv4 packets only")?;
    header.identification = arrives_at;
    if segment == Segment::FirstFragment {
        (header.dont_fragment, header.more_fragments) = (false, true);
    }
    let mut bytes = packet.build();
    // The frame is padded to the minimum length of Ethernet.
    bytes.resize(FRAME_BYTES, 0);
    bytes.try_into().ok().context("the frame is longer than the frames of the generator")
}
