// SPDX-License-Identifier: Apache-2.0
//! Decides which entries of a Pod's annotation the feed serves.
//!
//! Without an admission policy, users who may change a Pod can write its annotation. For this reason, the feed serves
//! an annotation entry only if the entry contains an address of the Pod's Node and a node port at which the Pod can be
//! reached.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    sync::Arc,
};

use npl_agent::core::{
    model::{self, NodePort, PodKey, Protocol, settings::PortRange},
    publish::annotation::{Entry, published_entries},
};

use super::model::{Node, Pod};

/// The reason why the feed does not serve an entry of an annotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LeftOut {
    /// The entry, or the whole annotation, does not have the documented format.
    Malformed,
    /// The Pod is not scheduled, or its Node is not in the API server's list of Nodes.
    UnknownNode,
    /// The address in the entry does not belong to the Pod's Node.
    ForeignAddress,
    /// The node port in the entry is outside `--port-range`, and is not a host port of the Pod at the entry's address.
    PortOutOfRange,
    /// The Pod is on the host network, and the node port in the entry differs from the Pod port in the entry.
    OtherPodPort,
    /// The annotation, or the Pod itself, is larger than [`bound`] permits, or the entry is not among the first
    /// [`MOST_ENTRIES`] entries of the annotation.
    Oversized,
    /// Another Pod, whose [`Claim`] takes precedence, publishes the same address, node port and protocol.
    Contested,
}

impl LeftOut {
    /// All reasons, in the order in which the metrics list them.
    pub const ALL: [Self; 7] = [
        Self::Malformed,
        Self::UnknownNode,
        Self::ForeignAddress,
        Self::PortOutOfRange,
        Self::OtherPodPort,
        Self::Oversized,
        Self::Contested,
    ];

    /// Returns the name of the reason in metric labels and log lines.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::UnknownNode => "unknown_node",
            Self::ForeignAddress => "foreign_address",
            Self::PortOutOfRange => "port_out_of_range",
            Self::OtherPodPort => "other_pod_port",
            Self::Oversized => "oversized",
            Self::Contested => "contested",
        }
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The node address, node port and protocol to which a client connects. At most one Pod can answer at a target.
pub type Target = (IpAddr, NodePort, Protocol);

/// Returns the target that an entry names.
pub const fn target(entry: &Entry) -> Target {
    (entry.node_ip, entry.node_port, entry.protocol)
}

/// The maximum number of entries that the feed serves for one Pod. An agent writes one entry for each Pod port,
/// protocol and IP family.
pub const MOST_ENTRIES: usize = 256;
/// The maximum length in bytes of an annotation. The agent's longest entry has about 150 bytes.
pub const LONGEST_ANNOTATION: usize = 160 * MOST_ENTRIES;
/// The maximum length in bytes of all labels of a Pod together.
const LONGEST_LABELS: usize = 16 * 1024;
/// The maximum number of labels of a Pod.
const MOST_LABELS: usize = 256;
/// The maximum number of container ports of a Pod.
const MOST_CONTAINER_PORTS: usize = 1024;

/// The value with which [`bound`] replaces the annotation of a Pod that exceeds a limit. No agent writes this value,
/// because it is not JSON.
const OVERSIZED: &str = "oversized";

/// Bounds the memory that a Pod takes in the feed: a malicious user may write an annotation, labels and container ports
/// of a megabyte. If one of them exceeds its limit, the feed drops all three, and serves no entry of the Pod.
pub fn bound(pod: &mut model::Pod) {
    let labels: usize = pod.labels.iter().map(|(key, value)| key.len() + value.len()).sum();
    let annotation = pod.annotation.as_ref().map_or(0, String::len);
    let is_large = annotation > LONGEST_ANNOTATION || labels > LONGEST_LABELS;
    if is_large || pod.labels.len() > MOST_LABELS || pod.ports.len() > MOST_CONTAINER_PORTS {
        pod.annotation = pod.annotation.as_ref().map(|_| OVERSIZED.to_owned());
        pod.labels = BTreeMap::new();
        pod.ports = Vec::new();
    }
}

/// Returns the entries that the feed serves for the Pod, without duplicates, and the number of left-out entries by
/// reason.
pub fn of_pod(pod: &Pod, node: Option<&Node>, range: PortRange) -> (Vec<Entry>, BTreeMap<LeftOut, usize>) {
    let mut left_out = BTreeMap::new();
    let Some(text) = pod.object.annotation.as_deref().filter(|_| !pod.object.is_finished) else {
        return (Vec::new(), left_out);
    };
    if text == OVERSIZED || text.len() > LONGEST_ANNOTATION {
        left_out.insert(LeftOut::Oversized, 1);
        return (Vec::new(), left_out);
    }
    let (mut entries, malformed) = published_entries(text);
    if entries.len() > MOST_ENTRIES {
        left_out.insert(LeftOut::Oversized, entries.len() - MOST_ENTRIES);
        entries.truncate(MOST_ENTRIES);
    }
    if malformed > 0 {
        left_out.insert(LeftOut::Malformed, malformed);
    }
    let mut targets = BTreeSet::new();
    let mut served = Vec::new();
    for entry in entries {
        match refusal(pod, node, range, &entry) {
            None if targets.insert(target(&entry)) => served.push(entry),
            None => {}
            Some(reason) => *left_out.entry(reason).or_default() += 1,
        }
    }
    served.shrink_to_fit();
    (served, left_out)
}

fn refusal(pod: &Pod, node: Option<&Node>, range: PortRange, entry: &Entry) -> Option<LeftOut> {
    let Some(node) = node else { return Some(LeftOut::UnknownNode) };
    let mut addresses = node.object.internal_ips.iter().chain(&node.object.external_ips);
    if !addresses.any(|ip| *ip == entry.node_ip) {
        return Some(LeftOut::ForeignAddress);
    }
    let mut host_ports = pod.object.host_ports(entry.pod_port, entry.protocol, Some(entry.node_ip));
    if host_ports.any(|port| port == entry.node_port) {
        None
    } else if pod.object.host_network {
        Some(LeftOut::OtherPodPort)
    } else {
        (!range.contains(entry.node_port)).then_some(LeftOut::PortOutOfRange)
    }
}

/// A Pod's claim to a target. If several Pods claim a target, the lowest claim takes precedence. A Pod whose annotation
/// was last written by an agent has a lower claim than a Pod whose annotation was last written by another client. If
/// both annotations were written by an agent, or both by other clients, the older Pod has the lower claim. Of Pods of
/// the same age, the Pod whose key (namespace and name) sorts first has the lower claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim {
    is_foreign: bool,
    created: i64,
    pod: PodKey,
}

impl Claim {
    /// Creates the claim of a Pod, which is the same for all targets of the Pod.
    pub fn of(pod: &Pod) -> Self {
        Self { is_foreign: pod.object.annotation_manager.is_some(), created: pod.created, pod: pod.object.key.clone() }
    }
}

/// By target: all claims, beginning with the claim that takes precedence. The claims are in a `Vec`, because nearly all
/// targets have only one claim, and a `BTreeSet` would allocate memory for eleven claims.
#[derive(Debug, Clone, Default)]
pub struct Claims(BTreeMap<Target, Vec<Claim>>);

impl Claims {
    /// Adds a Pod's claim to a target.
    pub fn add(&mut self, target: Target, claim: Claim) {
        let claims = self.0.entry(target).or_insert_with(|| Vec::with_capacity(1));
        if let Err(place) = claims.binary_search(&claim) {
            claims.insert(place, claim);
        }
    }

    /// Removes a Pod's claim to a target.
    pub fn remove(&mut self, target: &Target, claim: &Claim) {
        if let Some(claims) = self.0.get_mut(target) {
            if let Ok(place) = claims.binary_search(claim) {
                claims.remove(place);
            }
            if claims.is_empty() {
                self.0.remove(target);
            }
        }
    }

    /// Returns whether the Pod's claim to the target takes precedence over all claims of other Pods.
    pub fn is_held_by(&self, target: &Target, pod: &PodKey) -> bool {
        self.0.get(target).and_then(|claims| claims.first()).is_some_and(|best| best.pod == *pod)
    }

    /// Returns whether any Pod claims the target.
    pub fn has(&self, target: &Target) -> bool {
        self.0.contains_key(target)
    }

    /// If the Pod's claim to the target takes precedence, returns the Pod with the next claim: this other Pod would
    /// hold the target without the given Pod. A change of the given Pod does not affect Pods with later claims.
    pub fn displaced_by(&self, target: &Target, pod: &PodKey) -> Option<&PodKey> {
        match self.0.get(target).map(Vec::as_slice) {
            Some([first, second, ..]) if first.pod == *pod => Some(&second.pod),
            _ => None,
        }
    }
}

/// An annotation entry that the agent has withdrawn. During `--drain`, the entry's mapping still translates packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Withdrawn {
    /// The entry that the annotation contained.
    pub entry: Entry,
    /// The end of the drain, in milliseconds of the monotonic clock.
    pub until: u64,
}

/// A Pod with the annotation entries that the feed serves.
#[derive(Debug, Clone)]
pub struct Served {
    /// The Pod's fields that the feed reads, as last received from the API server.
    pub pod: Pod,
    /// The name and the zone of the Pod's Node. The name is empty if the Pod is not scheduled; the zone is empty if the
    /// Node is unknown or has no zone.
    pub place: (Arc<str>, Arc<str>),
    /// The annotation entries that the feed serves, unless another Pod's claim takes precedence.
    pub entries: Vec<Entry>,
    /// The withdrawn entries that are draining.
    pub withdrawn: Vec<Withdrawn>,
    /// The number of left-out entries by reason. Entries that are left out because of another Pod's claim are not
    /// counted here.
    pub left_out: BTreeMap<LeftOut, usize>,
}

impl Served {
    /// Reads the entries in a Pod's annotation, and returns the Pod with the entries that the feed serves.
    pub fn new(pod: Pod, node: Option<&Node>, range: PortRange) -> Self {
        let (entries, left_out) = of_pod(&pod, node, range);
        let zone = node.map(|node| Arc::clone(&node.zone)).unwrap_or_default();
        let place = (pod.node.clone().unwrap_or_default(), zone);
        Self { pod, place, entries, withdrawn: Vec::new(), left_out }
    }

    /// Returns whether the feed keeps the Pod in its state: the Pod has the annotation, or has withdrawn entries that
    /// are draining.
    pub const fn is_kept(&self) -> bool {
        self.pod.object.annotation.is_some() || !self.withdrawn.is_empty()
    }
}
