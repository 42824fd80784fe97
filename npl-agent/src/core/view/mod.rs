// SPDX-License-Identifier: Apache-2.0
//! The state of the agent, in the format that commands such as `status` read from the agent's local socket.
//!
//! A new version of NPL may add fields but must not rename fields, because a command may read the state of an agent of
//! another version.

mod build;

use std::{fmt, net::IpAddr, str::FromStr};

use serde::{Deserialize, Serialize};

use super::model::{Family, Frontend, PodPort, Protocol};

/// The state of the agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AgentView {
    /// The version of the agent.
    pub version: String,
    /// The name of the Node.
    pub node_name: String,
    /// The time in milliseconds since the agent started.
    pub uptime_millis: u64,
    /// Whether the agent is ready, that is, `/readyz` succeeds.
    pub is_ready: bool,
    /// Whether the Node is being retired.
    pub is_retiring: bool,
    /// The steps that are left before the Node is retired; empty if the Node is not being retired.
    pub retirement_waits_for: Vec<String>,
    /// The prerequisites of the first pass that are not met yet.
    pub waits_for: Vec<String>,
    /// The published addresses of the Node.
    pub node_addresses: Vec<IpAddr>,
    /// The value of `--port-range`.
    pub port_range: String,
    /// The state of each watch of the API server.
    pub watches: Vec<WatchView>,
    /// Whether an admission policy restricts the agent's writes; `None` until an answer of the API server has shown
    /// whether a policy restricts the writes.
    pub is_confined: Option<bool>,
    /// The devices through which clients may reach the Node, with and without attached programs.
    pub devices: Vec<DeviceView>,
    /// Whether clients can reach the Node through a device with attached programs.
    pub reaches_clients: bool,
    /// The names of the devices that only programs of an earlier agent serve, because this agent's programs could not
    /// be attached to these devices.
    pub former_programs_on: Vec<String>,
    /// All allocated node ports, and all published host ports.
    pub node_ports: Vec<NodePortView>,
    /// The node ports that the annotations of the Node's Pods name.
    pub annotated_ports: Vec<AnnotatedPort>,
    /// The usage of the port range, by IP family and protocol.
    pub port_usage: Vec<PortUsageView>,
    /// The problems that prevent Pod ports from being served as requested.
    pub refusals: Vec<RefusalView>,
    /// The number of Pod patches that the API server has not answered yet.
    pub pending_patches: usize,
    /// The number of Pods whose annotation or readiness gate still needs a write.
    pub unpublished_pods: usize,
    /// For each Pod that still needs a write, the time in milliseconds since the write became necessary.
    pub unpublished_millis: Vec<u64>,
}

/// A watch of the API server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchView {
    /// The watched resource: `pods`, `services` or `nodes`.
    pub resource: String,
    /// The time in milliseconds since the watch last received a list, change or bookmark; `None` before the first list.
    pub heard_millis_ago: Option<u64>,
    /// The current failure of the watch; `None` while the watch works.
    pub failure: Option<WatchFailure>,
}

/// If a watch has been failing for less than this time, in milliseconds, the failure may be a brief interruption of the
/// connection.
const INTERRUPTION_MILLIS: u64 = 30_000;
/// A watch that receives no data for this time, in milliseconds, counts as a fault. A working watch is renewed every
/// four minutes, and the API server sends bookmarks in between.
const LONGEST_SILENCE_MILLIS: u64 = 360_000;

/// Whether the agent receives the changes of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchState<'a> {
    /// The watch works.
    Works,
    /// The watch has not received its first list, and no request has failed.
    NotListed,
    /// The watch has been failing for a short time.
    Interrupted(&'a WatchFailure),
    /// The watch has been failing for at least 30 s.
    Failed(&'a WatchFailure),
    /// The watch has received no data for too long.
    Silent {
        /// The time in milliseconds without data.
        millis: u64,
    },
}

impl WatchView {
    /// Returns whether the watch works.
    pub fn state(&self) -> WatchState<'_> {
        match (&self.failure, self.heard_millis_ago) {
            (Some(failure), _) if failure.for_millis >= INTERRUPTION_MILLIS => WatchState::Failed(failure),
            (Some(failure), _) => WatchState::Interrupted(failure),
            (None, Some(millis)) if millis >= LONGEST_SILENCE_MILLIS => WatchState::Silent { millis },
            (None, Some(_)) => WatchState::Works,
            (None, None) => WatchState::NotListed,
        }
    }
}

/// The failure of a watch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchFailure {
    /// The time in milliseconds for which the watch has been failing.
    pub for_millis: u64,
    /// The error of the last attempt to watch.
    pub error: String,
}

/// The agent's decision about a device through which clients may reach the Node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceView {
    /// The name of the device.
    pub name: String,
    /// Whether the programs are attached to the device.
    pub is_attached: bool,
    /// The reason why the programs are, or are not, attached to the device.
    pub reason: String,
}

/// The state of a node port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortState {
    /// The node port is allocated to a Pod port, but the kernel has no mapping to this Pod port yet.
    Reserved,
    /// The mapping translates packets; the Pod's annotation does not name the node port yet.
    Live,
    /// The mapping translates packets, and the Pod's annotation names the node port.
    Published,
    /// The agent withdraws the node port from the annotation; the mapping translates packets until the drain ends.
    Draining,
    /// The mapping of the node port is removed, or will be removed next. The node port is not allocated to another Pod
    /// until the quarantine ends.
    Quarantined,
    /// The port is a `hostPort` or a port of a Pod on the host network, and is published without a mapping.
    HostPort,
}

impl PortState {
    /// All states: first the states of an allocated node port, in the order in which a node port has these states, then
    /// the state of a host port.
    pub const ALL: [Self; 6] =
        [Self::Reserved, Self::Live, Self::Published, Self::Draining, Self::Quarantined, Self::HostPort];

    /// The name of the state in tables, filters and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Reserved => "reserved",
            Self::Live => "live",
            Self::Published => "published",
            Self::Draining => "draining",
            Self::Quarantined => "quarantined",
            Self::HostPort => "host-port",
        }
    }
}

impl FromStr for PortState {
    type Err = UnknownState;

    fn from_str(text: &str) -> Result<Self, UnknownState> {
        Self::ALL.into_iter().find(|state| state.as_str() == text).ok_or(UnknownState)
    }
}

/// The error for a text that is not the name of a node port's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a state of a node port: give reserved, live, published, draining, quarantined or host-port")]
pub struct UnknownState;

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A node port that the agent has allocated, or a published host port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodePortView {
    /// The family, node port and protocol.
    #[serde(flatten)]
    pub frontend: Frontend,
    /// The state of the node port.
    pub state: PortState,
    /// The namespace of the Pod; `None` if the Pod is not known.
    pub namespace: Option<String>,
    /// The name of the Pod; `None` if the Pod is not known.
    pub pod: Option<String>,
    /// The Pod's port; `None` if the Pod is not known.
    pub pod_port: Option<PodPort>,
    /// The Pod's address in the desired mapping; `None` if the node port is in quarantine, or while the Pod has no
    /// address of the IP family.
    pub pod_ip: Option<IpAddr>,
    /// The names of the Services, all in the Pod's namespace, that request the Pod's port.
    pub services: Vec<String>,
    /// The time in milliseconds since the agent allocated the node port; `None` for a host port, and for a node port
    /// that an earlier agent allocated.
    pub age_millis: Option<u64>,
    /// The time in milliseconds until the drain or the quarantine ends; `None` if the node port neither drains nor is
    /// in quarantine, or while an annotation still names the node port.
    pub ends_in_millis: Option<u64>,
}

/// A node port that the annotation of a Pod of this Node names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AnnotatedPort {
    /// The namespace of the Pod.
    pub namespace: String,
    /// The name of the Pod.
    pub pod: String,
    /// The address of the Node in the annotation.
    pub node_ip: IpAddr,
    /// The family, node port and protocol.
    #[serde(flatten)]
    pub frontend: Frontend,
    /// The Pod's address; `None` if the Pod has no address of the IP family.
    pub pod_ip: Option<IpAddr>,
    /// The Pod's port.
    pub pod_port: PodPort,
}

/// The usage of the port range by one family and protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortUsageView {
    /// The IP family.
    pub family: Family,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The number of node ports whose Pod port a Service requests.
    pub used: usize,
    /// The number of draining node ports.
    pub draining: usize,
    /// The number of node ports in quarantine.
    pub quarantined: usize,
    /// The number of node ports that are free to be allocated.
    pub free: usize,
}

/// A problem of a Pod or Service that is not served as requested.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RefusalView {
    /// The kind of the object: `pod` or `service`.
    pub kind: String,
    /// The namespace of the object.
    pub namespace: String,
    /// The name of the object.
    pub name: String,
    /// The `reason` of the Event about the problem.
    pub reason: String,
    /// Whether every requested port is served in spite of the problem.
    pub is_served: bool,
    /// The text about the problem and its remedy.
    pub text: String,
}
