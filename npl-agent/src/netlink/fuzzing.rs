// SPDX-License-Identifier: Apache-2.0
//! The fuzz target `netlink`: the kernel's answers about devices, addresses, routes, policy rules, qdiscs, filters and
//! ethtool features.

use ethtool::{EthtoolAttr, EthtoolCmd, EthtoolFeatureAttr, EthtoolMessage};
use rtnetlink::{
    packet_core::{NetlinkBuffer, NetlinkMessage, NetlinkPayload, NlasIterator, Parseable as _},
    packet_route::{
        RouteNetlinkMessage, address::AddressMessage, link::LinkMessage, route::RouteMessage, rule::RuleMessage,
        tc::TcMessage,
    },
};

use super::{
    carrier, global_address, is_change,
    link::{device_with, master_of_physical_port},
    list, receive_offload, rules, tc_inspection,
};
use crate::{
    core::{devices::reply_routing::Selector, model::Family},
    fuzzing::Input,
};

/// The maximum number of messages of one input.
const MAX_MESSAGES: usize = 64;

/// Checks the conversion of netlink messages. If the first byte of the input is even, the remaining bytes are messages
/// of rtnetlink; otherwise they are attributes of an answer of ethtool.
pub fn netlink(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    if input.byte() % 2 == 1 {
        return check_features(input.rest());
    }
    let messages = messages(input.rest());
    for message in &messages {
        let with_attachments = is_change(&message.payload, true);
        assert!(with_attachments || !is_change(&message.payload, false), "a message without a reported change");
        if let NetlinkPayload::InnerMessage(message) = &message.payload {
            check(message);
        }
    }
    let count = messages.len();
    if let Ok(Some(list)) = list::complete(messages) {
        assert!(list.len() < count, "a complete dump has a final message");
    }
}

/// Parses the messages of a datagram, as the library does that the agent uses.
fn messages(mut rest: &[u8]) -> Vec<NetlinkMessage<RouteNetlinkMessage>> {
    let mut messages = Vec::new();
    while messages.len() < MAX_MESSAGES {
        let Ok(length) = NetlinkBuffer::new_checked(rest).map(|buffer| buffer.length()) else { break };
        messages.extend(NetlinkMessage::deserialize(rest));
        rest = rest.get((length as usize).next_multiple_of(4)..).unwrap_or_default();
    }
    messages
}

fn check(message: &RouteNetlinkMessage) {
    if let RouteNetlinkMessage::NewLink(link) = message {
        check_link(link);
    } else if let RouteNetlinkMessage::NewAddress(address) = message {
        check_address(address);
    } else if let RouteNetlinkMessage::NewRoute(route) = message {
        check_route(route);
    } else if let RouteNetlinkMessage::NewRule(rule) = message {
        check_rule(rule);
    } else if let RouteNetlinkMessage::NewQueueDiscipline(tc) | RouteNetlinkMessage::NewTrafficFilter(tc) = message {
        check_tc(tc);
    }
}

fn check_link(link: &LinkMessage) {
    let _carrier = carrier(link);
    let _master = master_of_physical_port(link);
    let Some(device) = device_with(link, |_name| None) else { return };
    assert_eq!(device.ifindex, link.header.index);
    assert!(!device.peer_is_elsewhere || device.link.shares_network_of.is_none(), "{device:?}");
}

fn check_address(message: &AddressMessage) {
    let Some(ip) = global_address(message) else { return };
    let of_message = rules::family_of(message.header.family);
    assert!(of_message.is_none_or(|family| family == Family::of(ip)), "{ip} in a message about {of_message:?}");
}

fn check_route(route: &RouteMessage) {
    let table = rules::table_of(route);
    for default in rules::default_routes(route) {
        assert_eq!(table, Some((default.family, default.table)));
    }
    let with_gateway = rules::devices_with_gateway(route);
    let all: Vec<u32> = route.attributes.iter().flat_map(super::outgoing_devices).collect();
    assert!(with_gateway.iter().all(|ifindex| all.contains(ifindex)), "{with_gateway:?} {all:?}");
}

fn check_rule(message: &RuleMessage) {
    let incoming = rules::incoming_rule(message);
    let rule = rules::rule(message);
    if let Some(rule) = rule {
        match rule.selector {
            Selector::Source(addr) => assert_eq!(Family::of(addr), rule.family, "{message:?}"),
            Selector::Mark(mark) => assert!(mark.value() != 0 && mark.value() & !mark.mask() == 0, "{mark:?}"),
        }
    }
    let of_mark = rules::table_of_mark(message);
    if let (Some(rule), Some(of_mark)) = (rule, of_mark) {
        assert_eq!((rule.family, rule.table), of_mark);
    }
    // A rule whose only condition is the incoming device has no condition on the source or the mark.
    assert!(incoming.is_none() || (rule.is_none() && of_mark.is_none()), "{message:?}");
}

fn check_tc(message: &TcMessage) {
    let facts = tc_inspection::facts_of(1, crate::core::devices::attachments::Side::Ingress, message);
    let owner = tc_inspection::owner(message);
    let is_foreign = tc_inspection::is_foreign_filter(message);
    assert_eq!(is_foreign, owner.is_some_and(|owner| owner.is_other()));
    // The agent removes only filters that are its own, and these are filters of kind `bpf`.
    assert!(is_foreign || facts.kind == "bpf", "{message:?}");
    let _queues = tc_inspection::is_queue(message);
}

fn check_features(attributes: &[u8]) {
    let parsed = NlasIterator::new(attributes).map_while(Result::ok).map(|nla| EthtoolFeatureAttr::parse(&nla));
    let nlas: Vec<EthtoolAttr> = parsed.map_while(Result::ok).map(EthtoolAttr::Feature).collect();
    let message = EthtoolMessage { cmd: EthtoolCmd::FeatureGetReply, nlas };
    let name = receive_offload::device_with_fraglists(&message);
    let has_active_bit = message.nlas.iter().any(|nla| {
        let EthtoolAttr::Feature(EthtoolFeatureAttr::Active(bits)) = nla else { return false };
        bits.iter().any(|bit| bit.value)
    });
    assert!(name.is_none() || has_active_bit, "{message:?}");
}
