// SPDX-License-Identifier: Apache-2.0
//! The data of `npl-agent status`: facts from the kernel, the state of the agent, and the verdict.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
};

use npl_common::{
    mapping::{MAX_LOCAL_ADDRESSES, MAX_MAPPINGS, MAX_SOURCE_RANGES},
    names::{
        MAP_ALLOW_V4, MAP_ALLOW_V6, MAP_MAPPING_V4, MAP_MAPPING_V6, MAP_NEXT_HOP_V4, MAP_NEXT_HOP_V6,
        MAP_NODE_ADDRESS_V4, MAP_NODE_ADDRESS_V6,
    },
    next_hop::MAX_NEXT_HOPS,
};
use serde::Serialize;

use super::{network::NetworkView, sample::Sample};
use crate::{
    core::{
        devices::{Device, DeviceSelection, choose, reply_routing::Marking, xdp::XdpReason},
        model::Family,
        verdict::{HealthFacts, HealthFinding, HealthVerdict, TableFill, findings},
        view::{AgentView, PortState, PortUsageView, RefusalView, WatchView},
    },
    datapath::{FlowTableFill, inspect::Inspection, pins::Direction, preflight},
    nft_guard::TableState,
};

/// The text that the output shows instead of the name of a device that no longer exists.
const GONE: &str = "(gone)";

/// The output of `npl-agent status`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Status {
    /// The verdict on the Node: `healthy`, `at-risk` or `cannot-tell`.
    pub(super) verdict: HealthVerdict,
    /// All findings on which the verdict is based, the worst first.
    pub(super) findings: Vec<HealthFinding>,
    /// The state of the running agent; absent if no agent runs, or if the agent's state cannot be read.
    pub(super) agent: Option<AgentSummary>,
    /// Whether an agent is running now.
    pub(super) agent_running: bool,
    /// Whether the datapath's maps are pinned.
    pub(super) installed: bool,
    /// How programs are attached to devices: `tcx` or `clsact`.
    pub(super) hooks: &'static str,
    pub(super) abi: Option<u32>,
    pub(super) port_range: Option<String>,
    pub(super) node_addresses: Vec<String>,
    pub(super) devices: Vec<AttachedDevice>,
    /// Devices through which clients may reach the Node, but whose link-layer header the programs do not support.
    pub(super) unsupported_devices: Vec<UnsupportedDevice>,
    /// The recognized CNI, policy engines and Service proxy, and programs that run before NPL's programs.
    #[serde(flatten)]
    pub(super) network: NetworkView,
    /// The addresses of Pods whose packets are redirected from device to device, bypassing the kernel stack.
    pub(super) redirected_pods: BTreeSet<IpAddr>,
    /// Whether the forwarding mode is `offload`, in which a flow is redirected only after the kernel stack has
    /// forwarded packets of the flow.
    pub(super) is_offloading: bool,
    /// The cgroup hooks to which a program of NPL is attached, such as `connect4` and `sendmsg6`.
    pub(super) socket_hooks: Vec<&'static str>,
    pub(super) mappings: usize,
    /// The number of mappings with a list of allowed sources.
    pub(super) restricted_mappings: usize,
    /// The numbers of node ports by state, and of Pods and Services that are not served as requested; absent if `agent`
    /// is absent.
    pub(super) node_ports: Option<NodePortCounts>,
    /// The numbers of used, draining, quarantined and free node ports, by protocol and IP family; empty if `agent` is
    /// absent.
    pub(super) port_usage: Vec<PortUsageView>,
    /// For the maps of mappings, allowed sources, flows, node addresses and next hops: the number of entries and the
    /// capacity.
    pub(super) tables: Vec<TableFill>,
    /// The number of established conntrack entries of NPL.
    pub(super) flows: usize,
    /// The number of Pod endpoints whose replies are exempt from masquerading; absent if the nftables table exempts
    /// none.
    pub(super) guarded_endpoints: Option<usize>,
    /// The connection marks that the nftables table sets, so that a reply leaves through the device on which its
    /// request arrived.
    pub(super) connection_marks: Vec<String>,
    /// Whether the nftables table drops forwarded IPv6 packets that forge a node address and a node port as source.
    pub(super) drops_forged_sources: bool,
    /// Why the nftables table could not be read; absent if the table was read.
    pub(super) guard_refusal: Option<String>,
    /// The names of the pinned programs, by the build to which the programs belong.
    pub(super) programs: BTreeMap<String, Vec<String>>,
    /// The number of packets by drop or pass reason, since the programs were first loaded.
    pub(super) reasons: BTreeMap<&'static str, u64>,
    /// Packets per second by drop or pass reason; absent with `--interval 0s`.
    pub(super) reasons_per_second: Option<BTreeMap<&'static str, f64>>,
    /// Traffic per second of all mappings; absent with `--interval 0s`.
    pub(super) traffic: Option<Traffic>,
}

/// The state of the running agent.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AgentSummary {
    pub(super) version: String,
    pub(super) node_name: String,
    pub(super) uptime_millis: u64,
    pub(super) is_ready: bool,
    pub(super) is_retiring: bool,
    pub(super) watches: Vec<WatchView>,
    pub(super) refusals: Vec<RefusalView>,
}

/// The numbers of the agent's node ports by state, and the number of problems.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodePortCounts {
    /// The number of node ports that a Service requests: reserved, live and published node ports.
    pub(super) wanted: usize,
    /// The number of node ports that have a mapping in the kernel: live, published and draining node ports.
    pub(super) mapped: usize,
    pub(super) published: usize,
    pub(super) draining: usize,
    pub(super) host_ports: usize,
    /// The number of problems with Pods and Services that are not served as requested.
    pub(super) refused: usize,
}

/// The traffic of all mappings, per second.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Traffic {
    pub(super) request_packets: f64,
    pub(super) reply_packets: f64,
    pub(super) new_flows: f64,
}

/// A device with programs of NPL.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AttachedDevice {
    pub(super) name: String,
    pub(super) ifindex: u32,
    /// The hooks of the device to which a program is attached, such as `ingress` and `egress`.
    pub(super) attached: Vec<&'static str>,
    /// Whether packets are redirected to Pods through this device (`--forwarding redirect` or `offload`). If this is
    /// false, the device is an uplink.
    pub(super) leads_to_pods: bool,
    /// The program that translates requests from this device: `xdp` or `tc`.
    pub(super) requests: &'static str,
    /// The reason why XDP or TC translates the requests from this device; absent until an agent has recorded the
    /// reason.
    pub(super) reason: Option<String>,
}

/// A device through which clients may reach the Node, but which the programs do not support.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct UnsupportedDevice {
    pub(super) name: String,
    pub(super) ifindex: u32,
    pub(super) reason: &'static str,
}

/// The facts from which the output of `status` is computed.
pub(super) struct Readings<'a> {
    pub(super) inspection: &'a Inspection,
    /// The numbers of entries and capacities of NPL's flow tables for IPv4 and for IPv6; `None` if NPL's maps do not
    /// exist.
    pub(super) flow_tables: Option<[[FlowTableFill; 3]; 2]>,
    pub(super) network: NetworkView,
    /// Whether an agent holds the lock that prevents a second agent.
    pub(super) agent_running: bool,
    pub(super) agent: Result<&'a AgentView, &'a str>,
    pub(super) devices: &'a [Device],
    pub(super) held: io::Result<TableState>,
    pub(super) sample: Option<Sample>,
}

impl Status {
    /// Computes the output of `npl-agent status` from these readings.
    pub(super) fn new(readings: Readings<'_>) -> Self {
        let Readings { inspection, flow_tables, network, agent_running, agent, devices, held, sample } = readings;
        let tables = table_fills(inspection, flow_tables);
        let flows = flow_tables.into_iter().flatten().flatten().map(|table| table.used).sum();
        let attached_uplinks = inspection.links.values().filter(|sides| sides.contains(&Direction::Egress)).count();
        let recent_reasons = sample.as_ref().map(|sample| sample.reasons.as_slice()).unwrap_or_default();
        let findings = findings(&HealthFacts {
            is_installed: inspection.is_installed,
            is_agent_running: agent_running,
            agent,
            attached_uplinks,
            programs_ahead: &network.programs_ahead,
            tables: &tables,
            recent_reasons,
        });
        let agent = agent.ok();
        let name = |ifindex: u32| devices.iter().find(|device| device.ifindex == ifindex).map(|it| it.name.clone());
        let leads_to_pods = |ifindex| inspection.redirected.values().any(|hop| hop.ifindex == ifindex);
        let config = inspection.config.filter(|config| config.abi != 0);
        let guard_refusal = held.as_ref().err().map(ToString::to_string);
        let held = held.unwrap_or_default();
        let marked = |it: &Marking| {
            let device = name(it.ifindex).unwrap_or_else(|| GONE.to_owned());
            format!("{} from {device}: {}", it.family, it.mark)
        };
        Self {
            verdict: HealthVerdict::of(&findings),
            findings,
            agent: agent.map(summary),
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
            network,
            redirected_pods: inspection.redirected.keys().copied().collect(),
            is_offloading: inspection.links.values().flatten().any(|side| *side == Direction::ToPods),
            socket_hooks: inspection.socket_hooks.clone(),
            mappings: inspection.mappings.len(),
            restricted_mappings: inspection.mappings.iter().filter(|it| it.sources.is_restricted()).count(),
            node_ports: agent.map(node_port_counts),
            port_usage: agent.map(|agent| agent.port_usage.clone()).unwrap_or_default(),
            tables,
            flows,
            guard_refusal,
            guarded_endpoints: held.guarded,
            connection_marks: held.markings.iter().map(marked).collect(),
            drops_forged_sources: held.drops_forged,
            programs: inspection.programs.clone(),
            reasons: inspection.reasons.iter().map(|(reason, count)| (reason.name(), *count)).collect(),
            reasons_per_second: sample.as_ref().map(Sample::reasons_per_second),
            traffic: sample.as_ref().map(Sample::traffic),
        }
    }
}

/// Returns the devices that an agent without `--devices` would choose if the programs supported their link-layer
/// headers.
fn unsupported(devices: &[Device], node_ips: &[IpAddr]) -> Vec<UnsupportedDevice> {
    let refusal = |device: &Device| {
        let reason = choose(device, &DeviceSelection::Auto, node_ips, false).err().filter(|it| it.is_unsupported())?;
        Some(UnsupportedDevice { name: device.name.clone(), ifindex: device.ifindex, reason: reason.as_str() })
    };
    devices.iter().filter_map(refusal).collect()
}

fn summary(agent: &AgentView) -> AgentSummary {
    AgentSummary {
        version: agent.version.clone(),
        node_name: agent.node_name.clone(),
        uptime_millis: agent.uptime_millis,
        is_ready: agent.is_ready,
        is_retiring: agent.is_retiring,
        watches: agent.watches.clone(),
        refusals: agent.refusals.clone(),
    }
}

fn node_port_counts(agent: &AgentView) -> NodePortCounts {
    let count = |states: &[PortState]| agent.node_ports.iter().filter(|port| states.contains(&port.state)).count();
    NodePortCounts {
        wanted: count(&[PortState::Reserved, PortState::Live, PortState::Published]),
        mapped: count(&[PortState::Live, PortState::Published, PortState::Draining]),
        published: count(&[PortState::Published]),
        draining: count(&[PortState::Draining]),
        host_ports: count(&[PortState::HostPort]),
        refused: agent.refusals.len(),
    }
}

/// Returns the number of entries and the capacity of the maps of mappings, allowed sources, flows, node addresses and
/// next hops.
fn table_fills(inspection: &Inspection, flow_tables: Option<[[FlowTableFill; 3]; 2]>) -> Vec<TableFill> {
    let fill = |map, used, capacity: u32| TableFill { map, used, capacity: capacity as usize, evicts: false };
    let of_family = |family: Family, [mapping, allow, address, next_hop]: [&'static str; 4], index: usize| {
        let mappings = || inspection.mappings.iter().filter(move |record| record.frontend.family == family);
        let is_here = |ip: &&IpAddr| Family::of(**ip) == family;
        let mut fills = vec![
            fill(mapping, mappings().count(), MAX_MAPPINGS),
            fill(allow, mappings().map(|record| record.sources.ranges().count()).sum(), MAX_SOURCE_RANGES),
        ];
        let flows = flow_tables.into_iter().flat_map(|tables| tables[index]);
        fills.extend(flows.map(|FlowTableFill { map, used, capacity }| TableFill {
            map,
            used,
            capacity,
            evicts: true,
        }));
        fills.extend([
            fill(address, inspection.local_addresses.iter().filter(is_here).count(), MAX_LOCAL_ADDRESSES),
            fill(next_hop, inspection.redirected.keys().filter(is_here).count(), MAX_NEXT_HOPS),
        ]);
        fills
    };
    let names_v4 = [MAP_MAPPING_V4, MAP_ALLOW_V4, MAP_NODE_ADDRESS_V4, MAP_NEXT_HOP_V4];
    let names_v6 = [MAP_MAPPING_V6, MAP_ALLOW_V6, MAP_NODE_ADDRESS_V6, MAP_NEXT_HOP_V6];
    [of_family(Family::V4, names_v4, 0), of_family(Family::V6, names_v6, 1)].concat()
}
