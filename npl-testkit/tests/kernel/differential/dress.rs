// SPDX-License-Identifier: Apache-2.0
//! What a packet has beside addresses, ports and data: everything that a translation must leave as it is.

use npl_testkit::packet::{Checksum, Ip, Packet};

use super::twin::End;
use crate::prog_run::extensions::{DESTINATION_OPTIONS, HOP_BY_HOP, SIX, extended};
use crate::prog_run::fragments::pieces;

/// IPv4 options that hosts accept: none, padding, router alert, record route, time stamps without room for another one,
/// which no two runs would write alike, security, as many as fit.
pub(super) const OPTIONS: [&[u8]; 7] = [
    &[],
    &[1, 1, 1, 0],
    &[148, 4, 0, 0],
    &[7, 11, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    &[68, 8, 9, 0, 0, 1, 2, 3],
    &[130, 11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    &[1; 40],
];

/// An extension header: its kind, and all bytes after the first two.
type Extension = (u8, &'static [u8]);

const ROUTING: u8 = 43;
/// A routing header whose route has come to its end.
const ARRIVED: Extension = (ROUTING, &[2, 0, 0, 0, 0, 0, 0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
/// Fourteen bytes of padding.
const PADDING: &[u8] = &[1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const OPTIONAL: Extension = (DESTINATION_OPTIONS, SIX);

/// Chains of IPv6 extension headers, up to as many as ours follows.
pub(super) const EXTENSIONS: [&[Extension]; 7] = [
    &[],
    &[(HOP_BY_HOP, SIX)],
    &[(DESTINATION_OPTIONS, PADDING)],
    &[ARRIVED],
    &[(HOP_BY_HOP, PADDING), OPTIONAL],
    &[(HOP_BY_HOP, SIX), OPTIONAL, ARRIVED, OPTIONAL],
    &[OPTIONAL; 6],
];

/// What a datagram's fragments are, and the order in which they come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// Bytes of each but the last, without headers.
    pub(super) size: u16,
    pub(super) order: Order,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Sent,
    Reversed,
    FirstLast,
    LastFirst,
}

/// Everything about a packet that no translation is about.
#[derive(Clone, Debug)]
pub(super) struct Dress {
    pub(super) class: u8,
    pub(super) hops: u8,
    pub(super) number: u16,
    pub(super) dont_fragment: bool,
    /// Of [`OPTIONS`] or [`EXTENSIONS`].
    pub(super) options: usize,
    pub(super) checksum: Checksum,
    /// Bytes of the frame behind the packet's end.
    pub(super) trailer: u8,
    pub(super) cut: Option<Cut>,
}

impl Dress {
    /// A packet as hosts send it.
    pub(super) const PLAIN: Self = Self {
        class: 0,
        hops: 64,
        number: 0x4e50,
        dont_fragment: true,
        options: 0,
        checksum: Checksum::Right,
        trailer: 0,
        cut: None,
    };

    /// The frames that carry a packet.
    pub(super) fn frames(&self, packet: &Packet, from: End) -> Vec<Vec<u8>> {
        let mut packet = packet.clone();
        packet.ethernet = Some(from.ethernet());
        match &mut packet.ip {
            Ip::V4(header) => {
                (header.tos, header.ttl, header.identification) = (self.class, self.hops, self.number);
                header.dont_fragment = self.dont_fragment && self.cut.is_none();
                header.options = if self.cut.is_none() { OPTIONS[self.options].to_vec() } else { Vec::new() };
            }
            Ip::V6(header) => {
                (header.traffic_class, header.hop_limit) = (self.class, self.hops);
                header.flow_label = u32::from(self.number) << 2;
            }
        }
        if let Some(checksum) = packet.transport.checksum_mut() {
            *checksum = self.checksum;
        }
        if let Some(cut) = self.cut {
            return cut.frames(&packet, self.number);
        }
        let mut frame =
            if matches!(packet.ip, Ip::V6(_)) { extended(&packet, EXTENSIONS[self.options]) } else { packet.build() };
        frame.extend((0..self.trailer).map(|byte| byte ^ 0xa5));
        vec![frame]
    }
}

impl Cut {
    fn frames(self, packet: &Packet, number: u16) -> Vec<Vec<u8>> {
        let mut frames = pieces(packet, u32::from(number), self.size.into());
        match self.order {
            Order::Sent => {}
            Order::Reversed => frames.reverse(),
            Order::FirstLast => frames.rotate_left(1),
            Order::LastFirst => frames.rotate_right(1),
        }
        frames
    }
}
