// SPDX-License-Identifier: Apache-2.0
//! Tests through which uplinks replies leave with given policy routing rules.

use std::{collections::BTreeSet, net::IpAddr};

use super::{DefaultRoute, MAIN_TABLE, Mark, Marking, ReplyRouteProblem, ReplyRoutes, Routing, RoutingRule, Selector};
use crate::core::{
    devices::{Device, DeviceKind, redirect::Forwarding},
    model::Family,
};

const FIRST: u32 = 2;
const SECOND: u32 = 3;
const THIRD: u32 = 4;
const UPLINKS: [u32; 2] = [FIRST, SECOND];
const POD: &str = "10.0.64.7";
const POD_V6: &str = "2001:db8:64::7";
const OWN: &str = "192.0.2.10";

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn from(addr: &str, table: u32) -> RoutingRule {
    let addr = ip(addr);
    RoutingRule { family: Family::of(addr), selector: Selector::Source(addr), table }
}

fn marked(family: Family, value: u32, mask: u32, table: u32) -> RoutingRule {
    RoutingRule { family, selector: Selector::Mark(Mark::new(value, mask).unwrap()), table }
}

/// Applies the rules to three routing tables: the main table has a default route through the first device, table 2
/// through the second device, and table 3 through a device that is not an uplink.
fn reply_routes(rules: &[RoutingRule]) -> ReplyRoutes {
    let tables = [(MAIN_TABLE, FIRST), (2, SECOND), (3, THIRD)];
    let route = |family| tables.map(|(table, ifindex)| DefaultRoute { family, table, ifindex });
    let default_routes = Family::ALL.into_iter().flat_map(route).collect();
    let routing = Routing { rules: rules.to_vec(), default_routes, ..Routing::default() };
    let device = Device {
        has_default_route: true,
        addresses: vec![ip(OWN)],
        ..Device::new(FIRST, "eth0", DeviceKind::Physical)
    };
    routing.reply_routes(&[device], &UPLINKS.into())
}

fn routes(markings: &[(Family, u32, u32, u32)], marked: &[&str], unmarked: &[&str]) -> ReplyRoutes {
    let marking = |(family, ifindex, value, mask): &(Family, u32, u32, u32)| Marking {
        family: *family,
        ifindex: *ifindex,
        mark: Mark::new(*value, *mask).unwrap(),
    };
    let addrs = |texts: &[&str]| texts.iter().map(|text| ip(text)).collect::<BTreeSet<_>>();
    ReplyRoutes {
        markings: markings.iter().map(marking).collect(),
        marked: addrs(marked),
        unmarked: addrs(unmarked),
        misrouted_addresses: BTreeSet::new(),
    }
}

#[test]
fn connections_get_the_mark_of_a_rule_that_selects_the_main_table_before_the_pods_rule() {
    let rules = [marked(Family::V4, 0x80, 0x80, MAIN_TABLE), from(POD, 2), from("10.0.64.8", 2)];
    assert_eq!(reply_routes(&rules), routes(&[(Family::V4, FIRST, 0x80, 0x80)], &[POD, "10.0.64.8"], &[]));
}

#[test]
fn a_pods_rule_before_the_rules_for_marks_decides_the_route_of_its_replies() {
    let mark = marked(Family::V4, 0x80, 0x80, MAIN_TABLE);
    assert_eq!(reply_routes(&[from(POD, 2), mark]), routes(&[], &[], &[POD]));
    let one_of_two = [from(POD, 2), mark, from(POD, 2), from("10.0.64.8", 2)];
    assert_eq!(reply_routes(&one_of_two), routes(&[(Family::V4, FIRST, 0x80, 0x80)], &["10.0.64.8"], &[POD]));
}

#[test]
fn connections_of_pods_stay_unmarked_without_a_rule_for_a_mark() {
    assert_eq!(reply_routes(&[from(POD, 2)]), routes(&[], &[], &[POD]));
}

#[test]
fn rules_without_pod_tables_need_no_mark() {
    let mark = marked(Family::V4, 0x80, 0x80, MAIN_TABLE);
    assert_eq!(reply_routes(&[mark]), ReplyRoutes::default());
    assert_eq!(reply_routes(&[mark, from(POD, MAIN_TABLE)]), ReplyRoutes::default());
}

/// The case of kubernetes/kubernetes#101910: a rule for packets from a Node address applies to packets of the Node's
/// own sockets, but not to replies of Pods.
#[test]
fn an_address_of_the_node_with_a_table_of_another_uplink_is_misrouted_unless_marks_select_that_uplink() {
    let misrouted = |rules: &[RoutingRule]| reply_routes(rules).misrouted_addresses.len();
    assert_eq!(misrouted(&[from(OWN, 2)]), 1);
    assert_eq!(misrouted(&[marked(Family::V4, 0x80, 0x80, 2), from(OWN, 2)]), 0);
    assert_eq!(
        misrouted(&[from(OWN, 2), marked(Family::V4, 0x80, 0x80, 2)]),
        1,
        "the rule for the mark comes after the rule for the Node's address"
    );
    assert_eq!(misrouted(&[marked(Family::V4, 0x80, 0x80, MAIN_TABLE), from(OWN, 2)]), 1);
    for harmless in [from(OWN, MAIN_TABLE), from(OWN, 3), from(OWN, 2004)] {
        assert_eq!(misrouted(&[harmless]), 0, "{harmless:?}");
    }
}

#[test]
fn a_misrouted_address_of_the_node_is_a_problem_unless_replies_are_redirected() {
    let problem = |forwarding| {
        let routes = reply_routes(&[from(OWN, 2)]).of(&BTreeSet::new());
        routes.problem(forwarding, true).map(|(problem, addresses)| (problem, addresses.clone()))
    };
    for forwarding in [Forwarding::Stack, Forwarding::Offload] {
        assert_eq!(problem(forwarding), Some((ReplyRouteProblem::NodeAddress, [ip(OWN)].into())));
    }
    assert_eq!(problem(Forwarding::Redirect), None);
}

#[test]
fn the_first_mark_whose_table_has_a_default_route_through_an_uplink_is_set() {
    let by = |table| marked(Family::V4, 0x200, 0xf00, table);
    assert_eq!(reply_routes(&[by(2), from(POD, 3)]), routes(&[(Family::V4, SECOND, 0x200, 0xf00)], &[POD], &[]));
    for nowhere in [3, 2004] {
        assert_eq!(reply_routes(&[by(nowhere), from(POD, 2)]), routes(&[], &[], &[POD]), "{nowhere}");
    }
    let several = [by(2004), marked(Family::V4, 0x80, 0x80, MAIN_TABLE), by(2), from(POD, 3)];
    assert_eq!(reply_routes(&several), routes(&[(Family::V4, FIRST, 0x80, 0x80)], &[POD], &[]));
}

#[test]
fn each_family_has_its_own_rules() {
    let rules = [marked(Family::V6, 0x80, 0x80, MAIN_TABLE), from(POD, 2), from(POD_V6, 2)];
    assert_eq!(reply_routes(&rules), routes(&[(Family::V6, FIRST, 0x80, 0x80)], &[POD_V6], &[POD]));
}

#[test]
fn a_mark_keeps_only_masked_bits_and_zero_is_no_mark() {
    assert_eq!(Mark::new(0x1080, 0xff).map(|mark| (mark.value(), mark.mask())), Some((0x80, 0xff)));
    assert_eq!([Mark::new(0, 0xff), Mark::new(0x100, 0xff)], [None, None]);
    assert_eq!(Mark::new(0x80, 0x80).unwrap().to_string(), "0x80/0x80");
}

#[test]
fn restricting_addresses_keeps_the_markings() {
    let rules = [marked(Family::V4, 0x80, 0x80, MAIN_TABLE), from(POD, 2), from("10.0.64.8", 2), from(POD_V6, 2)];
    let some = reply_routes(&rules).of(&[ip(POD)].into());
    assert_eq!(some, routes(&[(Family::V4, FIRST, 0x80, 0x80)], &[POD], &[]));
}

#[test]
fn misrouted_replies_are_a_problem_unless_marked_or_redirected() {
    let mark = marked(Family::V4, 0x80, 0x80, MAIN_TABLE);
    let of = |rules: &[RoutingRule], forwarding, are_marked| {
        reply_routes(rules).problem(forwarding, are_marked).map(|(problem, pods)| (problem, pods.len()))
    };
    for forwarding in [Forwarding::Stack, Forwarding::Offload] {
        assert_eq!(of(&[from(POD, 2)], forwarding, true), Some((ReplyRouteProblem::NoMark, 1)));
        assert_eq!(of(&[mark, from(POD, 2)], forwarding, false), Some((ReplyRouteProblem::MarkNotSet, 1)));
        assert_eq!(of(&[mark, from(POD, 2)], forwarding, true), None);
        assert_eq!(of(&[mark], forwarding, false), None);
    }
    for rules in [&[from(POD, 2)][..], &[mark, from(POD, 2)]] {
        assert_eq!(of(rules, Forwarding::Redirect, false), None);
    }
}

#[test]
fn a_mark_chooses_the_uplink_if_its_table_is_not_main_and_has_a_default_route_through_an_uplink() {
    let tables = [(MAIN_TABLE, FIRST), (2, SECOND), (3, THIRD)];
    let default_routes = tables.map(|(table, ifindex)| DefaultRoute { family: Family::V4, table, ifindex });
    let families = |family, table| {
        let routing = Routing {
            default_routes: default_routes.into(),
            tables_of_marks: [(family, table)].into(),
            ..Routing::default()
        };
        routing.families_routed_by_mark(&UPLINKS.into())
    };
    assert_eq!(families(Family::V4, 2), [Family::V4].into());
    // For packets to Cilium's proxy, Cilium's rule for a mark selects table 2004, which contains only local routes.
    for (family, table) in [(Family::V4, MAIN_TABLE), (Family::V4, 3), (Family::V4, 2004), (Family::V6, 2)] {
        assert_eq!(families(family, table), BTreeSet::new(), "{table}");
    }
}
