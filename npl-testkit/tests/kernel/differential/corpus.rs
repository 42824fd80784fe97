// SPDX-License-Identifier: Apache-2.0
//! Random test cases of the differential test.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use npl_agent::core::model::{Family, Protocol};
use npl_testkit::packet::Checksum;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use super::connection::{self, Action, Connection, ERRORS, Ending, Opening, Sender, Step};
use super::node_pair::{NARROW, SERVICES, WIDE};
use super::packet_fields::{EXTENSIONS, Fragmentation, OPTIONS, Order, PacketFields};
use super::single_packet::{FLAGS, Kind, SinglePacket, UNMAPPED};
use crate::oracle::PROTOCOLS;

/// Connections and single packets whose steps are interleaved.
#[derive(Clone, Debug)]
pub(super) struct Case {
    connections: Vec<Connection>,
    single_packets: Vec<SinglePacket>,
    /// The order of the steps: each element is the index of the connection or single packet whose next step follows.
    /// The steps that remain after the last element follow in the order of the connections and single packets.
    schedule: Vec<u8>,
}

impl Case {
    /// Returns the steps of all connections and single packets, in the order of the schedule. `number` selects the
    /// client's address, so that cases with different numbers share no address.
    pub(super) fn steps(&self, number: u16) -> Vec<Step> {
        let client = |family, index: usize| -> SocketAddr {
            (client(family, number), 20_000 + u16::try_from(index).unwrap()).into()
        };
        let mut queues: Vec<_> = Vec::new();
        for (index, connection) in self.connections.iter().enumerate() {
            queues.push(connection::steps(connection, client(connection.family, index)).into_iter());
        }
        for (index, single_packet) in self.single_packets.iter().enumerate() {
            queues.push(vec![single_packet.step(client(single_packet.family, 1000 + index))].into_iter());
        }
        let mut steps = Vec::new();
        for choice in &self.schedule {
            if let Some(queue) = queues.get_mut(usize::from(*choice)) {
                steps.extend(queue.next());
            }
        }
        steps.extend(queues.into_iter().flatten());
        steps
    }
}

/// Returns the client address of a case number.
pub(super) fn client(family: Family, number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    match family {
        Family::V4 => Ipv4Addr::new(198, 18, high, low).into(),
        Family::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0x8585, number, 0, 0, 0, 2).into(),
    }
}

pub(super) fn cases() -> impl Strategy<Value = Case> {
    (vec(connections(), 1..8), vec(single_packets(), 0..8), vec(0..16_u8, 0..200))
        .prop_map(|(connections, single_packets, schedule)| Case { connections, single_packets, schedule })
}

fn connections() -> impl Strategy<Value = Connection> {
    let target = (select(&Family::ALL[..]), select(&PROTOCOLS[..]), 0..SERVICES.len(), 0..2_usize);
    let opening = select(&[Opening::Handshake, Opening::Negotiated, Opening::MidStream, Opening::Refused][..]);
    let ending = prop_oneof![
        Just(Ending::None),
        senders().prop_map(Ending::Closed),
        senders().prop_map(Ending::Reset),
        senders().prop_map(Ending::Reopened)
    ];
    (target, opening, ending)
        .prop_flat_map(|((family, protocol, service, address), opening, ending)| {
            let actions = vec(actions(family, protocol, SERVICES[service].pod), 0..16);
            (Just((family, protocol, service, address, opening, ending)), actions)
        })
        .prop_map(|((family, protocol, service, address, opening, ending), actions)| Connection {
            family,
            protocol,
            service,
            address,
            opening,
            actions,
            ending,
        })
}

fn senders() -> impl Strategy<Value = Sender> {
    select(&[Sender::Client, Sender::Pod][..])
}

fn actions(family: Family, protocol: Protocol, pod: usize) -> impl Strategy<Value = Action> {
    // The flags PSH, URG, ECE and CWR: none, each alone, and all four.
    let flags = select(&[0, 0x08, 0x20, 0x40, 0x80, 0xe8][..]);
    // The CRC in a quoted SCTP packet differs between the Nodes (see `Exception::QuotedCrc`), so the quote must not
    // contain the CRC.
    let quoted = if protocol == Protocol::Sctp {
        (8..12_u16).boxed()
    } else {
        prop_oneof![8..18_u16, 20..40_u16, Just(1000)].boxed()
    };
    // Large SCTP packets are excluded: the Node answers them with its own ICMP error, whose longer quote contains the
    // CRC.
    let of_large = u32::from(protocol != Protocol::Sctp);
    prop_oneof![
        6 => (senders(), sizes(), flags.clone(), packet_fields(family, protocol))
            .prop_map(|(sender, bytes, flags, fields)| Action::Send { sender, bytes, flags, fields }),
        1 => pieces(family, pod).prop_flat_map(move |(sender, fragmentation, bytes)| {
            let fields = packet_fields(family, protocol).prop_map(move |fields| PacketFields {
                fragmentation: Some(fragmentation),
                trailer: 0,
                hops: fields.hops.max(2),
                ..fields
            });
            (flags.clone(), fields).prop_map(move |(flags, fields)| Action::Send { sender, bytes, flags, fields })
        }),
        of_large => large(pod).prop_map(|(sender, bytes, fields)| Action::Send { sender, bytes, flags: 0, fields }),
        1 => senders().prop_map(Action::Retransmit),
        3 => (senders(), 0..ERRORS, quoted, any::<bool>(), packet_fields(family, protocol)).prop_map(
            |(sender, kind, quoted, is_router, fields)| {
                let fields = PacketFields { checksum: Checksum::Right, ..fields };
                Action::SendError { sender, kind, quoted, is_router, fields }
            }
        ),
    ]
}

fn sizes() -> impl Strategy<Value = u16> {
    prop_oneof![6 => 0..64_u16, 2 => 64..600_u16, 1 => 1100..1200_u16]
}

/// Returns the sender, the fragmentation and the number of payload bytes of fragmented packets. Each fragment fits the
/// MTU of the Pod's link. The last fragment is never tiny (see `Exception::LoneFragment`). Small IPv6 fragments are
/// excluded, because some kernels reject them.
fn pieces(family: Family, pod: usize) -> impl Strategy<Value = (Sender, Fragmentation, u16)> {
    let min = if family == Family::V4 { 8_u16 } else { 154 };
    let max = if pod == NARROW { 160 } else { 175 };
    let orders = select(&[Order::Ascending, Order::Descending, Order::FirstLast, Order::LastFirst][..]);
    (senders(), min..max, orders, 2..6_u16, 16..64_u16).prop_map(|(sender, units, order, count, remainder)| {
        let size: u16 = units * 8;
        (sender, Fragmentation { size, order }, size * (count - 1) + remainder % size)
    })
}

/// Returns the sender, the payload length and the fields of packets whose length is close to the smallest MTU on their
/// path. Some packets to the Pod with the smaller MTU, and some from the Pod with the larger MTU, exceed the MTU of
/// their next link.
fn large(pod: usize) -> impl Strategy<Value = (Sender, u16, PacketFields)> {
    let (sender, sizes) = match pod {
        NARROW => (Sender::Client, 1320..1420_u16),
        WIDE => (Sender::Pod, 1440..1520_u16),
        _ => (Sender::Client, 1380..1420_u16),
    };
    (sizes, any::<bool>(), any::<u16>()).prop_map(move |(bytes, dont_fragment, identification)| {
        (sender, bytes, PacketFields { identification, dont_fragment, ..PacketFields::PLAIN })
    })
}

fn packet_fields(family: Family, protocol: Protocol) -> impl Strategy<Value = PacketFields> {
    let choices = if family == Family::V4 { OPTIONS.len() } else { EXTENSIONS.len() };
    let checksums = if protocol == Protocol::Udp {
        prop_oneof![8 => Just(Checksum::Right), 2 => Just(Checksum::Zero), 1 => any::<u16>().prop_map(Checksum::Wrong)]
    } else {
        prop_oneof![8 => Just(Checksum::Right), 1 => Just(Checksum::Zero), 1 => any::<u16>().prop_map(Checksum::Wrong)]
    };
    let hops = prop_oneof![8 => 2..=255_u8, u32::from(protocol != Protocol::Sctp) => Just(1_u8)];
    let options = prop_oneof![3 => Just(0), 1 => 0..choices];
    (any::<(u8, u16, bool)>(), hops, options, checksums, option::of(0..40_u8)).prop_map(
        |((class, identification, dont_fragment), hops, options, checksum, trailer)| PacketFields {
            class,
            hops,
            identification,
            dont_fragment,
            options,
            checksum,
            trailer: trailer.unwrap_or(0),
            fragmentation: None,
        },
    )
}

fn single_packets() -> impl Strategy<Value = SinglePacket> {
    let flags = || select(&FLAGS[..]);
    let tags = prop_oneof![vec(any::<u16>(), 1..3), vec((0..8_u16).prop_map(|priority| priority << 13), 1..2)];
    let kinds = prop_oneof![
        2 => (select(&UNMAPPED[..]), flags()).prop_map(|(port, flags)| Kind::Unmapped { port, flags }),
        1 => flags().prop_map(|flags| Kind::Direct { flags }),
        1 => flags().prop_map(|flags| Kind::Unsolicited { flags }),
        1 => (select(&[2_u8, 4, 41, 47, 50, 89, 103, 136, 253][..]), any::<bool>(), 0..60_u8)
            .prop_map(|(protocol_number, to_pod, bytes)| Kind::Foreign { protocol_number, to_pod, bytes }),
        1 => (0..60_u8).prop_map(|bytes| Kind::Echo { bytes }),
        1 => tags.prop_map(|tags| Kind::Tagged { tags }),
        1 => any::<bool>().prop_map(|to_all| Kind::OtherDestination { to_all }),
        6 => any::<(u8, u8, bool)>()
            .prop_map(|(position, value, is_summed)| Kind::Corrupted { position, value, is_summed }),
    ];
    (select(&Family::ALL[..]), select(&[Protocol::Tcp, Protocol::Udp][..]), kinds).prop_flat_map(
        |(family, protocol, kind)| {
            let fields = if matches!(kind, Kind::Corrupted { .. }) {
                Just(PacketFields::PLAIN).boxed()
            } else {
                packet_fields(family, protocol).boxed()
            };
            fields.prop_map(move |fields| SinglePacket { family, protocol, kind: kind.clone(), fields })
        },
    )
}
