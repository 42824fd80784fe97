// SPDX-License-Identifier: Apache-2.0
//! Formats the output of `npl-agent status` as text.

use std::{collections::BTreeMap, fmt::Write as _};

use npl_common::reason::Reason;

use super::view::{NodePortCounts, Status, Traffic};
use crate::{
    cli::{
        duration,
        style::{BAD, DOUBTFUL, GOOD, painted},
        table,
    },
    core::{
        verdict::{HealthVerdict, TableFill, Weight},
        view::PortUsageView,
    },
    nft_guard,
};

/// The text that the output shows for an absent value.
const NONE: &str = "-";

/// Formats the verdict with its findings, the facts, and the tables of the port range, devices, maps, and drop and pass
/// reasons.
pub(super) fn as_text(status: &Status, is_wide: bool) -> String {
    if !status.installed && status.agent.is_none() {
        return "NPL is not installed: no agent has run on this Node, or `npl-agent cleanup` has removed its state.\n"
            .to_owned();
    }
    let sections = [
        Some(heading(status)),
        Some(facts(status)),
        Some(ports(status)).filter(|table| !table.is_empty()),
        Some(tables(status, is_wide)),
        Some(devices(status)),
        Some(reasons(status, is_wide)),
    ];
    let sections: Vec<String> = sections.into_iter().flatten().collect();
    sections.join("\n")
}

fn heading(status: &Status) -> String {
    let node = status.agent.as_ref().map_or("This Node", |agent| agent.node_name.as_str());
    let color = match status.verdict {
        HealthVerdict::Healthy => GOOD,
        HealthVerdict::AtRisk => BAD,
        HealthVerdict::CannotTell => DOUBTFUL,
    };
    let mut text = format!("{node}: {}\n", painted(color, &status.verdict.to_string()));
    for finding in &status.findings {
        let (color, mark) = match finding.weight {
            Weight::Risk => (BAD, "risk"),
            Weight::Unknown => (DOUBTFUL, "unknown"),
            Weight::Notice => (DOUBTFUL, "notice"),
        };
        let _infallible = write!(text, "  {}: {}\n    see {}\n", painted(color, mark), finding.text, finding.page);
    }
    text
}

fn facts(status: &Status) -> String {
    let none = || NONE.to_owned();
    let facts = [
        ("Agent", agent(status)),
        ("API server", api_server(status)),
        ("Hooks", status.hooks.to_owned()),
        ("Programs", programs(&status.programs)),
        ("ABI", status.abi.map_or_else(none, |abi| abi.to_string())),
        ("Port range", status.port_range.clone().unwrap_or_else(none)),
        ("Node addresses", status.node_addresses.join(", ")),
        ("Local clients", local_clients(&status.socket_hooks)),
        ("Mappings", mappings(status)),
        ("Flows", flows(status)),
        ("Forwarding", forwarding(status)),
        ("Guard", guard_of(status)),
        ("Program order", status.network.program_order()),
        ("Network", status.network.recognized()),
    ];
    let lines: Vec<String> = facts.iter().map(|(name, value)| format!("{name:<16}{value}\n")).collect();
    lines.concat()
}

fn agent(status: &Status) -> String {
    let Some(agent) = &status.agent else {
        let text = if status.agent_running {
            "running; its state cannot be read"
        } else {
            "not running; existing mappings are still served"
        };
        return text.to_owned();
    };
    let readiness = match (agent.is_retiring, agent.is_ready) {
        (true, _) => "retiring this Node",
        (false, true) => "ready",
        (false, false) => "not ready",
    };
    format!("running for {}, {readiness}, version {}", duration(agent.uptime_millis), agent.version)
}

/// Describes how long ago each watch last received an event or a list from the API server.
fn api_server(status: &Status) -> String {
    let watches = status.agent.iter().flat_map(|agent| &agent.watches);
    let shown: Vec<String> = watches
        .map(|watch| match (&watch.failure, watch.heard_millis_ago) {
            (Some(failure), _) => format!("{} failing for {}", watch.resource, duration(failure.for_millis)),
            (None, Some(age)) => format!("{} received data {} ago", watch.resource, duration(age)),
            (None, None) => format!("{} not listed yet", watch.resource),
        })
        .collect();
    if shown.is_empty() { "not known without the agent".to_owned() } else { shown.join(", ") }
}

fn mappings(status: &Status) -> String {
    let kernel = format!("{} ({} for allowed sources only)", status.mappings, status.restricted_mappings);
    let Some(NodePortCounts { wanted, mapped, published, draining, host_ports, refused }) = status.node_ports else {
        return kernel;
    };
    format!(
        "{kernel}; {wanted} wanted, {mapped} mapped, {published} published, {draining} draining, {host_ports} host ports, \
         {refused} refused"
    )
}

fn flows(status: &Status) -> String {
    let count = status.flows;
    let Some(Traffic { request_packets, reply_packets, new_flows }) = status.traffic else { return count.to_string() };
    format!("{count}; {request_packets:.0} requests/s, {reply_packets:.0} replies/s, {new_flows:.0} new flows/s")
}

fn ports(status: &Status) -> String {
    if status.port_usage.is_empty() {
        return String::new();
    }
    let row = |usage: &PortUsageView| {
        let counts = [usage.used, usage.draining, usage.quarantined, usage.free].map(|count| count.to_string());
        [vec![usage.protocol.to_string(), usage.family.to_string()], counts.to_vec()].concat()
    };
    table(&["PORTS", "FAMILY", "USED", "DRAINING", "QUARANTINED", "FREE"], status.port_usage.iter().map(row))
}

/// Formats a table of the maps in [`Status::tables`] that contain entries, or of all these maps if `is_wide`.
fn tables(status: &Status, is_wide: bool) -> String {
    let shown = status.tables.iter().filter(|table| is_wide || table.used > 0);
    let row = |fill: &TableFill| {
        let percent = fill.used * 100 / fill.capacity.max(1);
        vec![fill.map.to_owned(), fill.used.to_string(), fill.capacity.to_string(), format!("{percent} %")]
    };
    table(&["MAP", "ELEMENTS", "CAPACITY", "FILL"], shown.map(row))
}

fn devices(status: &Status) -> String {
    let none = || NONE.to_owned();
    // The table omits devices that lead to Pods, because a Node has one such device for each Pod. The line `Forwarding`
    // contains the number of these devices.
    let devices = status.devices.iter().filter(|device| !device.leads_to_pods).map(|device| {
        let reason = device.reason.clone().unwrap_or_else(none);
        let (ifindex, attached) = (device.ifindex.to_string(), device.attached.join(", "));
        vec![device.name.clone(), ifindex, attached, device.requests.to_owned(), reason]
    });
    let unsupported = status
        .unsupported_devices
        .iter()
        .map(|device| vec![device.name.clone(), device.ifindex.to_string(), none(), none(), device.reason.to_owned()]);
    table(&["DEVICE", "IFINDEX", "ATTACHED", "REQUESTS", "WHY"], devices.chain(unsupported))
}

/// Formats a table of the drop and pass reasons that have counted a packet, or of all drop and pass reasons if
/// `is_wide`.
fn reasons(status: &Status, is_wide: bool) -> String {
    let count = |reason: &Reason| status.reasons.get(reason.name()).copied().unwrap_or_default();
    let per_second = |reason: &Reason| {
        let rate = status.reasons_per_second.as_ref().and_then(|rates| rates.get(reason.name()));
        rate.map_or_else(|| NONE.to_owned(), |rate| format!("{rate:.0}"))
    };
    let shown = Reason::ALL.iter().filter(|reason| is_wide || count(reason) > 0);
    let row = |reason: &Reason| {
        vec![reason.name().to_owned(), count(reason).to_string(), per_second(reason), reason.help().to_owned()]
    };
    table(&["REASON", "PACKETS", "PER SECOND", "MEANING"], shown.map(row))
}

/// Describes the number of programs of each build. Programs of two builds are loaded while an agent replaces the
/// programs of an earlier build.
fn programs(builds: &BTreeMap<String, Vec<String>>) -> String {
    let shown: Vec<String> = builds.iter().map(|(build, names)| format!("{} of {build}", names.len())).collect();
    shown.join(", ")
}

/// Describes how translated packets reach the Pods.
fn forwarding(status: &Status) -> String {
    if status.network.redirect_refused {
        return "through the kernel stack: --forwarding redirect is refused, because redirected packets would bypass \
                NetworkPolicy; see --ignore-network-policy"
            .to_owned();
    }
    let pods = status.redirected_pods.len();
    if pods == 0 {
        return "through the kernel stack".to_owned();
    }
    let devices = status.devices.iter().filter(|device| device.leads_to_pods).count();
    let how = if status.is_offloading { "established flows are offloaded" } else { "packets are redirected" };
    format!("{how} (Pod addresses: {pods}, devices: {devices}); other packets pass through the kernel stack")
}

/// Describes whether NPL's nftables table exempts replies from masquerading, marks connections for reply routing, and
/// drops packets with forged sources.
fn guard_of(status: &Status) -> String {
    if let Some(refusal) = &status.guard_refusal {
        return format!("cannot read nftables: {refusal}");
    }
    let exemptions =
        status.guarded_endpoints.map(|count| format!("exempts replies of {count} Pod endpoints from masquerading"));
    let marks = Some(&status.connection_marks).filter(|all| !all.is_empty());
    let marks = marks.map(|all| format!("marks connections ({})", all.join(", ")));
    let drops = status.drops_forged_sources.then(|| "drops IPv6 packets that forge a node port as source".to_owned());
    let effects: Vec<String> = exemptions.into_iter().chain(marks).chain(drops).collect();
    if effects.is_empty() {
        return "no nftables table: see --nft-guard".to_owned();
    }
    format!("nftables table {}: {}", nft_guard::TABLE, effects.join("; "))
}

/// Describes which cgroup hooks translate the connections of clients on the Node and in the Node's Pods.
fn local_clients(hooks: &[&str]) -> String {
    if hooks.is_empty() { "not served: see --cgroup".to_owned() } else { format!("served by {}", hooks.join(", ")) }
}
