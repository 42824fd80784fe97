// SPDX-License-Identifier: Apache-2.0
//! Reads policy routing rules, and the default routes of all routing tables.

use std::collections::{BTreeMap, BTreeSet};

use rtnetlink::packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAttribute, RouteMessage},
    rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage},
};

use super::{FAMILIES, NetlinkError, is_gateway, list::Lists, outgoing_devices};
use crate::core::{
    devices::reply_routing::{DefaultRoute, IncomingRule, Mark, Routing, RoutingRule, Selector},
    model::Family,
};

/// The value of a rule's attribute `suppress_prefixlength` with which the rule suppresses no route.
const SUPPRESSES_NOTHING: u32 = u32::MAX;
/// The mask of a rule that compares all bits of the packet's mark.
const WHOLE: u32 = u32::MAX;

/// Reads policy routing. The first result contains the default routes, and the tables that rules select for packets
/// with a mark. The first result also contains, in the kernel's order, the rules for a single source address, and the
/// rules whose only condition is a mark or an incoming device. The second result contains the egress devices of all
/// routes with a gateway.
pub(super) async fn read_routing(lists: &Lists) -> Result<(Routing, BTreeSet<u32>), NetlinkError> {
    let mut routing = Routing::default();
    for family in FAMILIES {
        let mut wanted = RuleMessage::default();
        wanted.header.family = family;
        let pick = |message| if let RouteNetlinkMessage::NewRule(rule) = message { Some(rule) } else { None };
        match lists.dump("list rules", RouteNetlinkMessage::GetRule(wanted), pick).await {
            // A kernel without policy routing returns an error, and has no rules.
            Err(NetlinkError::Request { .. }) => {}
            listed => {
                let listed = listed?;
                routing.rules.extend(listed.iter().filter_map(rule));
                routing.tables_of_marks.extend(listed.iter().filter_map(table_of_mark));
                routing.incoming.extend(listed.iter().filter_map(incoming_rule));
            }
        }
    }
    let with_gateway = read_routes(lists, &mut routing).await?;
    Ok((routing, with_gateway))
}

/// Adds to `routing` the default routes of all tables, and the egress devices in the tables that rules for an incoming
/// device select. Returns the egress devices of all routes with a gateway. Of a multipath route, only the devices of
/// next hops with a gateway are returned.
async fn read_routes(lists: &Lists, routing: &mut Routing) -> Result<BTreeSet<u32>, NetlinkError> {
    let of_incoming: BTreeSet<_> = routing.incoming.iter().map(|rule| (rule.family, rule.table)).collect();
    let mut tables = BTreeMap::<_, BTreeSet<u32>>::new();
    let mut with_gateway = BTreeSet::new();
    for family in FAMILIES {
        let mut wanted = RouteMessage::default();
        wanted.header.address_family = family;
        let pick = |message| if let RouteNetlinkMessage::NewRoute(route) = message { Some(route) } else { None };
        for route in lists.dump("list routes", RouteNetlinkMessage::GetRoute(wanted), pick).await? {
            if route.header.destination_prefix_length == 0 {
                routing.default_routes.extend(default_routes(&route));
            }
            if let Some(table) = table_of(&route).filter(|table| of_incoming.contains(table)) {
                tables.entry(table).or_default().extend(route.attributes.iter().flat_map(outgoing_devices));
            }
            with_gateway.extend(devices_with_gateway(&route));
        }
    }
    routing.tables_of_incoming = tables;
    Ok(with_gateway)
}

/// Returns the devices of the route's next hops that have a gateway.
pub(super) fn devices_with_gateway(route: &RouteMessage) -> Vec<u32> {
    let of_hop = |it: &RouteAttribute| {
        let RouteAttribute::MultiPath(hops) = it else { return Vec::new() };
        let to_gateway = hops.iter().filter(|hop| hop.attributes.iter().any(is_gateway));
        to_gateway.map(|hop| hop.interface_index).collect()
    };
    if route.attributes.iter().any(is_gateway) {
        route.attributes.iter().flat_map(outgoing_devices).collect()
    } else {
        route.attributes.iter().flat_map(of_hop).collect()
    }
}

/// Returns the IP family and the number of the route's table.
pub(super) fn table_of(route: &RouteMessage) -> Option<(Family, u32)> {
    let of_table = |it: &RouteAttribute| if let RouteAttribute::Table(table) = it { Some(*table) } else { None };
    let table = route.attributes.iter().find_map(of_table).unwrap_or_else(|| route.header.table.into());
    Some((family_of(route.header.address_family)?, table))
}

pub(super) fn default_routes(route: &RouteMessage) -> Vec<DefaultRoute> {
    let Some((family, table)) = table_of(route) else { return Vec::new() };
    let devices = route.attributes.iter().flat_map(outgoing_devices);
    devices.map(|ifindex| DefaultRoute { family, table, ifindex }).collect()
}

pub(super) const fn family_of(family: AddressFamily) -> Option<Family> {
    if matches!(family, AddressFamily::Inet) {
        Some(Family::V4)
    } else if matches!(family, AddressFamily::Inet6) {
        Some(Family::V6)
    } else {
        None
    }
}

pub(super) fn rule(message: &RuleMessage) -> Option<RoutingRule> {
    let table = table(message)?;
    let family = family_of(message.header.family)?;
    let selector = source(message).or_else(|| mark(message))?;
    let is_of_family = !matches!(selector, Selector::Source(addr) if Family::of(addr) != family);
    is_of_family.then_some(RoutingRule { family, selector, table })
}

/// Converts a rule whose only condition is the incoming device; `None` if the rule has a different or an additional
/// condition.
pub(super) fn incoming_rule(message: &RuleMessage) -> Option<IncomingRule> {
    let table = table(message)?;
    let header = &message.header;
    let is_all = (header.src_len, header.dst_len, header.tos) == (0, 0, 0);
    let name = |it: &RuleAttribute| if let RuleAttribute::Iifname(name) = it { Some(name.clone()) } else { None };
    let is_known =
        |it: &RuleAttribute| matches!(it, RuleAttribute::Iifname(_)) || (has_no_other_condition(it) && !is_of_mark(it));
    let device = message.attributes.iter().find_map(name)?;
    (is_all && message.attributes.iter().all(is_known)).then_some(())?;
    Some(IncomingRule { family: family_of(header.family)?, device, table })
}

/// Returns the table that a rule selects; `None` if the rule selects no table, or if its conditions are inverted.
fn table(message: &RuleMessage) -> Option<u32> {
    if message.header.action != RuleAction::ToTable || message.header.flags.contains(RuleFlags::Invert) {
        return None;
    }
    let of_table = |it: &RuleAttribute| if let RuleAttribute::Table(table) = it { Some(*table) } else { None };
    Some(message.attributes.iter().find_map(of_table).unwrap_or_else(|| message.header.table.into()))
}

const fn is_of_mark(attribute: &RuleAttribute) -> bool {
    matches!(attribute, RuleAttribute::FwMark(_) | RuleAttribute::FwMask(_))
}

/// Returns the table that a rule selects for packets with a mark; `None` for an inverted rule, which selects packets
/// without the mark.
pub(super) fn table_of_mark(rule: &RuleMessage) -> Option<(Family, u32)> {
    let table = table(rule)?;
    mark_of(rule)?;
    Some((family_of(rule.header.family)?, table))
}

/// Returns the selector of a rule for a single source address; `None` if the rule selects no single address.
fn source(rule: &RuleMessage) -> Option<Selector> {
    let of_source = |it: &RuleAttribute| if let RuleAttribute::Source(addr) = it { Some(*addr) } else { None };
    let addr = rule.attributes.iter().find_map(of_source)?;
    let is_single = rule.header.src_len == if addr.is_ipv4() { 32 } else { 128 };
    is_single.then_some(Selector::Source(addr))
}

/// Returns the selector of a rule that matches only a mark; `None` if the rule has a different or an additional
/// condition.
fn mark(rule: &RuleMessage) -> Option<Selector> {
    let header = &rule.header;
    let is_all = (header.src_len, header.dst_len, header.tos) == (0, 0, 0);
    if !is_all || !rule.attributes.iter().all(has_no_other_condition) {
        return None;
    }
    mark_of(rule).map(Selector::Mark)
}

fn mark_of(rule: &RuleMessage) -> Option<Mark> {
    let value = |it: &RuleAttribute| if let RuleAttribute::FwMark(value) = it { Some(*value) } else { None };
    let mask = |it: &RuleAttribute| if let RuleAttribute::FwMask(mask) = it { Some(*mask) } else { None };
    let value = rule.attributes.iter().find_map(value)?;
    let mask = rule.attributes.iter().find_map(mask).unwrap_or(WHOLE);
    Mark::new(value, mask)
}

const fn has_no_other_condition(attribute: &RuleAttribute) -> bool {
    matches!(
        attribute,
        RuleAttribute::Priority(_)
            | RuleAttribute::Table(_)
            | RuleAttribute::Protocol(_)
            | RuleAttribute::FwMark(_)
            | RuleAttribute::FwMask(_)
            | RuleAttribute::SuppressPrefixLen(SUPPRESSES_NOTHING)
    )
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use rtnetlink::packet_route::{
        AddressFamily,
        route::{RouteAddress, RouteAttribute, RouteMessage, RouteNextHop, RouteVia},
        rule::{RuleAction, RuleAttribute as Of, RuleFlags, RuleMessage},
    };

    use super::{IncomingRule, Mark, RoutingRule, Selector, devices_with_gateway, incoming_rule, rule, table_of_mark};
    use crate::core::{devices::reply_routing::MAIN_TABLE, model::Family};

    const POD: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 64, 7));

    fn message(src_len: u8, attributes: Vec<Of>) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.action = RuleAction::ToTable;
        message.header.src_len = src_len;
        message.attributes = [vec![Of::Priority(1024), Of::SuppressPrefixLen(u32::MAX)], attributes].concat();
        message
    }

    fn marked(mask: Option<u32>) -> RuleMessage {
        let mask = mask.map(Of::FwMask);
        message(0, [Of::FwMark(0x80), Of::Table(MAIN_TABLE)].into_iter().chain(mask).collect())
    }

    #[test]
    fn rules_for_a_source_address_and_for_a_mark_are_read() {
        let read = |selector, table| Some(RoutingRule { family: Family::V4, selector, table });
        let of_pod = |src_len| rule(&message(src_len, vec![Of::Source(POD), Of::Table(1002)]));
        assert_eq!(of_pod(32), read(Selector::Source(POD), 1002));
        assert_eq!(of_pod(24), None, "a rule for a whole subnet is ignored");
        let mark = |mask| Selector::Mark(Mark::new(0x80, mask).unwrap());
        assert_eq!(rule(&marked(Some(0x80))), read(mark(0x80), MAIN_TABLE));
        assert_eq!(rule(&marked(None)), read(mark(u32::MAX), MAIN_TABLE));
        let other_family = Of::Source("2001:db8::1".parse().unwrap());
        assert_eq!(rule(&message(128, vec![other_family, Of::Table(1002)])), None, "an IPv6 address in an IPv4 rule");
    }

    #[test]
    fn rules_for_an_incoming_device_are_read_unless_they_have_other_conditions() {
        let of_device = |further: Vec<Of>| {
            let attributes = [vec![Of::Iifname("vlan.eth.1".to_owned()), Of::Table(101)], further].concat();
            incoming_rule(&message(0, attributes))
        };
        let expected = IncomingRule { family: Family::V4, device: "vlan.eth.1".to_owned(), table: 101 };
        assert_eq!(of_device(Vec::new()), Some(expected));
        assert_eq!(of_device(vec![Of::FwMark(0x80)]), None);
        assert_eq!(of_device(vec![Of::Oifname("eth1".to_owned())]), None);
        assert_eq!(incoming_rule(&marked(Some(0x80))), None, "a rule without a device");
    }

    #[test]
    fn the_table_of_a_mark_is_read_whatever_other_conditions_the_rule_has() {
        let found = Some((Family::V4, MAIN_TABLE));
        let mut conditional = marked(Some(0x80));
        conditional.attributes.push(Of::Iifname("eth0".to_owned()));
        assert_eq!([marked(None), conditional].map(|message| table_of_mark(&message)), [found, found]);
        let mut inverted = marked(Some(0x80));
        inverted.header.flags = RuleFlags::Invert;
        let of_pod = message(32, vec![Of::Source(POD), Of::Table(1002)]);
        assert_eq!([inverted, of_pod].map(|message| table_of_mark(&message)), [None, None]);
    }

    #[test]
    fn the_hops_of_a_route_that_lead_to_a_gateway_are_found() {
        let hop = |interface_index, attributes| {
            let mut hop = RouteNextHop::default();
            (hop.interface_index, hop.attributes) = (interface_index, attributes);
            hop
        };
        let route = |attributes| {
            let mut route = RouteMessage::default();
            route.attributes = attributes;
            devices_with_gateway(&route)
        };
        let gateway = RouteAttribute::Gateway(RouteAddress::Inet([192, 0, 2, 1].into()));
        let by_v6 = RouteAttribute::Via(RouteVia::Inet6("fe80::1".parse().unwrap()));
        assert_eq!(route(vec![RouteAttribute::Oif(7), gateway]), [7]);
        assert_eq!(route(vec![RouteAttribute::Oif(7)]), [0; 0]);
        assert_eq!(route(vec![RouteAttribute::MultiPath(vec![hop(7, vec![by_v6]), hop(8, vec![])])]), [7]);
    }

    #[test]
    fn rules_with_other_conditions_besides_the_mark_are_ignored() {
        let mut inverted = marked(Some(0x80));
        inverted.header.flags = RuleFlags::Invert;
        let mut to_somewhere = marked(Some(0x80));
        to_somewhere.header.dst_len = 24;
        let mut refusing = marked(Some(0x80));
        refusing.header.action = RuleAction::Unreachable;
        let with = |attribute| {
            let mut message = marked(Some(0x80));
            message.attributes.push(attribute);
            message
        };
        let conditional = [Of::Iifname("eth0".to_owned()), Of::SuppressPrefixLen(0)].map(with);
        for message in [inverted, to_somewhere, refusing].into_iter().chain(conditional) {
            assert_eq!(rule(&message), None, "{message:?}");
        }
        assert_eq!(rule(&message(0, vec![Of::FwMark(0), Of::FwMask(0x80), Of::Table(MAIN_TABLE)])), None);
    }
}
