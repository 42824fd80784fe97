// SPDX-License-Identifier: Apache-2.0
//! Reads the state of the Node for [`crate::core::doctor`], without changing it. If a value cannot be read, the facts
//! contain the error instead, because `npl-agent doctor` also reports which values could not be read.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::Path,
    time::Duration,
};

use npl_common::config::Config;
use tokio::time::sleep;

use super::host_ports;
use crate::{
    config::args::NodeViewArgs,
    core::{
        check::{Inconsistency, check_node},
        devices::{
            Device, DeviceSelection,
            attachments::Side,
            filter_order::{self, ProgramsAhead},
            redirect::Forwarding,
        },
        doctor::{DatapathFacts, Facts, Setting, Sysctls},
        model::settings::PortRange,
        publish::event_reason::EventReason,
        view::AgentView,
    },
    datapath::{OwnPrograms, cgroup, inspect::Inspection, is_unmitigated, pins::Direction, preflight},
    local,
    netlink::{self, TcInspection},
    nft_guard,
    process::error_chain::ErrorChain,
    process::lock,
};

/// The file with the kernel's BTF, which describes the kernel's types to the loader of eBPF programs.
const KERNEL_TYPES: &str = "/sys/kernel/btf/vmlinux";
/// The directory of kernel settings (sysctls). The settings in its directory `net` are those of the network namespace
/// of the reading process.
const SYSCTLS: &str = "/proc/sys";

/// A difference between annotations, mappings and addresses is reported only if it lasts for this time.
const SETTLE: Duration = Duration::from_secs(1);

/// Reads all facts about the Node once.
pub(super) async fn gather(args: &NodeViewArgs) -> Facts {
    let NodeViewArgs { view: args, runtime_dir } = args;
    let network = netlink::interfaces_and_routing().await.map_err(|error| ErrorChain(&error).to_string());
    let (devices, routing) = match network {
        Ok((devices, routing)) => (Ok(devices), Ok(routing)),
        Err(reason) => (Err(reason.clone()), Err(reason)),
    };
    let held = nft_guard::read_state().map_err(|error| unreadable(&error));
    let inspection = Inspection::read(&args.bpffs).map_err(|error| ErrorChain(&error).to_string());
    let datapath = inspection.as_ref().map(datapath).map_err(Clone::clone);
    let pods = datapath.as_ref().map(DatapathFacts::pods).unwrap_or_default();
    // If the Pods' routes cannot be read, the routing rules also count as unreadable. If only the routes counted as
    // unreadable, a check could report that no rule matches the Pods' devices, although these devices are unknown.
    let (routes, routing) = match netlink::routes_to(&pods).await {
        Ok(routes) => (routes, routing),
        Err(error) => (BTreeMap::new(), Err(ErrorChain(&error).to_string())),
    };
    let attached = datapath.as_ref().map(|it| it.attached_devices.clone()).unwrap_or_default();
    let order = ProgramOrder::read(&args.bpffs, &attached, devices.as_deref()).await;
    let agent = local::ask(runtime_dir).await.map_err(|error| ErrorChain(&error).to_string());
    let has_others_at_egress = order.as_ref().is_ok_and(|order| order.has_others_at_egress);
    Facts {
        kernel: preflight::kernel_facts(),
        has_btf: Path::new(KERNEL_TYPES).exists(),
        bpffs: args.bpffs.display().to_string(),
        is_bpffs_mounted: preflight::check_bpffs(&args.bpffs).is_ok(),
        rights: preflight::rights(),
        is_agent_running: lock::is_taken(&args.bpffs),
        is_confined: agent.as_ref().map(|agent| agent.is_confined).map_err(Clone::clone),
        differences: match (&agent, &inspection) {
            (Ok(agent), Ok(inspection)) => lasting(differences(agent, inspection), &args.bpffs, runtime_dir).await,
            (Err(reason), _) | (_, Err(reason)) => Err(reason.clone()),
        },
        pods_on_node_network: agent.as_ref().map(pods_on_node_network).map_err(Clone::clone),
        host_ports: match &agent {
            Ok(agent) => Ok(host_ports::test(agent).await),
            Err(reason) => Err(reason.clone()),
        },
        watches: agent.map(|agent| agent.watches),
        datapath,
        cgroup: cgroup::hierarchy().map(|path| path.display().to_string()),
        pod_devices: routes.into_iter().map(|(pod, route)| (pod, route.ifindex)).collect(),
        devices_with_fraglists: netlink::devices_with_fraglists().await.map_err(|error| ErrorChain(&error).to_string()),
        sysctls: sysctls(devices.as_deref().unwrap_or_default()),
        devices,
        routing,
        masquerading: held
            .as_ref()
            .map_err(Clone::clone)
            .and_then(|held| nft_guard::masquerading(held).map_err(|error| unreadable(&error))),
        forward_chains: nft_guard::forward_chains().map_err(|error| unreadable(&error)),
        markings: held.map(|held| held.markings),
        programs_ahead: order.map(|order| order.ahead),
        has_others_at_egress,
        rule_names: nft_guard::rule_names().map_err(|error| unreadable(&error)),
    }
}

/// Returns the Pods whose ports the agent does not publish, because the Pods are on the network of an uplink.
fn pods_on_node_network(agent: &AgentView) -> BTreeSet<String> {
    let reason = EventReason::PodOnNodeNetwork.name();
    let refused = agent.refusals.iter().filter(|refusal| refusal.reason == reason);
    refused.map(|refusal| format!("{}/{}", refusal.namespace, refusal.name)).collect()
}

/// Returns the differences between annotations, mappings and addresses.
fn differences(agent: &AgentView, inspection: &Inspection) -> BTreeSet<Inconsistency> {
    let mappings = inspection.mappings.iter().map(|mapping| (mapping.frontend, mapping.backend)).collect();
    check_node(agent, &mappings)
}

/// Returns the differences in `found` that last for [`SETTLE`]. Differences are normal for some milliseconds after a
/// change of a Pod or Service.
async fn lasting(
    found: BTreeSet<Inconsistency>,
    bpffs: &Path,
    runtime_dir: &Path,
) -> Result<BTreeSet<Inconsistency>, String> {
    if found.is_empty() {
        return Ok(found);
    }
    sleep(SETTLE).await;
    let agent = local::ask(runtime_dir).await.map_err(|error| ErrorChain(&error).to_string())?;
    let inspection = Inspection::read(bpffs).map_err(|error| ErrorChain(&error).to_string())?;
    Ok(&found & &differences(&agent, &inspection))
}

/// The order in which programs of NPL and of other software run on the devices to which NPL's programs are attached.
#[derive(Debug, Default)]
pub(super) struct ProgramOrder {
    /// By device: the programs of other software that run before NPL's programs.
    pub(super) ahead: ProgramsAhead,
    /// Whether other software has attached programs at TC egress of a device with NPL's programs.
    has_others_at_egress: bool,
}

impl ProgramOrder {
    /// Reads the order of programs on the devices in `attached`, to which NPL's programs are attached.
    pub(super) async fn read(
        bpffs: &Path,
        attached: &BTreeSet<u32>,
        devices: Result<&[Device], &String>,
    ) -> Result<Self, String> {
        let devices = devices.map_err(Clone::clone)?.iter().filter(|device| attached.contains(&device.ifindex));
        let devices: Vec<Device> = devices.cloned().collect();
        if devices.is_empty() {
            return Ok(Self::default());
        }
        let own = OwnPrograms::of(bpffs);
        let inspection = TcInspection {
            uplinks: DeviceSelection::Named(devices.iter().map(|device| device.name.clone()).collect()),
            with_pods: false,
            programs_on: Box::new(move |ifindex| own.programs_on(ifindex)),
            rule_names: None,
        };
        let attachments = netlink::attachments(&inspection).await.map_err(|error| ErrorChain(&error).to_string())?;
        let has_others_at_egress = attachments.values().any(|found| found.has_others(Side::Egress));
        Ok(Self { ahead: filter_order::programs_ahead(&devices, &attachments), has_others_at_egress })
    }
}

fn unreadable(error: &io::Error) -> String {
    format!("cannot read nftables: {error}")
}

fn datapath(inspection: &Inspection) -> DatapathFacts {
    let is_in_both = |directions: &[Direction]| {
        [Direction::Ingress, Direction::Egress].iter().all(|direction| directions.contains(direction))
    };
    let attached = inspection.links.iter().filter(|(_, directions)| is_in_both(directions));
    let mut mappings = BTreeMap::new();
    let mut pod_ports = BTreeMap::<_, BTreeSet<_>>::new();
    for mapping in &inspection.mappings {
        *mappings.entry(mapping.frontend.family).or_default() += 1;
        let port = (mapping.frontend.protocol, mapping.backend.pod_port);
        pod_ports.entry(mapping.backend.pod_ip).or_default().insert(port);
    }
    DatapathFacts {
        is_installed: inspection.is_installed,
        has_mitigated_programs: !inspection.programs.keys().all(|build| is_unmitigated(build)),
        attached_devices: attached.map(|(ifindex, _)| *ifindex).collect(),
        addresses: inspection.local_addresses.iter().copied().collect(),
        socket_hooks: inspection.socket_hooks.clone(),
        port_range: inspection.config.and_then(port_range),
        mappings,
        pod_ports,
        forwarding: forwarding(inspection),
        redirected: inspection.redirected.keys().copied().collect(),
        is_redirect_refused: inspection.is_redirect_refused,
    }
}

/// Returns the forwarding mode that currently redirects packets, `redirect` or `offload`; `None` if no packets are
/// redirected.
fn forwarding(inspection: &Inspection) -> Option<Forwarding> {
    let is_offloading = inspection.links.values().flatten().any(|direction| *direction == Direction::ToPods);
    let mode = if is_offloading { Forwarding::Offload } else { Forwarding::Redirect };
    (!inspection.redirected.is_empty()).then_some(mode)
}

/// Returns the port range that the agent wrote to the configuration map; `None` before an agent has run.
fn port_range(config: Config) -> Option<PortRange> {
    format!("{}-{}", config.port_min, config.port_max).parse().ok()
}

fn sysctls(devices: &[Device]) -> Sysctls {
    let of_each = |family: &str, name: &str| {
        let of_device = |device: &Device| setting(&format!("net/{family}/conf/{}/{name}", device.name));
        devices.iter().map(|device| (device.name.clone(), of_device(device))).collect()
    };
    Sysctls {
        ip_forward: setting("net/ipv4/ip_forward"),
        ipv4_forwarding: of_each("ipv4", "forwarding"),
        ipv6_forwarding: setting("net/ipv6/conf/all/forwarding"),
        ipv6_force_forwarding: of_each("ipv6", "force_forwarding"),
        rp_filter: setting("net/ipv4/conf/all/rp_filter"),
        rp_filters: of_each("ipv4", "rp_filter"),
        tcp_be_liberal: setting("net/netfilter/nf_conntrack_tcp_be_liberal"),
        tcp_unacknowledged: setting("net/netfilter/nf_conntrack_tcp_timeout_unacknowledged"),
        tcp_established: setting("net/netfilter/nf_conntrack_tcp_timeout_established"),
        local_ports: setting("net/ipv4/ip_local_port_range"),
        reserved_ports: setting("net/ipv4/ip_local_reserved_ports"),
    }
}

/// Reads a sysctl of the process's network namespace; `path` is relative to `/proc/sys`.
pub(super) fn setting(path: &str) -> Setting {
    let file = Path::new(SYSCTLS).join(path);
    match fs::read_to_string(&file) {
        Ok(text) => Setting::Is(text.trim().to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Setting::Missing,
        Err(error) => Setting::Unreadable(format!("read {}: {error}", file.display())),
    }
}
