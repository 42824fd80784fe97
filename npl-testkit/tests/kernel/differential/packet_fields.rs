// SPDX-License-Identifier: Apache-2.0
//! Header fields, options and fragmentation of a packet, which a translation must preserve.

use npl_testkit::packet::{Checksum, Ip, Packet};

use super::node_pair::Endpoint;
use crate::prog_run::extensions::{DESTINATION_OPTIONS, HOP_BY_HOP, SIX, extended};
use crate::prog_run::fragments::pieces;

/// IPv4 options that hosts accept: none, padding, router alert, record route, timestamp, security, and options of the
/// maximum length. The timestamp option has no room for a time stamp, because the time would differ in each run.
pub(super) const OPTIONS: [&[u8]; 7] = [
    &[],
    &[1, 1, 1, 0],
    &[148, 4, 0, 0],
    &[7, 11, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    &[68, 8, 9, 0, 0, 1, 2, 3],
    &[130, 11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    &[1; 40],
];

/// An extension header: its type, and all bytes after the first two.
type Extension = (u8, &'static [u8]);

const ROUTING: u8 = 43;
/// A routing header whose field "segments left" is zero.
const ROUTE_WITHOUT_SEGMENTS: Extension =
    (ROUTING, &[2, 0, 0, 0, 0, 0, 0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
/// Fourteen bytes of padding options.
const PADDING: &[u8] = &[1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const DESTINATION_PADDING: Extension = (DESTINATION_OPTIONS, SIX);

/// Chains of IPv6 extension headers, up to the number that NPL parses.
pub(super) const EXTENSIONS: [&[Extension]; 7] = [
    &[],
    &[(HOP_BY_HOP, SIX)],
    &[(DESTINATION_OPTIONS, PADDING)],
    &[ROUTE_WITHOUT_SEGMENTS],
    &[(HOP_BY_HOP, PADDING), DESTINATION_PADDING],
    &[(HOP_BY_HOP, SIX), DESTINATION_PADDING, ROUTE_WITHOUT_SEGMENTS, DESTINATION_PADDING],
    &[DESTINATION_PADDING; 6],
];

/// Fragmentation of a datagram, and the order in which the fragments are sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fragmentation {
    /// The payload size in bytes of each fragment except the last one.
    pub(super) size: u16,
    pub(super) order: Order,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Ascending,
    Descending,
    FirstLast,
    LastFirst,
}

/// The properties of a packet that a translation does not change.
#[derive(Clone, Debug)]
pub(super) struct PacketFields {
    pub(super) class: u8,
    pub(super) hops: u8,
    pub(super) identification: u16,
    pub(super) dont_fragment: bool,
    /// Index into [`OPTIONS`] for IPv4, or into [`EXTENSIONS`] for IPv6.
    pub(super) options: usize,
    pub(super) checksum: Checksum,
    /// Number of bytes in the frame after the end of the packet.
    pub(super) trailer: u8,
    pub(super) fragmentation: Option<Fragmentation>,
}

impl PacketFields {
    /// A packet with ordinary fields: no options, not fragmented.
    pub(super) const PLAIN: Self = Self {
        class: 0,
        hops: 64,
        identification: 0x4e50,
        dont_fragment: true,
        options: 0,
        checksum: Checksum::Right,
        trailer: 0,
        fragmentation: None,
    };

    /// Returns the frames of a packet: one frame, or all its fragments.
    pub(super) fn frames(&self, packet: &Packet, from: Endpoint) -> Vec<Vec<u8>> {
        let mut packet = packet.clone();
        packet.ethernet = Some(from.ethernet());
        match &mut packet.ip {
            Ip::V4(header) => {
                (header.tos, header.ttl, header.identification) = (self.class, self.hops, self.identification);
                header.dont_fragment = self.dont_fragment && self.fragmentation.is_none();
                header.options = if self.fragmentation.is_none() { OPTIONS[self.options].to_vec() } else { Vec::new() };
            }
            Ip::V6(header) => {
                (header.traffic_class, header.hop_limit) = (self.class, self.hops);
                header.flow_label = u32::from(self.identification) << 2;
            }
        }
        if let Some(checksum) = packet.transport.checksum_mut() {
            *checksum = self.checksum;
        }
        if let Some(fragmentation) = self.fragmentation {
            return fragmentation.frames(&packet, self.identification);
        }
        let mut frame =
            if matches!(packet.ip, Ip::V6(_)) { extended(&packet, EXTENSIONS[self.options]) } else { packet.build() };
        frame.extend((0..self.trailer).map(|byte| byte ^ 0xa5));
        vec![frame]
    }
}

impl Fragmentation {
    fn frames(self, packet: &Packet, identification: u16) -> Vec<Vec<u8>> {
        let mut frames = pieces(packet, u32::from(identification), self.size.into());
        match self.order {
            Order::Ascending => {}
            Order::Descending => frames.reverse(),
            Order::FirstLast => frames.rotate_left(1),
            Order::LastFirst => frames.rotate_right(1),
        }
        frames
    }
}
