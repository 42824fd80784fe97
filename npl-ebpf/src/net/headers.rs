// SPDX-License-Identifier: GPL-2.0-only
//! Defines transport headers. All fields are in network byte order, as loaded from the packet.

use npl_common::mapping::protocol;

pub use npl_common::flow::tcp_flag;

/// Source and destination port, which TCP, UDP and SCTP have at the same offset.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Ports {
    pub source: u16,
    pub destination: u16,
}

impl Ports {
    /// The value for a packet without ports.
    pub const NONE: Self = Self { source: 0, destination: 0 };

    /// Returns the source and the destination port in one 32-bit word.
    #[inline(always)]
    pub const fn as_u32(self) -> u32 {
        self.source as u32 | (self.destination as u32) << u16::BITS
    }
}

/// A TCP header without options (RFC 9293).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TcpHeader {
    pub ports: Ports,
    pub sequence: u32,
    pub acknowledgement: u32,
    pub offset: u8,
    pub flags: u8,
    pub window: u16,
    pub check: u16,
    pub urgent: u16,
}

impl TcpHeader {
    /// Returns the length of the header in bytes, including its options.
    #[inline(always)]
    pub const fn length(&self) -> usize {
        (self.offset >> 4) as usize * 4
    }
}

/// A UDP header (RFC 768).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UdpHeader {
    pub ports: Ports,
    pub length: u16,
    pub check: u16,
}

/// An ICMP or `ICMPv6` header (RFC 792, RFC 4443).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IcmpHeader {
    pub kind: u8,
    pub code: u8,
    pub check: u16,
    pub body: u32,
}

/// Returns whether the fast path translates packets of this protocol.
#[inline(always)]
pub const fn is_fast_path_protocol(protocol: u8) -> bool {
    matches!(protocol, protocol::TCP | protocol::UDP)
}

/// Returns whether mappings can have this protocol.
#[inline(always)]
pub const fn has_ports(protocol: u8) -> bool {
    is_fast_path_protocol(protocol) || protocol == protocol::SCTP
}
