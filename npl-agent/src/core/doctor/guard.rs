// SPDX-License-Identifier: Apache-2.0
//! Checks the nftables guard, that is, NPL's nftables table `inet npl`, and the routes of replies that need the guard's
//! marks.

use std::{collections::BTreeSet, net::IpAddr};

use super::{Facts, Finding, kernel::ASK_AS_ROOT};
use crate::core::devices::{
    redirect::Forwarding,
    reply_routing::{ReplyRouteProblem, ReplyRoutes},
};

pub(super) fn masquerading(facts: &Facts) -> Finding {
    const MEANING: &str = "after kernel conntrack has timed out a connection, replies of this connection are \
                           masqueraded, and the client rejects these packets";
    let key = "nft_guard";
    let it = match &facts.masquerading {
        Ok(masquerading) => masquerading,
        Err(reason) => return Finding::unknown(key, reason, ASK_AS_ROOT),
    };
    match it.guarded {
        Some(endpoints) => Finding::ok(key, format!("nftables table inet npl, endpoints: {endpoints}")),
        None if !it.is_done => Finding::ok(key, "not needed: no rule masquerades packets that leave the Node"),
        None if !it.has_nftables => Finding::warning(
            key,
            "packets that leave the Node are masqueraded, and this kernel has no nftables",
            format!("{MEANING}: load the kernel module nf_tables, which the guard needs"),
        ),
        None if facts.is_installed() => Finding::warning(
            key,
            "packets that leave the Node are masqueraded, and there is no nftables guard",
            format!("{MEANING}: check the flag --nft-guard and the agent's log"),
        ),
        None => Finding::ok(key, "nftables is available to the agent's guard"),
    }
}

/// Checks through which uplinks the replies of mapped Pods are routed. Replies of redirected Pods are routed by the
/// Node's address, so no policy routing rule for a Pod applies to these replies.
pub(super) fn reply_routes(facts: &Facts) -> Finding {
    const MEANING: &str = "with --forwarding stack and offload, replies of these Pods leave through another interface \
                           than the one on which their requests arrived, and may be dropped on the way";
    let key = "reply_routes";
    let routing = match &facts.routing {
        Ok(routing) => routing,
        Err(reason) => return Finding::unknown(key, reason, ASK_AS_ROOT),
    };
    let (devices, uplinks) =
        (facts.devices.as_deref().unwrap_or_default(), facts.uplinks().map(|uplink| uplink.ifindex));
    let routes = routing.reply_routes(devices, &uplinks.collect());
    if routes == ReplyRoutes::default() {
        return Finding::ok(key, "no policy routing rule gives a Pod a routing table of its own");
    }
    let (all, pods, markings) = match (&facts.datapath, &facts.markings) {
        (Ok(datapath), Ok(markings)) => (datapath.pods(), datapath.pods_of_the_stack(), markings),
        (Err(reason), _) | (_, Err(reason)) => return Finding::unknown(key, reason, ASK_AS_ROOT),
    };
    if !all.is_empty() && pods.is_empty() {
        return Finding::ok(key, "replies of all mapped Pods are redirected, and routed by the Node's address");
    }
    let (are_marked, routes) = (routes.markings.is_subset(markings), routes.of(&pods));
    let found = format!(
        "mapped Pod addresses with a routing table of their own: {}",
        routes.marked.len() + routes.unmarked.len()
    );
    match routes.problem(Forwarding::Stack, are_marked) {
        Some((ReplyRouteProblem::NodeAddress, addresses)) => Finding::warning(
            key,
            format!(
                "a policy routing rule gives addresses of the Node a routing table of their own: {}",
                list(addresses)
            ),
            "with --forwarding stack and offload, replies to clients of these addresses leave through the main table's \
             uplink and may be dropped on the way: set --forwarding redirect, or publish an address of the main \
             table's uplink with --node-ip",
        ),
        None if routes.marked.is_empty() => Finding::ok(key, found),
        None => Finding::ok(
            key,
            format!("{found}; nftables table inet npl marks connections to the mappings of these Pods"),
        ),
        Some((ReplyRouteProblem::NoMark, unmarked)) => Finding::warning(
            key,
            format!("{found}; without a rule that routes marked replies through an uplink: {}", unmarked.len()),
            format!("{MEANING}: see \"Replies leave through another interface\" in docs/troubleshoot.md"),
        ),
        Some((ReplyRouteProblem::MarkNotSet, _)) => Finding::warning(
            key,
            format!("{found}; their connections are not marked"),
            format!("{MEANING}: check the flag --nft-guard and the agent's log"),
        ),
    }
}

fn list(addresses: &BTreeSet<IpAddr>) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            Masquerading, State,
            tests::{check, first_device, nothing_pinned, redirect_all_pods},
        },
        Facts,
    };
    use crate::core::{
        devices::{
            Device, DeviceKind,
            redirect::Forwarding,
            reply_routing::{DefaultRoute, MAIN_TABLE, Mark, Marking, Routing, RoutingRule, Selector},
        },
        model::Family,
    };

    fn masquerading(facts: &mut Facts) -> &mut Masquerading {
        facts.masquerading.as_mut().unwrap()
    }

    /// Gives the mapped Pod its own routing table. If `ahead` is given, a rule for this mark precedes the rule of the
    /// Pod. The main table has a default route through the first device.
    fn routed_apart(facts: &mut Facts, ahead: Option<Mark>) {
        let (family, ifindex) = (Family::V4, first_device(facts).ifindex);
        let mark = ahead.map(|mark| RoutingRule { family, selector: Selector::Mark(mark), table: MAIN_TABLE });
        let pod = RoutingRule { family, selector: Selector::Source("10.0.64.7".parse().unwrap()), table: 2 };
        let default_routes = [DefaultRoute { family, table: MAIN_TABLE, ifindex }].into();
        facts.routing =
            Ok(Routing { rules: mark.into_iter().chain([pod]).collect(), default_routes, ..Routing::default() });
    }

    fn marks(facts: &mut Facts, mark: Mark) {
        facts.markings = Ok([Marking { family: Family::V4, ifindex: first_device(facts).ifindex, mark }].into());
    }

    fn mark() -> Mark {
        Mark::new(0x80, 0x80).unwrap()
    }

    #[test]
    fn pods_with_misrouted_replies_are_reported_unless_their_connections_are_marked() {
        const KEY: &str = "reply_routes";
        check(&[
            (
                |it| routed_apart(it, None),
                KEY,
                State::Warning,
                "without a rule that routes marked replies through an uplink: 1",
                "docs/troubleshoot.md",
            ),
            (|it| routed_apart(it, Some(mark())), KEY, State::Warning, "are not marked", "--nft-guard"),
            (
                |it| {
                    routed_apart(it, Some(mark()));
                    marks(it, Mark::new(0x40, 0x40).unwrap());
                },
                KEY,
                State::Warning,
                "are not marked",
                "--nft-guard",
            ),
            (
                |it| {
                    routed_apart(it, Some(mark()));
                    marks(it, mark());
                },
                KEY,
                State::Ok,
                "own: 1; nftables table inet npl marks connections to the mappings of these Pods",
                "",
            ),
            (
                |it| {
                    routed_apart(it, None);
                    nothing_pinned(it);
                },
                KEY,
                State::Ok,
                "with a routing table of their own: 0",
                "",
            ),
            (
                |it| {
                    routed_apart(it, Some(mark()));
                    it.markings = Err("EPERM".to_owned());
                },
                KEY,
                State::Unknown,
                "EPERM",
                "as root",
            ),
            // Replies of redirected Pods are routed by the Node's address.
            (
                |it| {
                    routed_apart(it, None);
                    redirect_all_pods(it);
                },
                KEY,
                State::Ok,
                "replies of all mapped Pods are redirected",
                "",
            ),
            (
                |it| {
                    routed_apart(it, None);
                    it.datapath.as_mut().unwrap().forwarding = Some(Forwarding::Redirect);
                },
                KEY,
                State::Warning,
                "through an uplink: 1",
                "",
            ),
            (|it| it.markings = Err("EPERM".to_owned()), KEY, State::Ok, "no policy routing rule", ""),
            (|it| it.routing = Err("EPERM".to_owned()), KEY, State::Unknown, "EPERM", "as root"),
        ]);
    }

    #[test]
    fn a_node_address_with_the_routing_table_of_another_uplink_is_reported() {
        check(&[(
            |it| {
                let second = Device {
                    addresses: vec!["198.51.100.10".parse().unwrap()],
                    ..Device::new(9, "eth1", DeviceKind::Physical)
                };
                let (family, first) = (Family::V4, first_device(it).ifindex);
                let rule = RoutingRule { family, selector: Selector::Source([198, 51, 100, 10].into()), table: 100 };
                let default_routes = [(MAIN_TABLE, first), (100, second.ifindex)];
                let route = |(table, ifindex)| DefaultRoute { family, table, ifindex };
                it.devices.as_mut().unwrap().push(second);
                it.datapath.as_mut().unwrap().addresses.insert([198, 51, 100, 10].into());
                it.routing = Ok(Routing {
                    rules: vec![rule],
                    default_routes: default_routes.map(route).into(),
                    ..Routing::default()
                });
            },
            "reply_routes",
            State::Warning,
            "routing table of their own: 198.51.100.10",
            "--forwarding redirect",
        )]);
    }

    #[test]
    fn masquerading_without_a_guard_is_reported() {
        check(&[
            (
                |it| masquerading(it).guarded = None,
                "nft_guard",
                State::Warning,
                "there is no nftables guard",
                "--nft-guard",
            ),
            (
                |it| {
                    masquerading(it).guarded = None;
                    masquerading(it).has_nftables = false;
                },
                "nft_guard",
                State::Warning,
                "this kernel has no nftables",
                "nf_tables",
            ),
            (
                |it| it.masquerading = Ok(Masquerading { has_nftables: false, is_done: false, guarded: None }),
                "nft_guard",
                State::Ok,
                "no rule masquerades",
                "",
            ),
            (
                |it| {
                    nothing_pinned(it);
                    masquerading(it).guarded = None;
                },
                "nft_guard",
                State::Ok,
                "nftables is available",
                "",
            ),
            (|it| it.masquerading = Err("EPERM".to_owned()), "nft_guard", State::Unknown, "EPERM", "as root"),
        ]);
    }
}
