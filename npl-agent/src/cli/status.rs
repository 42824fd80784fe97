// SPDX-License-Identifier: Apache-2.0
//! `npl-agent status`: what is installed, where it is attached, and the counters.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
};

use serde::Serialize;

use super::{print, print_json, table};
use crate::{
    config::args::{OutputFormat, ViewArgs},
    core::devices::{Device, DeviceSelection, choose, reply_routing::Marking, xdp::XdpReason},
    datapath::{inspect::Inspection, pins::Direction, preflight},
    netlink,
    nft_guard::{self, TableState},
    process::lock,
};

/// Shown for a device that no longer exists.
const GONE: &str = "(gone)";

/// The datapath's state in the output.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    /// Whether an agent is running.
    agent_running: bool,
    /// Whether anything is pinned.
    installed: bool,
    /// `tcx` or `clsact`.
    hooks: &'static str,
    abi: Option<u32>,
    port_range: Option<String>,
    node_addresses: Vec<String>,
    devices: Vec<ShownDevice>,
    /// Devices that clients may use and that the programs do not support.
    unsupported_devices: Vec<UnsupportedDevice>,
    /// Addresses of Pods that packets are redirected to.
    redirected_pods: BTreeSet<IpAddr>,
    /// Whether only established flows are redirected.
    is_offloading: bool,
    /// `connect4`, `sendmsg6`, ….
    socket_hooks: Vec<&'static str>,
    mappings: usize,
    /// How many of them allow only some sources.
    restricted_mappings: usize,
    flows: usize,
    /// The number of endpoints that the nftables guard exempts from masquerading; `None` without a guard.
    guarded_endpoints: Option<usize>,
    /// The connections that the nftables guard marks, so that replies leave by the interface of their request.
    connection_marks: Vec<String>,
    /// Why the guard's table cannot be read.
    guard_refusal: Option<String>,
    /// The names of the pinned programs, by their build.
    programs: BTreeMap<String, Vec<String>>,
    /// Packets by reason.
    reasons: BTreeMap<&'static str, u64>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ShownDevice {
    name: String,
    ifindex: u32,
    /// `ingress`, `egress`.
    attached: Vec<&'static str>,
    /// Whether it leads to Pods; otherwise it leads to clients.
    leads_to_pods: bool,
    /// `xdp` or `tc`: what translates its requests.
    requests: &'static str,
    /// Why; `None` before an agent has decided.
    reason: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct UnsupportedDevice {
    name: String,
    ifindex: u32,
    reason: &'static str,
}

/// Prints the state of the kernel.
///
/// # Errors
///
/// If the kernel cannot be read.
pub async fn show(args: &ViewArgs) -> anyhow::Result<()> {
    let inspection = Inspection::read(&args.bpffs)?;
    let devices = netlink::interfaces().await?;
    let shown = Shown::new(&inspection, &devices, nft_guard::read_state());
    match args.output {
        OutputFormat::Json => print_json(&shown),
        OutputFormat::Table => print(&as_text(&shown, &inspection)),
    }
}

impl Shown {
    fn new(inspection: &Inspection, devices: &[Device], held: io::Result<TableState>) -> Self {
        let name = |ifindex: u32| devices.iter().find(|device| device.ifindex == ifindex).map(|it| it.name.clone());
        let leads_to_pods = |ifindex| inspection.redirected.values().any(|hop| hop.ifindex == ifindex);
        let config = inspection.config.filter(|config| config.abi != 0);
        let guard_refusal = held.as_ref().err().map(ToString::to_string);
        let held = held.unwrap_or_default();
        let marked = |it: &Marking| {
            let device = name(it.ifindex).unwrap_or_else(|| GONE.to_owned());
            format!("{} by {device}: {}", it.family, it.mark)
        };
        Self {
            agent_running: lock::is_taken(),
            installed: inspection.is_installed,
            hooks: if preflight::has_tcx() { "tcx" } else { "clsact" },
            abi: config.map(|config| config.abi),
            port_range: config.map(|config| format!("{}-{}", config.port_min, config.port_max)),
            node_addresses: inspection.local_addresses.iter().map(ToString::to_string).collect(),
            devices: inspection
                .links
                .iter()
                .map(|(ifindex, directions)| ShownDevice {
                    name: name(*ifindex).unwrap_or_else(|| GONE.to_owned()),
                    ifindex: *ifindex,
                    attached: directions.iter().map(|direction| direction.as_str()).collect(),
                    leads_to_pods: leads_to_pods(*ifindex),
                    requests: if inspection.xdp_links.contains(ifindex) { "xdp" } else { "tc" },
                    reason: inspection.xdp_reasons.get(ifindex).map(|key| {
                        let known = XdpReason::of_key(key);
                        known.map_or_else(|| key.clone(), |reason| reason.as_str().to_owned())
                    }),
                })
                .collect(),
            unsupported_devices: unsupported(devices, &inspection.local_addresses),
            redirected_pods: inspection.redirected.keys().copied().collect(),
            is_offloading: inspection.links.values().flatten().any(|side| *side == Direction::ToPods),
            socket_hooks: inspection.socket_hooks.clone(),
            mappings: inspection.mappings.len(),
            restricted_mappings: inspection.mappings.iter().filter(|it| it.sources.is_restricted()).count(),
            flows: inspection.flows,
            guard_refusal,
            guarded_endpoints: held.guarded,
            connection_marks: held.markings.iter().map(marked).collect(),
            programs: inspection.programs.clone(),
            reasons: inspection.reasons.iter().map(|(reason, count)| (reason.name(), *count)).collect(),
        }
    }
}

/// Devices that an agent without `--devices` would choose, if the programs supported them.
fn unsupported(devices: &[Device], node_ips: &[IpAddr]) -> Vec<UnsupportedDevice> {
    let refusal = |device: &Device| {
        let reason = choose(device, &DeviceSelection::Auto, node_ips, false).err().filter(|it| it.is_unsupported())?;
        Some(UnsupportedDevice { name: device.name.clone(), ifindex: device.ifindex, reason: reason.as_str() })
    };
    devices.iter().filter_map(refusal).collect()
}

fn as_text(shown: &Shown, inspection: &Inspection) -> String {
    if !shown.installed {
        return "Nothing is installed: no agent has run on this Node, or `npl-agent cleanup` has removed its kernel \
                state.\n"
            .to_owned();
    }
    let none = || "-".to_owned();
    let agent = if shown.agent_running { "running" } else { "not running; mappings keep translating" };
    let facts = [
        ("Agent", agent.to_owned()),
        ("Hooks", shown.hooks.to_owned()),
        ("Programs", programs(&shown.programs)),
        ("ABI", shown.abi.map_or_else(none, |abi| abi.to_string())),
        ("Port range", shown.port_range.clone().unwrap_or_else(none)),
        ("Node addresses", shown.node_addresses.join(", ")),
        ("Local clients", local_clients(&shown.socket_hooks)),
        ("Mappings", format!("{} ({} restricted to allowed sources)", shown.mappings, shown.restricted_mappings)),
        ("Flows", shown.flows.to_string()),
        ("Forwarding", forwarding(shown)),
        ("Guard", guard_of(shown)),
    ];
    let facts: Vec<String> = facts.iter().map(|(name, value)| format!("{name:<16}{value}\n")).collect();
    // Devices of Pods are summarized in the line on forwarding.
    let devices = shown.devices.iter().filter(|device| !device.leads_to_pods).map(|device| {
        let reason = device.reason.clone().unwrap_or_else(none);
        let (ifindex, attached) = (device.ifindex.to_string(), device.attached.join(", "));
        vec![device.name.clone(), ifindex, attached, device.requests.to_owned(), reason]
    });
    let unsupported = shown
        .unsupported_devices
        .iter()
        .map(|device| vec![device.name.clone(), device.ifindex.to_string(), none(), none(), device.reason.to_owned()]);
    let devices = table(&["DEVICE", "IFINDEX", "ATTACHED", "REQUESTS", "WHY"], devices.chain(unsupported));
    let reasons = inspection
        .reasons
        .iter()
        .map(|(reason, count)| vec![reason.name().to_owned(), count.to_string(), reason.help().to_owned()]);
    let reasons = table(&["REASON", "PACKETS", "MEANING"], reasons);
    [facts.concat(), devices, reasons].join("\n")
}

/// The number of programs of each build; two builds while an agent replaces the programs of another one.
fn programs(builds: &BTreeMap<String, Vec<String>>) -> String {
    let shown: Vec<String> = builds.iter().map(|(build, names)| format!("{} of {build}", names.len())).collect();
    shown.join(", ")
}

/// How translated packets reach Pods.
fn forwarding(shown: &Shown) -> String {
    let pods = shown.redirected_pods.len();
    if pods == 0 {
        return "host's stack".to_owned();
    }
    let devices = shown.devices.iter().filter(|device| device.leads_to_pods).count();
    let how = if shown.is_offloading { "offloaded once established," } else { "redirected" };
    format!("{how} to {pods} Pod addresses by {devices} devices; host's stack to all others")
}

/// What the nftables guard does.
fn guard_of(shown: &Shown) -> String {
    if let Some(refusal) = &shown.guard_refusal {
        return format!("nftables cannot be read: {refusal}");
    }
    let endpoints = shown.guarded_endpoints.map(|count| format!("endpoints: {count}"));
    let marks = Some(&shown.connection_marks).filter(|all| !all.is_empty());
    let does: Vec<String> =
        endpoints.into_iter().chain(marks.map(|all| format!("marks connections of {}", all.join(", ")))).collect();
    if does.is_empty() {
        return "none: see --nft-guard".to_owned();
    }
    format!("nftables table {}, {}", nft_guard::TABLE, does.join("; "))
}

/// Whether clients on the Node and in its Pods are served.
fn local_clients(hooks: &[&str]) -> String {
    if hooks.is_empty() { "not served: see --cgroup".to_owned() } else { format!("served by {}", hooks.join(", ")) }
}
