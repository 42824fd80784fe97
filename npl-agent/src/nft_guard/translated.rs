// SPDX-License-Identifier: Apache-2.0
//! Reads kernel conntrack. Finds the connections to node ports that rules of other software translate, such as the
//! rules that Antrea's agent leaves behind. Also reads the numbers of packets and bytes of each connection.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr},
    ops::ControlFlow,
};

use super::{
    table::if_known,
    uapi::conntrack,
    wire::{Connection, Message, find, number},
};
use crate::core::model::{ConnectionTraffic, NodePort, Protocol, TranslatedConnection, settings::PortRange};

/// A connection as kernel conntrack identifies it: the protocol, the address and port of the host that has opened the
/// connection, and the address and port to which this host sent its first packet.
pub type ConnectionKey = (Protocol, SocketAddr, SocketAddr);

/// Returns the packets and bytes of each connection that kernel conntrack counts. The result is empty if the kernel has
/// no conntrack, or if `net.netfilter.nf_conntrack_acct` is 0.
///
/// # Errors
///
/// If the kernel returns an error, or does not answer within 10 s.
pub fn connection_traffic() -> io::Result<BTreeMap<ConnectionKey, ConnectionTraffic>> {
    let mut found = BTreeMap::new();
    if let Some(connection) = if_known(Connection::open())? {
        if_known(connection.list(Message::of_conntrack(conntrack::GET, Vec::new()), |entry| {
            found.extend(original(entry).zip(traffic(entry)));
            ControlFlow::Continue(())
        }))?;
    }
    Ok(found)
}

/// Returns the connections and UDP flows to node ports of `range` whose destination kernel conntrack translates. TCP
/// connections that have ended are left out. The result is empty if the kernel has no conntrack.
///
/// # Errors
///
/// If the kernel returns an error, or does not answer within 10 s.
pub fn translated_connections(range: PortRange) -> io::Result<Vec<TranslatedConnection>> {
    let mut found = Vec::new();
    if let Some(connection) = if_known(Connection::open())? {
        // Since Linux 5.15, the kernel sends only entries with this status. Earlier kernels ignore the attribute and
        // send all entries.
        let status = number(conntrack::STATUS, conntrack::DESTINATION_NAT);
        if_known(connection.list(Message::of_conntrack(conntrack::GET, vec![status]), |entry| {
            found.extend(parse(entry).filter(|it| range.contains(NodePort(it.nat.port()))));
            ControlFlow::Continue(())
        }))?;
    }
    Ok(found)
}

/// Parses an entry of kernel conntrack. `None` if the destination is not translated, if the connection has ended, or if
/// NPL does not support the protocol.
pub(super) fn parse(entry: &[u8]) -> Option<TranslatedConnection> {
    let word = |kind| Some(u32::from_be_bytes(find(entry, kind)?.try_into().ok()?));
    let status = word(conntrack::STATUS)?;
    if status & conntrack::DESTINATION_NAT == 0 || has_ended(entry) {
        return None;
    }
    let (protocol, client, nat) = original(entry)?;
    // The kernel reports no timeout of a connection that a flowtable forwards.
    let timeout = word(conntrack::TIMEOUT);
    Some(TranslatedConnection {
        protocol,
        client,
        nat,
        remaining_seconds: timeout.unwrap_or(u32::MAX),
        is_stream: timeout.is_none() || status & conntrack::ASSURED != 0,
    })
}

/// Parses the protocol and the addresses of an entry's first packet. `None` if NPL does not support the protocol, or if
/// the addresses are of different families.
pub(super) fn original(entry: &[u8]) -> Option<ConnectionKey> {
    let original = find(entry, conntrack::ORIGINAL)?;
    let (addresses, transport) = (find(original, conntrack::ADDRESSES)?, find(original, conntrack::PROTOCOL)?);
    let address = |v4, v6| -> Option<IpAddr> {
        let of_v4 = find(addresses, v4).and_then(|octets| <[u8; 4]>::try_from(octets).ok()).map(IpAddr::from);
        of_v4.or_else(|| find(addresses, v6).and_then(|octets| <[u8; 16]>::try_from(octets).ok()).map(IpAddr::from))
    };
    let port = |kind| Some(u16::from_be_bytes(find(transport, kind)?.try_into().ok()?));
    let protocol = Protocol::from_number(*find(transport, conntrack::PROTOCOL_NUMBER)?.first()?)?;
    let source = address(conntrack::SOURCE_V4, conntrack::SOURCE_V6)?;
    let destination = address(conntrack::DESTINATION_V4, conntrack::DESTINATION_V6)?;
    if source.is_ipv4() != destination.is_ipv4() {
        return None;
    }
    Some((
        protocol,
        SocketAddr::new(source, port(conntrack::SOURCE_PORT)?),
        SocketAddr::new(destination, port(conntrack::DESTINATION_PORT)?),
    ))
}

/// Parses the counters of an entry. `None` if the entry was created while `nf_conntrack_acct` was 0, and so has no
/// counters.
pub(super) fn traffic(entry: &[u8]) -> Option<ConnectionTraffic> {
    let count = |direction, kind| Some(u64::from_be_bytes(find(find(entry, direction)?, kind)?.try_into().ok()?));
    Some(ConnectionTraffic {
        request_packets: count(conntrack::COUNTERS_OF_ORIGINAL, conntrack::PACKETS)?,
        request_bytes: count(conntrack::COUNTERS_OF_ORIGINAL, conntrack::BYTES)?,
        reply_packets: count(conntrack::COUNTERS_OF_REPLY, conntrack::PACKETS)?,
        reply_bytes: count(conntrack::COUNTERS_OF_REPLY, conntrack::BYTES)?,
    })
}

/// Whether an entry belongs to a TCP connection that has ended. Kernel conntrack keeps such an entry only for late
/// packets.
pub(super) fn has_ended(entry: &[u8]) -> bool {
    let state = find(entry, conntrack::PROTOCOL_STATE)
        .and_then(|state| find(find(state, conntrack::TCP)?, conntrack::TCP_STATE)?.first());
    state.is_some_and(|state| conntrack::ENDED.contains(state))
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use rtnetlink::packet_core::{DefaultNla, Emitable as _};

    use super::{conntrack, original, parse, traffic};
    use crate::{
        core::model::{ConnectionTraffic, Protocol, TranslatedConnection},
        nft_guard::wire::{bytes, nest, number},
    };

    /// The attributes of a kernel conntrack entry, as the kernel sends them.
    fn entry(status: u32, addresses: &[DefaultNla], protocol: u8) -> Vec<u8> {
        let transport = [
            bytes(conntrack::PROTOCOL_NUMBER, &[protocol]),
            bytes(conntrack::SOURCE_PORT, &40000_u16.to_be_bytes()),
            bytes(conntrack::DESTINATION_PORT, &61000_u16.to_be_bytes()),
        ];
        let original = [nest(conntrack::ADDRESSES, addresses), nest(conntrack::PROTOCOL, &transport)];
        let mut attributes = vec![nest(conntrack::ORIGINAL, &original), number(conntrack::STATUS, status)];
        if status & OFFLOADED == 0 {
            attributes.push(number(conntrack::TIMEOUT, 29));
        }
        emitted(&attributes)
    }

    fn emitted(attributes: &[DefaultNla]) -> Vec<u8> {
        let mut value = vec![0; attributes.buffer_len()];
        attributes.emit(&mut value);
        value
    }

    fn connection(protocol: Protocol, client: impl Into<IpAddr>, node: impl Into<IpAddr>) -> TranslatedConnection {
        let (client, nat) = ((client, 40000).into(), (node, 61000).into());
        TranslatedConnection { protocol, client, nat, remaining_seconds: 29, is_stream: true }
    }

    const CLIENT: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
    const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 10);
    /// Status bits that an entry may have with or without destination NAT: `IPS_SEEN_REPLY`, `IPS_ASSURED`,
    /// `IPS_CONFIRMED` and `IPS_SRC_NAT`.
    const OTHERS: u32 = 0b1_1110;
    /// `IPS_OFFLOAD`.
    const OFFLOADED: u32 = 1 << 14;

    fn addresses() -> [DefaultNla; 2] {
        [bytes(conntrack::SOURCE_V4, &CLIENT.octets()), bytes(conntrack::DESTINATION_V4, &NODE.octets())]
    }

    #[test]
    fn a_connection_with_destination_nat_is_read() {
        let status = OTHERS | conntrack::DESTINATION_NAT;
        assert_eq!(parse(&entry(status, &addresses(), 6)), Some(connection(Protocol::Tcp, CLIENT, NODE)));
        assert_eq!(parse(&entry(status, &addresses(), 17)), Some(connection(Protocol::Udp, CLIENT, NODE)));
        let [client, node] = [1, 2].map(|last| Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last));
        let addresses =
            [bytes(conntrack::SOURCE_V6, &client.octets()), bytes(conntrack::DESTINATION_V6, &node.octets())];
        assert_eq!(parse(&entry(status, &addresses, 6)), Some(connection(Protocol::Tcp, client, node)));
    }

    #[test]
    fn the_counters_of_an_entry_are_those_of_its_two_directions() {
        let counters = |kind, packets: u64, bytes_: u64| {
            let values = [(conntrack::PACKETS, packets), (conntrack::BYTES, bytes_)];
            nest(kind, &values.map(|(kind, value)| bytes(kind, &value.to_be_bytes())))
        };
        let requests = counters(conntrack::COUNTERS_OF_ORIGINAL, 3, 180);
        let replies = counters(conntrack::COUNTERS_OF_REPLY, 2, 5_000_000_000);
        let expected =
            ConnectionTraffic { request_packets: 3, request_bytes: 180, reply_packets: 2, reply_bytes: 5_000_000_000 };
        let both = [entry(OTHERS, &addresses(), 6), emitted(&[requests.clone(), replies])].concat();
        assert_eq!(traffic(&both), Some(expected));
        let key = (Protocol::Tcp, (CLIENT, 40000).into(), (NODE, 61000).into());
        assert_eq!(original(&both), Some(key));
        // An entry that was created while `nf_conntrack_acct` was 0 has no counters.
        assert_eq!(traffic(&entry(OTHERS, &addresses(), 6)), None);
        assert_eq!(traffic(&emitted(&[requests])), None);
    }

    #[test]
    fn a_udp_flow_is_a_stream_if_its_entry_is_assured() {
        let status = conntrack::DESTINATION_NAT | OTHERS & !conntrack::ASSURED;
        let flow = TranslatedConnection { is_stream: false, ..connection(Protocol::Udp, CLIENT, NODE) };
        assert_eq!(parse(&entry(status, &addresses(), 17)), Some(flow));
    }

    #[test]
    fn a_connection_that_a_flowtable_forwards_has_no_timeout() {
        let status = conntrack::DESTINATION_NAT | OFFLOADED;
        let flow = TranslatedConnection { remaining_seconds: u32::MAX, ..connection(Protocol::Udp, CLIENT, NODE) };
        assert_eq!(parse(&entry(status, &addresses(), 17)), Some(flow));
    }

    #[test]
    fn tcp_connections_that_have_ended_are_left_out() {
        let in_state = |state: u8| {
            let state = nest(conntrack::TCP, &[bytes(conntrack::TCP_STATE, &[state])]);
            let attribute = nest(conntrack::PROTOCOL_STATE, &[state]);
            let mut value = entry(OTHERS | conntrack::DESTINATION_NAT, &addresses(), 6);
            let from = value.len();
            value.resize(from + attribute.buffer_len(), 0);
            attribute.emit(&mut value[from..]);
            parse(&value).is_some()
        };
        // Connections in the states SYN_RECV, ESTABLISHED, FIN_WAIT and LAST_ACK are read; connections in the states
        // TIME_WAIT and CLOSE are left out.
        assert_eq!([2, 3, 4, 6, 7, 8].map(in_state), [true, true, true, true, false, false]);
    }

    #[test]
    fn connections_without_destination_nat_and_other_protocols_are_left_out() {
        assert_eq!(parse(&entry(OTHERS, &addresses(), 6)), None);
        assert_eq!(parse(&entry(conntrack::DESTINATION_NAT, &addresses(), 47)), None);
        assert_eq!(parse(&entry(conntrack::DESTINATION_NAT, &[], 6)), None);
        let mixed =
            [bytes(conntrack::SOURCE_V4, &CLIENT.octets()), bytes(conntrack::DESTINATION_V6, &[0x20_u8, 1].repeat(8))];
        assert_eq!(parse(&entry(conntrack::DESTINATION_NAT, &mixed, 6)), None);
        assert_eq!(parse(&[]), None);
    }
}
