// SPDX-License-Identifier: Apache-2.0
//! Checks whether policy routing rules for an incoming device send replies of Pods through another device. The AWS VPC
//! CNI creates rules of this kind for Pods with security groups.

use std::collections::BTreeSet;

use super::{Facts, Finding, forwarding::client_uplinks, kernel::ASK_AS_ROOT};
use crate::core::{
    devices::{Device, reply_routing::MAIN_TABLE},
    model::Family,
};

/// The number of the routing table for the Node's local addresses.
const LOCAL_TABLE: u32 = 255;

pub(super) fn incoming_rules(facts: &Facts) -> Finding {
    let key = "incoming_rules";
    let (routing, devices) = match (&facts.routing, &facts.devices) {
        (Ok(routing), Ok(devices)) => (routing, devices),
        (Err(reason), _) | (_, Err(reason)) => return Finding::unknown(key, reason, ASK_AS_ROOT),
    };
    let leads_to_pods = |device: &Device, family| {
        facts.pod_devices.iter().any(|(pod, ifindex)| *ifindex == device.ifindex && Family::of(*pod) == family)
    };
    let elsewhere = routing.incoming.iter().filter(|rule| {
        let routes = &routing.default_routes;
        let is_its =
            |uplink| routes.iter().any(|it| (it.family, it.table, it.ifindex) == (rule.family, rule.table, uplink));
        // A table without routes has no effect: the kernel then evaluates the next rule.
        let Some(of_table) = routing.tables_of_incoming.get(&(rule.family, rule.table)) else { return false };
        // If the rule's table and the main table have a default route through the same uplink, and the rule's table also
        // has routes through the other uplinks, the rule does not divert replies.
        let uplinks: BTreeSet<u32> = client_uplinks(facts, rule.family).map(|uplink| uplink.ifindex).collect();
        let is_as_main = routes.iter().any(|it| {
            (it.family, it.table) == (rule.family, MAIN_TABLE) && uplinks.contains(&it.ifindex) && is_its(it.ifindex)
        });
        let is_harmless =
            [MAIN_TABLE, LOCAL_TABLE].contains(&rule.table) || (is_as_main && uplinks.is_subset(of_table));
        !is_harmless && devices.iter().any(|device| device.name == rule.device && leads_to_pods(device, rule.family))
    });
    let found: Vec<String> = elsewhere.map(|rule| format!("iif {} lookup {}", rule.device, rule.table)).collect();
    if found.is_empty() {
        return Finding::ok(key, "no rule for an incoming device diverts replies of mapped Pods");
    }
    Finding::warning(
        key,
        format!("policy routing rules for devices of mapped Pods: {}", found.join(", ")),
        "with --forwarding stack and offload, replies of these Pods follow the table of the rule instead of the route \
         to the client, and may be lost: let the CNI route these Pods by the main table (AWS VPC CNI: \
         POD_SECURITY_GROUP_ENFORCING_MODE=standard), or do not use node ports for these Pods: use a load \
         balancer that sends to the Pods' own addresses",
    )
}

#[cfg(test)]
mod tests {
    use super::super::{
        Facts, State,
        tests::{check, device, is, pinned},
    };
    use crate::core::{
        devices::{
            DeviceKind,
            reply_routing::{DefaultRoute, IncomingRule, MAIN_TABLE},
        },
        model::Family,
    };

    const KEY: &str = "incoming_rules";
    const UPLINK: u32 = 2;
    const SECOND_UPLINK: u32 = 9;
    const OTHER: u32 = 77;

    fn rule(facts: &mut Facts, device: &str, table: u32) {
        let rule = IncomingRule { family: Family::V4, device: device.to_owned(), table };
        let routing = facts.routing.as_mut().unwrap();
        routing.incoming.push(rule);
        // The table has a route that leads to a device other than the uplinks.
        routing.tables_of_incoming.entry((Family::V4, table)).or_default().insert(OTHER);
    }

    fn default_route(facts: &mut Facts, table: u32) {
        let route = DefaultRoute { family: Family::V4, table, ifindex: UPLINK };
        let routing = facts.routing.as_mut().unwrap();
        routing.default_routes.insert(route);
        routing.tables_of_incoming.entry((Family::V4, table)).or_default().insert(UPLINK);
    }

    /// A rule whose table has a default route through the same uplink as the main table.
    fn rule_as_main(facts: &mut Facts) {
        rule(facts, "cali1", 101);
        default_route(facts, MAIN_TABLE);
        default_route(facts, 101);
    }

    fn second_uplink(facts: &mut Facts) {
        facts.devices.as_mut().unwrap().push(device("eth1", SECOND_UPLINK, DeviceKind::Physical, &[]));
        pinned(facts).attached_devices.insert(SECOND_UPLINK);
        facts.sysctls.ipv4_forwarding.insert("eth1".to_owned(), is("1"));
    }

    #[test]
    fn a_rule_for_the_device_of_a_mapped_pod_is_reported_unless_it_selects_the_same_uplink() {
        check(&[
            (|it| rule(it, "cali1", 101), KEY, State::Warning, "iif cali1 lookup 101", "ENFORCING_MODE=standard"),
            (|it| rule(it, "cali1", MAIN_TABLE), KEY, State::Ok, "no rule", ""),
            (|it| rule(it, "cali2", 101), KEY, State::Ok, "no rule", ""),
            // The rule's table has no routes.
            (
                |it| {
                    rule(it, "cali1", 101);
                    it.routing.as_mut().unwrap().tables_of_incoming.clear();
                },
                KEY,
                State::Ok,
                "no rule",
                "",
            ),
            // Replies to clients of the second uplink leave through the first uplink.
            (
                |it| {
                    rule_as_main(it);
                    second_uplink(it);
                },
                KEY,
                State::Warning,
                "iif cali1 lookup 101",
                "",
            ),
            (
                |it| {
                    rule_as_main(it);
                    second_uplink(it);
                    let tables = &mut it.routing.as_mut().unwrap().tables_of_incoming;
                    tables.get_mut(&(Family::V4, 101)).unwrap().insert(SECOND_UPLINK);
                },
                KEY,
                State::Ok,
                "no rule",
                "",
            ),
            (rule_as_main, KEY, State::Ok, "no rule", ""),
            // IPv4 requests do not arrive on an uplink with only an IPv6 address.
            (
                |it| {
                    rule_as_main(it);
                    second_uplink(it);
                    it.devices.as_mut().unwrap().last_mut().unwrap().addresses = vec!["2001:db8::2".parse().unwrap()];
                },
                KEY,
                State::Ok,
                "no rule",
                "",
            ),
        ]);
    }
}
