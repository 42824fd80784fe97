// SPDX-License-Identifier: Apache-2.0
//! What the corpus is drawn from.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use npl_agent::core::model::{Family, Protocol};
use npl_testkit::packet::Checksum;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use super::dress::{Cut, Dress, EXTENSIONS, OPTIONS, Order};
use super::stray::{FLAGS, Kind, Stray, UNMAPPED};
use super::talk::{self, ERRORS, Ending, Line, Opening, Speaker, Step, Talk};
use super::twin::{NARROW, SERVICES, WIDE};
use crate::oracle::PROTOCOLS;

/// Conversations and single packets that come in between each other's.
#[derive(Clone, Debug)]
pub(super) struct Case {
    talks: Vec<Talk>,
    strays: Vec<Stray>,
    /// Who is next, again and again; in order once that is used up.
    turns: Vec<u8>,
}

impl Case {
    /// All steps in their order, of clients that no case of another number has.
    pub(super) fn steps(&self, number: u16) -> Vec<Step> {
        let client = |family, index: usize| -> SocketAddr {
            (client(family, number), 20_000 + u16::try_from(index).unwrap()).into()
        };
        let mut queues: Vec<_> = Vec::new();
        for (index, talk) in self.talks.iter().enumerate() {
            queues.push(talk::steps(talk, client(talk.family, index)).into_iter());
        }
        for (index, stray) in self.strays.iter().enumerate() {
            queues.push(vec![stray.step(client(stray.family, 1000 + index))].into_iter());
        }
        let mut steps = Vec::new();
        for turn in &self.turns {
            if let Some(queue) = queues.get_mut(usize::from(*turn)) {
                steps.extend(queue.next());
            }
        }
        steps.extend(queues.into_iter().flatten());
        steps
    }
}

/// The client of a number.
pub(super) fn client(family: Family, number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    match family {
        Family::V4 => Ipv4Addr::new(198, 18, high, low).into(),
        Family::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0x8585, number, 0, 0, 0, 2).into(),
    }
}

pub(super) fn cases() -> impl Strategy<Value = Case> {
    (vec(talks(), 1..8), vec(strays(), 0..8), vec(0..16_u8, 0..200)).prop_map(|(talks, strays, turns)| Case {
        talks,
        strays,
        turns,
    })
}

fn talks() -> impl Strategy<Value = Talk> {
    let whom = (select(&Family::ALL[..]), select(&PROTOCOLS[..]), 0..SERVICES.len(), 0..2_usize);
    let opening = select(&[Opening::Handshake, Opening::Negotiated, Opening::Midway, Opening::Refused][..]);
    let ending = prop_oneof![
        Just(Ending::None),
        speakers().prop_map(Ending::Closed),
        speakers().prop_map(Ending::Reset),
        speakers().prop_map(Ending::Reopened)
    ];
    (whom, opening, ending)
        .prop_flat_map(|((family, protocol, service, address), opening, ending)| {
            let lines = vec(lines(family, protocol, SERVICES[service].pod), 0..16);
            (Just((family, protocol, service, address, opening, ending)), lines)
        })
        .prop_map(|((family, protocol, service, address, opening, ending), lines)| Talk {
            family,
            protocol,
            service,
            address,
            opening,
            lines,
            ending,
        })
}

fn speakers() -> impl Strategy<Value = Speaker> {
    select(&[Speaker::Client, Speaker::Pod][..])
}

fn lines(family: Family, protocol: Protocol, pod: usize) -> impl Strategy<Value = Line> {
    // URG, PSH, ECE and CWR.
    let flags = select(&[0, 0x08, 0x20, 0x40, 0x80, 0xe8][..]);
    // What of SCTP is quoted no two make the same of: see `Exception::QuotedCrc`.
    let quoted = if protocol == Protocol::Sctp {
        (8..12_u16).boxed()
    } else {
        prop_oneof![8..18_u16, 20..40_u16, Just(1000)].boxed()
    };
    // The Node complains about those, and quotes more.
    let of_large = u32::from(protocol != Protocol::Sctp);
    prop_oneof![
        6 => (speakers(), sizes(), flags.clone(), dresses(family, protocol))
            .prop_map(|(by, bytes, flags, dress)| Line::Say { by, bytes, flags, dress }),
        1 => pieces(family, pod).prop_flat_map(move |(by, cut, bytes)| {
            let dress = dresses(family, protocol)
                .prop_map(move |dress| Dress { cut: Some(cut), trailer: 0, hops: dress.hops.max(2), ..dress });
            (flags.clone(), dress).prop_map(move |(flags, dress)| Line::Say { by, bytes, flags, dress })
        }),
        of_large => large(pod).prop_map(|(by, bytes, dress)| Line::Say { by, bytes, flags: 0, dress }),
        1 => speakers().prop_map(Line::Repeat),
        3 => (speakers(), 0..ERRORS, quoted, any::<bool>(), dresses(family, protocol)).prop_map(
            |(by, kind, quoted, is_router, dress)| {
                let dress = Dress { checksum: Checksum::Right, ..dress };
                Line::Complain { by, kind, quoted, is_router, dress }
            }
        ),
    ]
}

fn sizes() -> impl Strategy<Value = u16> {
    prop_oneof![6 => 0..64_u16, 2 => 64..600_u16, 1 => 1100..1200_u16]
}

/// Datagrams in pieces that their link takes, of which the last is more than a few bytes: see `Exception::LoneFragment`.
/// In IPv6 nobody has a reason for short ones, and not every kernel takes them.
fn pieces(family: Family, pod: usize) -> impl Strategy<Value = (Speaker, Cut, u16)> {
    let least = if family == Family::V4 { 8_u16 } else { 154 };
    let most = if pod == NARROW { 160 } else { 175 };
    let orders = select(&[Order::Sent, Order::Reversed, Order::FirstLast, Order::LastFirst][..]);
    (speakers(), least..most, orders, 2..6_u16, 16..64_u16).prop_map(|(by, units, order, count, rest)| {
        let size: u16 = units * 8;
        (by, Cut { size, order }, size * (count - 1) + rest % size)
    })
}

/// Packets that the next link does not take: to a Pod behind a narrow one, and of a Pod behind a wide one.
fn large(pod: usize) -> impl Strategy<Value = (Speaker, u16, Dress)> {
    let (by, sizes) = match pod {
        NARROW => (Speaker::Client, 1320..1420_u16),
        WIDE => (Speaker::Pod, 1440..1520_u16),
        _ => (Speaker::Client, 1380..1420_u16),
    };
    (sizes, any::<bool>(), any::<u16>())
        .prop_map(move |(bytes, dont_fragment, number)| (by, bytes, Dress { number, dont_fragment, ..Dress::PLAIN }))
}

fn dresses(family: Family, protocol: Protocol) -> impl Strategy<Value = Dress> {
    let choices = if family == Family::V4 { OPTIONS.len() } else { EXTENSIONS.len() };
    let checksums = if protocol == Protocol::Udp {
        prop_oneof![8 => Just(Checksum::Right), 2 => Just(Checksum::Zero), 1 => any::<u16>().prop_map(Checksum::Wrong)]
    } else {
        prop_oneof![8 => Just(Checksum::Right), 1 => Just(Checksum::Zero), 1 => any::<u16>().prop_map(Checksum::Wrong)]
    };
    let hops = prop_oneof![8 => 2..=255_u8, u32::from(protocol != Protocol::Sctp) => Just(1_u8)];
    let options = prop_oneof![3 => Just(0), 1 => 0..choices];
    (any::<(u8, u16, bool)>(), hops, options, checksums, option::of(0..40_u8)).prop_map(
        |((class, number, dont_fragment), hops, options, checksum, trailer)| Dress {
            class,
            hops,
            number,
            dont_fragment,
            options,
            checksum,
            trailer: trailer.unwrap_or(0),
            cut: None,
        },
    )
}

fn strays() -> impl Strategy<Value = Stray> {
    let flags = || select(&FLAGS[..]);
    let tags = prop_oneof![vec(any::<u16>(), 1..3), vec((0..8_u16).prop_map(|priority| priority << 13), 1..2)];
    let kinds = prop_oneof![
        2 => (select(&UNMAPPED[..]), flags()).prop_map(|(port, flags)| Kind::Unmapped { port, flags }),
        1 => flags().prop_map(|flags| Kind::Direct { flags }),
        1 => flags().prop_map(|flags| Kind::Unasked { flags }),
        1 => (select(&[2_u8, 4, 41, 47, 50, 89, 103, 136, 253][..]), any::<bool>(), 0..60_u8)
            .prop_map(|(number, to_pod, bytes)| Kind::Foreign { number, to_pod, bytes }),
        1 => (0..60_u8).prop_map(|bytes| Kind::Echo { bytes }),
        1 => tags.prop_map(|tags| Kind::Tagged { tags }),
        1 => any::<bool>().prop_map(|to_all| Kind::Misdirected { to_all }),
        6 => any::<(u8, u8, bool)>()
            .prop_map(|(place, value, is_summed)| Kind::Bent { place, value, is_summed }),
    ];
    (select(&Family::ALL[..]), select(&[Protocol::Tcp, Protocol::Udp][..]), kinds).prop_flat_map(
        |(family, protocol, kind)| {
            let dress = if matches!(kind, Kind::Bent { .. }) {
                Just(Dress::PLAIN).boxed()
            } else {
                dresses(family, protocol).boxed()
            };
            dress.prop_map(move |dress| Stray { family, protocol, kind: kind.clone(), dress })
        },
    )
}
