// SPDX-License-Identifier: Apache-2.0
//! Checks the sysctls on which node ports or Services depend, except the sysctls for IP forwarding.

use std::net::IpAddr;

use super::{Device, Facts, Finding, Setting, Sysctls, software};
use crate::core::{
    devices::reply_routing::{MAIN_TABLE, Selector},
    model::{
        Family,
        port_range::{EphemeralPorts, port_range_warnings},
    },
};

/// The advice of a check that cannot read a file of `/proc/sys`.
pub(super) const SEE_PROC: &str = "this setting cannot be read: run the check again as root, where /proc is mounted";
/// The sysctl that must be 1 for `--forwarding offload`: kernel conntrack then accepts out-of-window packets.
const TCP_BE_LIBERAL: &str = "net.netfilter.nf_conntrack_tcp_be_liberal";
const TCP_UNACKNOWLEDGED: &str = "net.netfilter.nf_conntrack_tcp_timeout_unacknowledged";

/// Reports the mode of reverse path filtering. Strict filtering drops a request if the route from the Pod to the client
/// leads through another device than the one on which the request arrived. The check warns about Pods and Node
/// addresses whose own routing table leads through another uplink than the route that the filter looks up. The check
/// warns even if marks route the replies: the request has no mark, so the filter looks up the route without a mark.
pub(super) fn rp_filter(facts: &Facts) -> Finding {
    let key = "rp_filter";
    let all = match &facts.sysctls.rp_filter {
        Setting::Is(value) => value,
        Setting::Missing => return Finding::ok(key, "this kernel has no rp_filter"),
        Setting::Unreadable(reason) => return Finding::unknown(key, reason, SEE_PROC),
    };
    let of = |device: &str| match facts.sysctls.rp_filters.get(device) {
        // The kernel applies the greater of the device's value and the value for all devices, so loose (2) overrides
        // strict (1).
        Some(Setting::Is(own)) => own.max(all),
        Some(Setting::Missing | Setting::Unreadable(_)) | None => all,
    };
    let shown: Vec<String> = facts.uplinks().map(|it| format!("{} on {}", strictness(of(&it.name)), it.name)).collect();
    let shown = if shown.is_empty() { strictness(all).to_owned() } else { shown.join(", ") };
    let strict: Vec<&Device> = facts.uplinks().filter(|it| strictness(of(&it.name)) == "strict").collect();
    let names = |dropping: &dyn Fn(&Device) -> bool| {
        strict.iter().filter(|it| dropping(it)).map(|it| it.name.as_str()).collect::<Vec<_>>().join(", ")
    };
    let of_pods = names(&|uplink| has_pods_routed_elsewhere(facts, uplink));
    let of_addresses = names(&|uplink| has_addresses_routed_apart(facts, uplink));
    let (cause, requests, uplinks) = if !of_pods.is_empty() {
        let cause = "policy routing rules give mapped Pods a routing table that leads through another uplink";
        (cause, "requests to these Pods", of_pods)
    } else if !of_addresses.is_empty() {
        let cause = "a policy routing rule gives a Node address a routing table, but the filter looks up the route from \
                     the Pod's address, which leads through another uplink";
        (cause, "requests", of_addresses)
    } else {
        return Finding::ok(key, shown);
    };
    Finding::warning(
        key,
        format!("{shown}; {cause}"),
        format!(
            "the kernel drops {requests} that arrive on {uplinks}: set rp_filter to 2 (loose) on this uplink, or set \
             --forwarding redirect"
        ),
    )
}

/// Whether a policy routing rule gives a mapped IPv4 Pod a routing table whose default routes do not lead through this
/// uplink. Reverse path filtering exists for IPv4 only.
fn has_pods_routed_elsewhere(facts: &Facts, uplink: &Device) -> bool {
    let (Ok(routing), Ok(datapath)) = (&facts.routing, &facts.datapath) else { return false };
    let pods = datapath.pods_of_the_stack();
    routing.rules.iter().any(|rule| {
        let Selector::Source(pod) = rule.selector else { return false };
        let devices = routing.default_devices(Family::V4, rule.table);
        (rule.family, rule.table == MAIN_TABLE) == (Family::V4, false)
            && pods.contains(&pod)
            && !devices.is_empty()
            && !devices.contains(&uplink.ifindex)
    })
}

/// Whether a policy routing rule gives an IPv4 address of the Node a routing table whose default route leads through
/// this uplink, while the default routes of the main table lead through other uplinks. Without NPL, the filter looks up
/// the route from the Node address. With NPL, the filter uses the main table, because NPL has replaced the Node address
/// with the Pod's address.
fn has_addresses_routed_apart(facts: &Facts, uplink: &Device) -> bool {
    let (Ok(routing), Ok(datapath)) = (&facts.routing, &facts.datapath) else { return false };
    let of_main = routing.default_devices(Family::V4, MAIN_TABLE);
    let is_apart = |table| {
        table != MAIN_TABLE
            && routing.default_devices(Family::V4, table).contains(&uplink.ifindex)
            && !of_main.is_empty()
            && !of_main.contains(&uplink.ifindex)
    };
    datapath.pods_of_the_stack().iter().any(IpAddr::is_ipv4)
        && routing.rules.iter().any(|rule| {
            let Selector::Source(address) = rule.selector else { return false };
            rule.family == Family::V4 && datapath.addresses.contains(&address) && is_apart(rule.table)
        })
}

fn strictness(value: &str) -> &str {
    match value {
        "0" => "off",
        "1" => "strict",
        "2" => "loose",
        other => other,
    }
}

pub(super) fn conntrack_liberal(sysctls: &Sysctls) -> Finding {
    let key = "conntrack_liberal";
    match &sysctls.tcp_be_liberal {
        Setting::Missing => Finding::ok(key, "kernel conntrack is not loaded"),
        Setting::Unreadable(reason) => Finding::unknown(key, reason, SEE_PROC),
        Setting::Is(value) if value == "0" => Finding::warning(
            key,
            format!("{TCP_BE_LIBERAL}=0"),
            format!(
                "only --forwarding offload needs this setting; without it, no flow is offloaded: set \
                 {TCP_BE_LIBERAL}=1, or start kube-proxy with --conntrack-tcp-be-liberal"
            ),
        ),
        Setting::Is(value) => Finding::ok(key, format!("{TCP_BE_LIBERAL}={value}")),
    }
}

/// Checks whether kernel conntrack times out offloaded connections early: kernel conntrack does not process every
/// acknowledgement of an offloaded connection.
pub(super) fn conntrack_timeouts(sysctls: &Sysctls) -> Finding {
    let key = "conntrack_timeouts";
    let (unacknowledged, established) = match (&sysctls.tcp_unacknowledged, &sysctls.tcp_established) {
        (Setting::Missing, _) | (_, Setting::Missing) => return Finding::ok(key, "kernel conntrack is not loaded"),
        (Setting::Unreadable(reason), _) | (_, Setting::Unreadable(reason)) => {
            return Finding::unknown(key, reason, SEE_PROC);
        }
        (Setting::Is(unacknowledged), Setting::Is(established)) => (unacknowledged, established),
    };
    let found = format!("{TCP_UNACKNOWLEDGED}={unacknowledged}");
    let seconds = |value: &str| value.parse::<u32>().ok();
    if seconds(unacknowledged).zip(seconds(established)).is_some_and(|(some, all)| some < all) {
        let advice = format!(
            "only --forwarding offload needs a higher value: kernel conntrack times out offloaded connections that are \
             idle for longer than this timeout. Set {TCP_UNACKNOWLEDGED}={established}"
        );
        return Finding::warning(key, found, advice);
    }
    Finding::ok(key, found)
}

/// The ephemeral ports of outgoing connections; `None` if the sysctl cannot be read.
fn ephemeral_ports(sysctls: &Sysctls) -> Option<EphemeralPorts> {
    let reserved = match &sysctls.reserved_ports {
        Setting::Is(ports) => ports,
        Setting::Missing | Setting::Unreadable(_) => "",
    };
    match &sysctls.local_ports {
        Setting::Is(range) => EphemeralPorts::parse(range, reserved),
        Setting::Missing | Setting::Unreadable(_) => None,
    }
}

/// Checks that the ephemeral ports of outgoing connections exclude the `nodePort`s of Services. Mappings do not depend
/// on these ports. The doctor nevertheless checks for this overlap: an operator who reserves NPL's port range in
/// `net.ipv4.ip_local_reserved_ports` may forget to reserve the `nodePort`s, too. If an outgoing connection uses a
/// `nodePort` as its source port, clients cannot reach the Service of this `nodePort`.
pub(super) fn service_ports(sysctls: &Sysctls) -> Finding {
    let key = "service_ports";
    let Some(ephemeral) = ephemeral_ports(sysctls) else {
        return Finding::unknown(key, "net.ipv4.ip_local_port_range cannot be read", SEE_PROC);
    };
    let found = format!("ephemeral ports of outgoing connections are {ephemeral}");
    if !ephemeral.overlap_service_node_ports() {
        return Finding::ok(key, found);
    }
    Finding::warning(
        key,
        found,
        "connections of the Node may use ports of Services of type NodePort as source ports; clients then cannot reach \
         these Services: add 30000-32767 to net.ipv4.ip_local_reserved_ports, or the range of the cluster's \
         --service-node-port-range if that flag is set",
    )
}

pub(super) fn port_range(facts: &Facts) -> Finding {
    let key = "port_range";
    let ephemeral = ephemeral_ports(&facts.sysctls);
    let lends = ephemeral.as_ref().map_or_else(
        || "net.ipv4.ip_local_port_range cannot be read".to_owned(),
        |ephemeral| format!("ephemeral ports of outgoing connections are {ephemeral}"),
    );
    let Some(range) = facts.datapath.as_ref().ok().and_then(|datapath| datapath.port_range) else {
        let advice = "NPL cannot allocate an ephemeral port that an outgoing connection uses: choose a --port-range \
                      that does not overlap the ephemeral ports";
        return Finding::unknown(key, format!("no agent has configured a port range yet; {lends}"), advice);
    };
    let found = format!("{range}; {lends}");
    let warnings: Vec<String> =
        port_range_warnings(range, ephemeral.as_ref()).iter().map(ToString::to_string).collect();
    if !warnings.is_empty() {
        return Finding::warning(key, found, warnings.join("; and "));
    }
    if software::is_masqueraded_by_cilium(facts) {
        return Finding::warning(
            key,
            format!("{found}; Cilium chooses source ports of masqueraded connections from 32768-65535"),
            "if Cilium masquerades by eBPF (bpf.masquerade), a connection of a Pod may get a mapped node port as its \
             source port and receive no answer, and each client takes entries of Cilium's NAT map: set --port-range \
             below 30000, for example 28000-29000",
        );
    }
    if ephemeral.is_none() {
        return Finding::unknown(key, found, SEE_PROC);
    }
    Finding::ok(key, found)
}
