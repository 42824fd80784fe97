// SPDX-License-Identifier: Apache-2.0
//! The state of the agent in the form that the commands read from its local socket.
//!
//! Fields are only added, never renamed: a command of one version may read the agent of another one.

mod build;

use std::{fmt, net::IpAddr, str::FromStr};

use serde::{Deserialize, Serialize};

use super::model::{Family, Frontend, PodPort, Protocol};

/// The state of the agent. Ages and times are in milliseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AgentView {
    /// The version of the agent.
    pub version: String,
    /// The name of the Node.
    pub node_name: String,
    /// Time since the agent started.
    pub uptime_millis: u64,
    /// Whether `/readyz` succeeds.
    pub is_ready: bool,
    /// Whether the Node is being retired.
    pub is_retiring: bool,
    /// The prerequisites of the first pass that are missing.
    pub waits_for: Vec<String>,
    /// The published addresses of the Node.
    pub node_addresses: Vec<IpAddr>,
    /// `--port-range`.
    pub port_range: String,
    /// The watches of the API server.
    pub watches: Vec<WatchView>,
    /// The devices that carry the programs, and those that cannot.
    pub devices: Vec<DeviceView>,
    /// Whether clients can reach the Node by a device with the programs.
    pub reaches_clients: bool,
    /// Every held node port, and every published host port.
    pub node_ports: Vec<NodePortView>,
    /// The use of the port range.
    pub port_usage: Vec<PortUsageView>,
    /// Why requested Pod ports are not served as requested.
    pub refusals: Vec<RefusalView>,
    /// Patches of Pods without an answer of the API server.
    pub pending_patches: usize,
    /// Pods whose annotation or readiness gate is not yet as it should be.
    pub unpublished_pods: usize,
}

/// A watch of the API server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchView {
    /// `pods`, `services` or `nodes`.
    pub resource: String,
    /// Time since the last list, change or bookmark; `None` before the first list.
    pub heard_millis_ago: Option<u64>,
    /// The current failure; `None` while the watch works.
    pub failure: Option<WatchFailure>,
}

/// The failure of a watch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchFailure {
    /// For how long the watch has failed.
    pub for_millis: u64,
    /// The last error.
    pub error: String,
}

/// The agent's decision about a device by which clients may reach the Node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceView {
    /// The name of the device.
    pub name: String,
    /// Whether the device carries the programs.
    pub is_attached: bool,
    /// Why it carries them, or why it does not.
    pub reason: String,
}

/// The state of a node port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortState {
    /// Held for a Pod port, without a mapping in the kernel.
    Reserved,
    /// The mapping translates; the Pod's annotation does not name the node port yet.
    Live,
    /// The mapping translates, and the Pod's annotation names the node port.
    Published,
    /// The annotation no longer names the node port; the mapping translates until the drain ends.
    Draining,
    /// Without a mapping, and not allocated to another Pod until the quarantine ends.
    Quarantined,
    /// A `hostPort` or a port of the host network, published without a mapping.
    HostPort,
}

impl PortState {
    /// All states, in the order of a node port's life.
    pub const ALL: [Self; 6] =
        [Self::Reserved, Self::Live, Self::Published, Self::Draining, Self::Quarantined, Self::HostPort];

    /// The name in tables, filters and JSON.
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

/// The text is no state of a node port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a state of a node port: give reserved, live, published, draining, quarantined or host-port")]
pub struct UnknownState;

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A node port that the agent holds or publishes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodePortView {
    /// Family, node port and protocol.
    #[serde(flatten)]
    pub frontend: Frontend,
    /// The state.
    pub state: PortState,
    /// The namespace of the Pod; `None` if the Pod is not known.
    pub namespace: Option<String>,
    /// The name of the Pod; `None` if the Pod is not known.
    pub pod: Option<String>,
    /// The Pod's port; `None` if the Pod is not known.
    pub pod_port: Option<PodPort>,
    /// The Pod's address to which the mapping should lead; `None` while there is none.
    pub pod_ip: Option<IpAddr>,
    /// The names of the Services that request the port, in the Pod's namespace.
    pub services: Vec<String>,
    /// Time since the agent allocated the port; `None` if an earlier agent did.
    pub age_millis: Option<u64>,
    /// Time until the drain or the quarantine ends; `None` without such an end.
    pub ends_in_millis: Option<u64>,
}

/// The use of the port range by one family and protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortUsageView {
    /// The IP family.
    pub family: Family,
    /// The transport protocol.
    pub protocol: Protocol,
    /// Ports that a Service requests.
    pub used: usize,
    /// Ports that are draining.
    pub draining: usize,
    /// Ports in quarantine.
    pub quarantined: usize,
    /// Ports that no Pod holds.
    pub free: usize,
}

/// A Pod port that is not served as requested.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RefusalView {
    /// `pod` or `service`.
    pub kind: String,
    /// The namespace of the object.
    pub namespace: String,
    /// The name of the object.
    pub name: String,
    /// The reason of the Event.
    pub reason: String,
    /// Whether every requested port is served all the same.
    pub is_served: bool,
    /// What is wrong and what to do, in one sentence.
    pub text: String,
}
