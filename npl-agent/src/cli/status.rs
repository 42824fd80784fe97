// SPDX-License-Identifier: Apache-2.0
//! `npl-agent status`: whether the datapath is installed, where its programs are attached, and what they have counted.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
};

use serde::Serialize;

use super::{facts, print, print_json, table};
use crate::{
    config::args::{OutputFormat, ViewArgs},
    core::{
        devices::{
            Device, DeviceSelection, choose, filter_order::ProgramsAhead, reply_routing::Marking, xdp::XdpReason,
        },
        doctor::networks,
    },
    datapath::{inspect::Inspection, pins::Direction, preflight},
    netlink,
    nft_guard::{self, TableState},
    process::lock,
};

/// Shown instead of the name of a device that was removed.
const GONE: &str = "(gone)";

/// The output of the command.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    /// Whether an agent is running now.
    agent_running: bool,
    /// Whether the datapath's maps are pinned.
    installed: bool,
    /// `tcx` or `clsact`.
    hooks: &'static str,
    abi: Option<u32>,
    port_range: Option<String>,
    node_addresses: Vec<String>,
    devices: Vec<AttachedDevice>,
    /// Devices that clients may use, but whose link-layer header the programs do not support.
    unsupported_devices: Vec<UnsupportedDevice>,
    /// The CNI, the policy engines and the Service proxy that were recognized.
    networks: Vec<RecognizedNetwork>,
    /// Whether `--forwarding redirect` is refused because redirected packets would bypass a policy engine.
    redirect_refused: bool,
    /// Programs of other software that run ahead of NPL's, by device: if one of them ends the chain, clients are refused.
    programs_ahead: ProgramsAhead,
    /// Why the programs of other software cannot be listed; absent if they can.
    programs_ahead_refusal: Option<String>,
    /// Addresses of Pods whose packets are redirected between devices and bypass the kernel stack.
    redirected_pods: BTreeSet<IpAddr>,
    /// Whether a flow is redirected only after the kernel stack has forwarded packets of it.
    is_offloading: bool,
    /// Cgroup hooks with a program of NPL: `connect4`, `sendmsg6`, ….
    socket_hooks: Vec<&'static str>,
    mappings: usize,
    /// Mappings with a list of allowed sources.
    restricted_mappings: usize,
    /// Established conntrack entries of NPL.
    flows: usize,
    /// Pod endpoints whose replies are exempt from masquerading; absent if the nftables table does not exempt any.
    guarded_endpoints: Option<usize>,
    /// The connection marks that the nftables table sets, so that replies leave through the device of their request.
    connection_marks: Vec<String>,
    /// Why nftables cannot be read; absent if it can.
    guard_refusal: Option<String>,
    /// The names of the pinned programs, by build.
    programs: BTreeMap<String, Vec<String>>,
    /// Packets by reason.
    reasons: BTreeMap<&'static str, u64>,
}

/// A device with programs of NPL.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct AttachedDevice {
    name: String,
    ifindex: u32,
    /// The hooks with a program: `ingress`, `egress`, ….
    attached: Vec<&'static str>,
    /// Whether the device is the next hop of redirected Pods. Other devices are uplinks, which clients use.
    leads_to_pods: bool,
    /// The program that translates requests from this device: `xdp` or `tc`.
    requests: &'static str,
    /// Why XDP or TC translates them; absent until an agent has recorded it.
    reason: Option<String>,
}

/// Software that provides a part of the Node's network.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RecognizedNetwork {
    /// `CNI`, `policy engine` or `Service proxy`.
    role: &'static str,
    name: &'static str,
}

/// A device whose clients are not served.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct UnsupportedDevice {
    name: String,
    ifindex: u32,
    reason: &'static str,
}

/// Prints the state of the datapath, read from the kernel. No agent needs to run.
///
/// # Errors
///
/// If the maps or the devices cannot be read, or standard output cannot be written.
pub async fn show(args: &ViewArgs) -> anyhow::Result<()> {
    let inspection = Inspection::read(&args.bpffs)?;
    let devices = netlink::interfaces().await?;
    let is_running = lock::is_taken(&args.bpffs);
    let uplinks = inspection.links.iter().filter(|(_, directions)| directions.contains(&Direction::Egress));
    let uplinks = uplinks.map(|(ifindex, _)| *ifindex).collect();
    let order = facts::ProgramOrder::read(&args.bpffs, &uplinks, Ok(&devices)).await;
    let ahead = order.map(|order| order.ahead);
    let mut status = Status::new(&inspection, is_running, &devices, nft_guard::read_state(), ahead);
    status.networks = recognized(&devices);
    match args.output {
        OutputFormat::Json => print_json(&status),
        OutputFormat::Table => print(&as_text(&status, &inspection)),
    }
}

impl Status {
    fn new(
        inspection: &Inspection,
        agent_running: bool,
        devices: &[Device],
        held: io::Result<TableState>,
        ahead: Result<ProgramsAhead, String>,
    ) -> Self {
        let name = |ifindex: u32| devices.iter().find(|device| device.ifindex == ifindex).map(|it| it.name.clone());
        let leads_to_pods = |ifindex| inspection.redirected.values().any(|hop| hop.ifindex == ifindex);
        let config = inspection.config.filter(|config| config.abi != 0);
        let guard_refusal = held.as_ref().err().map(ToString::to_string);
        let held = held.unwrap_or_default();
        let (programs_ahead, programs_ahead_refusal) = match ahead {
            Ok(ahead) => (ahead, None),
            Err(reason) => (ProgramsAhead::new(), Some(reason)),
        };
        let marked = |it: &Marking| {
            let device = name(it.ifindex).unwrap_or_else(|| GONE.to_owned());
            format!("{} from {device}: {}", it.family, it.mark)
        };
        Self {
            agent_running,
            installed: inspection.is_installed,
            hooks: if preflight::has_tcx() { "tcx" } else { "clsact" },
            abi: config.map(|config| config.abi),
            port_range: config.map(|config| format!("{}-{}", config.port_min, config.port_max)),
            node_addresses: inspection.local_addresses.iter().map(ToString::to_string).collect(),
            devices: inspection
                .links
                .iter()
                .map(|(ifindex, directions)| AttachedDevice {
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
            networks: Vec::new(),
            redirect_refused: inspection.is_redirect_refused,
            programs_ahead,
            programs_ahead_refusal,
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

/// The software that the Node's devices and rules show. Rules that cannot be read show none: doctor reports the reason.
fn recognized(devices: &[Device]) -> Vec<RecognizedNetwork> {
    let rules = nft_guard::rule_names().unwrap_or_default();
    let found = networks::recognize(devices, &rules);
    found.map(|network| RecognizedNetwork { role: network.role.names().1, name: network.name }).collect()
}

/// Devices that an agent without `--devices` would choose if the programs supported their link-layer header.
fn unsupported(devices: &[Device], node_ips: &[IpAddr]) -> Vec<UnsupportedDevice> {
    let refusal = |device: &Device| {
        let reason = choose(device, &DeviceSelection::Auto, node_ips, false).err().filter(|it| it.is_unsupported())?;
        Some(UnsupportedDevice { name: device.name.clone(), ifindex: device.ifindex, reason: reason.as_str() })
    };
    devices.iter().filter_map(refusal).collect()
}

fn as_text(status: &Status, inspection: &Inspection) -> String {
    if !status.installed {
        return "NPL is not installed: no agent has run on this Node, or `npl-agent cleanup` has removed its state.\n"
            .to_owned();
    }
    let none = || "-".to_owned();
    let agent = if status.agent_running { "running" } else { "not running; existing mappings are still served" };
    let facts = [
        ("Agent", agent.to_owned()),
        ("Hooks", status.hooks.to_owned()),
        ("Programs", programs(&status.programs)),
        ("ABI", status.abi.map_or_else(none, |abi| abi.to_string())),
        ("Port range", status.port_range.clone().unwrap_or_else(none)),
        ("Node addresses", status.node_addresses.join(", ")),
        ("Local clients", local_clients(&status.socket_hooks)),
        ("Mappings", format!("{} ({} for allowed sources only)", status.mappings, status.restricted_mappings)),
        ("Flows", status.flows.to_string()),
        ("Forwarding", forwarding(status)),
        ("Guard", guard_of(status)),
        ("Program order", program_order(status)),
        ("Network", networks_of(status)),
    ];
    let facts: Vec<String> = facts.iter().map(|(name, value)| format!("{name:<16}{value}\n")).collect();
    // A Node has as many Pod devices as Pods. The Forwarding line gives their number.
    let devices = status.devices.iter().filter(|device| !device.leads_to_pods).map(|device| {
        let reason = device.reason.clone().unwrap_or_else(none);
        let (ifindex, attached) = (device.ifindex.to_string(), device.attached.join(", "));
        vec![device.name.clone(), ifindex, attached, device.requests.to_owned(), reason]
    });
    let unsupported = status
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

/// The number of programs of each build. Two builds are present while an agent replaces the programs of another build.
fn programs(builds: &BTreeMap<String, Vec<String>>) -> String {
    let shown: Vec<String> = builds.iter().map(|(build, names)| format!("{} of {build}", names.len())).collect();
    shown.join(", ")
}

/// How translated packets reach the Pods.
fn forwarding(status: &Status) -> String {
    if status.redirect_refused {
        return "through the kernel stack: --forwarding redirect is refused, because redirected packets would bypass \
                NetworkPolicy; see --ignore-network-policy"
            .to_owned();
    }
    let pods = status.redirected_pods.len();
    if pods == 0 {
        return "through the kernel stack".to_owned();
    }
    let devices = status.devices.iter().filter(|device| device.leads_to_pods).count();
    let how = if status.is_offloading { "offloaded once established," } else { "redirected" };
    format!("{how} to {pods} Pod addresses through {devices} devices; through the kernel stack to all others")
}

/// Functions of the nftables table: exempting replies from masquerading, and marking connections for reply routing.
fn guard_of(status: &Status) -> String {
    if let Some(refusal) = &status.guard_refusal {
        return format!("cannot read nftables: {refusal}");
    }
    let exemptions =
        status.guarded_endpoints.map(|count| format!("exempts replies of {count} Pod endpoints from masquerading"));
    let marks = Some(&status.connection_marks).filter(|all| !all.is_empty());
    let marks = marks.map(|all| format!("marks connections ({})", all.join(", ")));
    let effects: Vec<String> = exemptions.into_iter().chain(marks).collect();
    if effects.is_empty() {
        return "no nftables table: see --nft-guard".to_owned();
    }
    format!("nftables table {}: {}", nft_guard::TABLE, effects.join("; "))
}

/// The recognized software.
fn networks_of(status: &Status) -> String {
    let shown: Vec<String> =
        status.networks.iter().map(|network| format!("{} ({})", network.name, network.role)).collect();
    if shown.is_empty() { "no known CNI, policy engine or Service proxy".to_owned() } else { shown.join(", ") }
}

/// Whether NPL's programs run first.
fn program_order(status: &Status) -> String {
    if let Some(refusal) = &status.programs_ahead_refusal {
        return format!("cannot list programs: {refusal}");
    }
    if status.programs_ahead.is_empty() {
        return "NPL's programs run first".to_owned();
    }
    let shown = status.programs_ahead.iter().map(|(device, programs)| {
        format!("{device}: {}", programs.iter().map(String::as_str).collect::<Vec<_>>().join(", "))
    });
    format!("FAILED, programs of other software run ahead of NPL's: {}", shown.collect::<Vec<_>>().join("; "))
}

/// How clients on the Node itself and in its Pods are served.
fn local_clients(hooks: &[&str]) -> String {
    if hooks.is_empty() { "not served: see --cgroup".to_owned() } else { format!("served by {}", hooks.join(", ")) }
}
