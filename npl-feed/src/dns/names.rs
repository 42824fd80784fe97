// SPDX-License-Identifier: Apache-2.0
//! Parses and formats the DNS names below the zone.

use std::net::IpAddr;

use hickory_server::proto::{ProtoError, rr::Name};
use npl_agent::core::model::Protocol;

use crate::core::snapshot::{Group, PortKey};

/// The DNS label that follows the address in the names of Node addresses, such as `192-0-2-10.ip.ZONE`, and of members,
/// such as `61000.192-0-2-10.ip.ZONE`.
const ADDRESSES: &str = "ip";

/// The meaning of a DNS name below the feed's zone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// The name of the zone itself.
    Apex,
    /// `_PORT._PROTOCOL.SERVICE.NAMESPACE`, the name of a Service port's SRV records.
    Port { namespace: String, service: String, protocol: Protocol, port: String },
    /// `_PROTOCOL.SERVICE.NAMESPACE`: a name without records, which exists if the Service has a port of the protocol.
    Protocol { namespace: String, service: String, protocol: Protocol },
    /// `SERVICE.NAMESPACE`: a name without records, which exists if the feed serves the Service.
    Service { namespace: String, service: String },
    /// `NAMESPACE`: a name without records, which exists if the feed serves a Service of the namespace.
    Namespace(String),
    /// The name of a Node's address, or of the member at this address and node port.
    Address { ip: IpAddr, port: Option<u16> },
    /// `ip`, the parent of the names of addresses: the name exists, but has no records.
    Addresses,
    /// The name does not exist.
    Nothing,
}

/// Parses the name of the zone or a name below the zone; `None` for any other name.
pub(super) fn read(name: &Name, zone: &Name) -> Option<Place> {
    if !zone.zone_of(name) {
        return None;
    }
    let own = usize::from(name.num_labels()).saturating_sub(usize::from(zone.num_labels()));
    // DNS compares only ASCII letters without regard to case (RFC 4343).
    let labels = name.iter().take(own).map(|label| String::from_utf8_lossy(label).to_ascii_lowercase());
    let labels: Vec<String> = labels.collect();
    let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
    Some(match labels.as_slice() {
        [] => Place::Apex,
        [ADDRESSES] => Place::Addresses,
        [text, ADDRESSES] => address(text).map_or_else(
            // The label before `ip` is not an address, so `ip` is the name of a namespace here.
            || Place::Service { namespace: ADDRESSES.to_owned(), service: (*text).to_owned() },
            |ip| Place::Address { ip, port: None },
        ),
        [namespace] => Place::Namespace((*namespace).to_owned()),
        [service, namespace] => Place::Service { namespace: (*namespace).to_owned(), service: (*service).to_owned() },
        [port, text, ADDRESSES] if member(port, text).is_some() => member(port, text).unwrap_or(Place::Nothing),
        [protocol, service, namespace] => protocol_of(protocol).map_or(Place::Nothing, |protocol| Place::Protocol {
            namespace: (*namespace).to_owned(),
            service: (*service).to_owned(),
            protocol,
        }),
        [port, protocol, service, namespace] => match (port.strip_prefix('_'), protocol_of(protocol)) {
            (Some(port), Some(protocol)) => Place::Port {
                namespace: (*namespace).to_owned(),
                service: (*service).to_owned(),
                protocol,
                port: port.to_owned(),
            },
            _ => Place::Nothing,
        },
        _ => Place::Nothing,
    })
}

fn protocol_of(label: &str) -> Option<Protocol> {
    label.strip_prefix('_').and_then(|name| name.parse().ok())
}

/// Returns the DNS name that has the SRV records of a Service port, without the final dot.
pub fn of_port(group: &Group, zone: &Name) -> String {
    let PortKey { service, protocol, .. } = &group.key;
    let zone = zone.to_ascii();
    let zone = zone.trim_end_matches('.');
    format!("_{}._{protocol}.{}.{}.{zone}", group.port_text(), service.name, service.namespace)
}

/// Returns the DNS name of a member. Each member has its own name, because `HAProxy` 2.8 does not resolve the third of
/// several servers with the same name.
pub(super) fn of_member(ip: IpAddr, port: u16, zone: &Name) -> Result<Name, ProtoError> {
    Name::from_labels([port.to_string().as_bytes(), label_of(ip).as_bytes(), ADDRESSES.as_bytes()])?.append_domain(zone)
}

/// Returns the label of an address. IPv6 addresses are written without `::`, because a label must not begin or end with
/// a hyphen.
fn label_of(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => ip.to_string().replace('.', "-"),
        IpAddr::V6(ip) => ip.segments().map(|segment| format!("{segment:x}")).join("-"),
    }
}

fn member(port: &str, text: &str) -> Option<Place> {
    let number = port.parse::<u16>().ok().filter(|number| number.to_string() == port)?;
    Some(Place::Address { ip: address(text)?, port: Some(number) })
}

/// Parses the label of an address. Only the form that [`label_of`] writes is a name of the zone.
fn address(label: &str) -> Option<IpAddr> {
    let v4 = || label.replace('-', ".").parse().ok().map(IpAddr::V4);
    let v6 = || label.replace('-', ":").parse().ok().map(IpAddr::V6);
    v4().or_else(v6).filter(|ip| label_of(*ip) == label)
}
