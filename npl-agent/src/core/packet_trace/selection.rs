// SPDX-License-Identifier: Apache-2.0
//! Selects packets by client, Pod, node port and protocol. The filter in the programs may also select packets that do
//! not meet all conditions, so the command checks each recorded packet again.

use std::{iter, net::IpAddr};

use npl_common::packet_trace::{EndpointFilter, IPV6, MAX_ENDPOINTS, PORT_MASK, TraceFilter};

use super::packet::Packet;
use crate::core::model::{Protocol, sources::SourceRange};

/// The conditions on packets to trace: a client, the node ports or Pods that the client uses, and a protocol. A
/// condition that is not given is true for every packet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PacketSelection {
    /// The range of the client's address.
    pub client: Option<SourceRange>,
    /// The port of the client.
    pub client_port: Option<u16>,
    /// Node ports and Pods. A packet must have one of these node ports or Pods as its source or destination.
    pub endpoints: Vec<TracedEndpoint>,
    /// The transport protocol of the packet, or of the packet that an ICMP error quotes.
    pub protocol: Option<Protocol>,
}

/// A node port, or a Pod's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TracedEndpoint {
    /// This node port at any address.
    NodePort(u16),
    /// Any port at this Pod address.
    Address(IpAddr),
}

/// The error for a selection with more endpoints than the filter of the programs has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the selection has {0} node ports and Pod addresses, and a filter has room for {MAX_ENDPOINTS}: give the whole name of \
     one Pod, one of its ports by --node-port, or only --client"
)]
pub struct TooManyEndpoints(usize);

impl PacketSelection {
    /// Returns the filter for the programs. The filter selects no packet until its end time is set. If the programs do
    /// not find the ports of a packet, for example of a fragment, the filter compares only the packet's addresses.
    ///
    /// # Errors
    ///
    /// Returns an error if the filter has no room for all endpoints.
    pub fn filter(&self, records_per_second: u64) -> Result<TraceFilter, TooManyEndpoints> {
        if self.endpoints.len() > MAX_ENDPOINTS {
            return Err(TooManyEndpoints(self.endpoints.len()));
        }
        let mut endpoints = [EndpointFilter::NONE; MAX_ENDPOINTS];
        let wanted = self.endpoints.iter().map(|endpoint| match *endpoint {
            TracedEndpoint::NodePort(port) => filter(None, Some(port)),
            TracedEndpoint::Address(ip) => filter(SourceRange::new(ip, bits(ip)), None),
        });
        let any = self.endpoints.is_empty().then_some(EndpointFilter::ANY);
        for (place, endpoint) in endpoints.iter_mut().zip(wanted.chain(any)) {
            *place = endpoint;
        }
        Ok(TraceFilter {
            until: 0,
            rate: records_per_second,
            protocol: self.protocol.map_or(0, |protocol| protocol.number().into()),
            client: filter(self.client, self.client_port),
            endpoints,
        })
    }

    /// Whether a packet meets all conditions: the client is the packet's source or destination, one of the endpoints is
    /// the packet's source or destination, and the packet has the wanted protocol. Each condition may be met by the
    /// packet before or after the program ran. For an ICMP error, the quoted packet is compared.
    pub fn admits(&self, before: &Packet, after: Option<&Packet>) -> bool {
        let packets = || iter::once(before).chain(after).map(|packet| packet.quoted.as_deref().unwrap_or(packet));
        let has_end = |is_wanted: &dyn Fn(&Packet, IpAddr, Option<u16>) -> bool| {
            packets().any(|packet| packet.ends().into_iter().any(|(ip, port)| is_wanted(packet, ip, port)))
        };
        let has_client = has_end(&|packet, ip, port| {
            self.client.is_none_or(|range| range.contains(ip))
                && self.client_port.is_none_or(|wanted| may_have_port(packet, port, wanted))
        });
        let has_endpoint = self.endpoints.is_empty()
            || has_end(&|packet, ip, port| {
                self.endpoints.iter().any(|endpoint| match *endpoint {
                    TracedEndpoint::NodePort(wanted) => may_have_port(packet, port, wanted),
                    TracedEndpoint::Address(wanted) => ip == wanted,
                })
            });
        let is_protocol =
            |protocol: Protocol| packets().any(|packet| packet.is_fragment || packet.protocol == protocol.number());
        has_client && has_endpoint && self.protocol.is_none_or(is_protocol)
    }
}

/// Whether `port` is the wanted port. The result is also true if the packet lacks ports although the packet's protocol
/// has ports.
fn may_have_port(packet: &Packet, port: Option<u16>, wanted: u16) -> bool {
    port.map_or(packet.may_have_ports(), |port| port == wanted)
}

fn filter(range: Option<SourceRange>, port: Option<u16>) -> EndpointFilter {
    let (addr, addr_mask, family) = range.map_or(([0; 2], [0; 2], None), |range| {
        (words(range.first()), words(mask(range)), Some(if range.first().is_ipv6() { IPV6 } else { 0 }))
    });
    let port_mask = if port.is_some() { PORT_MASK } else { 0 } | if family.is_some() { IPV6 } else { 0 };
    let port = u32::from(port.unwrap_or_default()) | family.unwrap_or_default();
    EndpointFilter { addr, addr_mask, port, port_mask, unused: 0 }
}

/// The netmask of a range, in the form of an IP address.
fn mask(range: SourceRange) -> IpAddr {
    let all: IpAddr = if range.first().is_ipv6() { [0xff; 16].into() } else { [0xff; 4].into() };
    SourceRange::new(all, range.length()).map_or(all, SourceRange::first)
}

const fn bits(ip: IpAddr) -> u8 {
    if ip.is_ipv6() { 128 } else { 32 }
}

/// An IP address as two 64-bit words in memory order; an IPv4 address is in the first four bytes.
fn words(ip: IpAddr) -> [u64; 2] {
    let mut bytes = [0; 16];
    match ip {
        IpAddr::V4(ip) => bytes.split_at_mut(4).0.copy_from_slice(&ip.octets()),
        IpAddr::V6(ip) => bytes = ip.octets(),
    }
    let word =
        |start: usize| bytes.get(start..start + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_ne_bytes);
    [word(0), word(8)]
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use npl_common::packet_trace::{IPV6, PORT_MASK, PacketEnd, TraceFilter};

    use super::{PacketSelection, TooManyEndpoints, TracedEndpoint, words};
    use crate::core::{model::Protocol, packet_trace::packet::Packet};

    const CLIENT: &str = "192.0.2.7";
    const NODE: &str = "10.0.0.1";
    const POD: &str = "10.244.1.5";

    fn packet(ends: [(&str, u16); 2]) -> Packet {
        let [(source, source_port), (destination, destination_port)] = ends;
        Packet {
            source: source.parse().unwrap(),
            destination: destination.parse().unwrap(),
            protocol: 6,
            ports: Some([source_port, destination_port]),
            flags: String::new(),
            is_fragment: false,
            quoted: None,
        }
    }

    fn end((ip, port): (IpAddr, Option<u16>)) -> PacketEnd {
        let family = if ip.is_ipv6() { IPV6 } else { 0 };
        let port_mask = if port.is_some() { PORT_MASK | IPV6 } else { IPV6 };
        PacketEnd { addr: words(ip), port: u32::from(port.unwrap_or_default()) | family, port_mask }
    }

    /// Whether the programs record a packet. Compares addresses and ports in the same way as
    /// `npl-ebpf/src/path/trace/record.rs`, but does not compare the protocol.
    fn is_recorded(filter: &TraceFilter, before: &Packet, after: &Packet) -> bool {
        let ends: Vec<PacketEnd> = before.ends().into_iter().chain(after.ends()).map(end).collect();
        let has =
            |wanted: &npl_common::packet_trace::EndpointFilter| ends.iter().any(|end| wanted.difference(end) == 0);
        has(&filter.client) && filter.endpoints.iter().any(has)
    }

    /// Asserts that the filter of the programs and the exact selection give the expected result.
    fn check(selection: &PacketSelection, before: &Packet, after: &Packet, expected: bool) {
        assert_eq!(selection.admits(before, Some(after)), expected, "{selection:?} for {before} and {after}");
        let filter = selection.filter(1).unwrap();
        assert_eq!(is_recorded(&filter, before, after), expected, "filter of {selection:?} for {before} and {after}");
    }

    #[test]
    fn each_condition_selects_packets_of_both_directions() {
        let request = packet([(CLIENT, 50_000), (NODE, 61_000)]);
        let translated = packet([(CLIENT, 50_000), (POD, 8080)]);
        let reply = packet([(POD, 8080), (CLIENT, 50_000)]);
        let answered = packet([(NODE, 61_000), (CLIENT, 50_000)]);
        let client = |text: &str| PacketSelection { client: Some(text.parse().unwrap()), ..PacketSelection::default() };
        let endpoint = |endpoint| PacketSelection { endpoints: vec![endpoint], ..PacketSelection::default() };
        for (selection, expected) in [
            (PacketSelection::default(), true),
            (client(CLIENT), true),
            (client("192.0.2.0/24"), true),
            (client("192.0.3.0/24"), false),
            (client("2001:db8::/32"), false),
            (endpoint(TracedEndpoint::NodePort(61_000)), true),
            (endpoint(TracedEndpoint::NodePort(61_001)), false),
            (endpoint(TracedEndpoint::Address(POD.parse().unwrap())), true),
            (endpoint(TracedEndpoint::Address("10.244.1.6".parse().unwrap())), false),
            (PacketSelection { client_port: Some(50_000), ..client(CLIENT) }, true),
            (PacketSelection { client_port: Some(50_001), ..client(CLIENT) }, false),
            (PacketSelection { client_port: Some(8080), ..client(CLIENT) }, false),
        ] {
            check(&selection, &request, &translated, expected);
            check(&selection, &reply, &answered, expected);
        }
    }

    #[test]
    fn addresses_of_ipv6_are_compared_whole() {
        let selection =
            |text: &str| PacketSelection { client: Some(text.parse().unwrap()), ..PacketSelection::default() };
        let packet = packet([("2001:db8::7", 1), ("fd00::1", 2)]);
        check(&selection("2001:db8::7"), &packet, &packet, true);
        check(&selection("2001:db8::8"), &packet, &packet, false);
        check(&selection("2001:db8::/64"), &packet, &packet, true);
        check(&selection("2001:db8:0:1::/64"), &packet, &packet, false);
    }

    #[test]
    fn a_fragment_without_ports_matches_by_its_addresses() {
        let fragment = Packet { ports: None, ..packet([(CLIENT, 0), (NODE, 0)]) };
        let selection =
            PacketSelection { endpoints: vec![TracedEndpoint::NodePort(61_000)], ..PacketSelection::default() };
        check(&selection, &fragment, &fragment, true);
    }

    #[test]
    fn packets_of_protocols_without_ports_match_no_node_port() {
        let selection =
            PacketSelection { endpoints: vec![TracedEndpoint::NodePort(61_000)], ..PacketSelection::default() };
        for protocol in [1, 4, 50, 58] {
            let packet = Packet { protocol, ports: None, ..packet([(CLIENT, 0), (NODE, 0)]) };
            assert!(!selection.admits(&packet, None), "{protocol}");
        }
    }

    #[test]
    fn an_icmp_error_is_selected_by_the_packet_that_it_quotes() {
        let error = |port| {
            let quoted = Some(Box::new(packet([(NODE, port), (CLIENT, 50_000)])));
            Packet { protocol: 1, ports: None, quoted, ..packet([("198.51.100.1", 0), (NODE, 0)]) }
        };
        let client = Some(CLIENT.parse().unwrap());
        let endpoints = vec![TracedEndpoint::NodePort(61_000)];
        let selection = PacketSelection { client, endpoints, protocol: Some(Protocol::Tcp), client_port: None };
        assert!(selection.admits(&error(61_000), None));
        assert!(!selection.admits(&error(61_001), None));
        assert!(!PacketSelection { protocol: Some(Protocol::Udp), ..selection }.admits(&error(61_000), None));
    }

    #[test]
    fn a_selection_of_too_many_endpoints_says_what_to_do() {
        let selection = PacketSelection {
            endpoints: (1..10).map(TracedEndpoint::NodePort).collect(),
            ..PacketSelection::default()
        };
        assert_eq!(selection.filter(1), Err(TooManyEndpoints(9)));
    }
}
