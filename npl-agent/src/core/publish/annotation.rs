// SPDX-License-Identifier: Apache-2.0
//! Encodes and decodes the mapping annotation of a Pod. For a set of entries, NPL writes one canonical form. NPL reads
//! every form that Antrea or NPL has ever written.

use std::{cmp::Reverse, collections::BTreeSet, net::IpAddr};

use serde::{Deserialize, Serialize, de::IgnoredAny};

use crate::core::model::{
    Family, Frontend, NodePort, Pod, PodPort, Protocol,
    settings::{AnnotationFormat, ProtocolPairing, Settings},
};

/// The API server's limit, in bytes, for all annotations of an object together.
const MAX_BYTES: usize = 256 * 1024;

/// One published port of a Pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The published address of the Node. The family of this address is also the family of the entry.
    pub node_ip: IpAddr,
    /// The node port that clients use.
    pub node_port: NodePort,
    /// The transport protocol of the entry.
    pub protocol: Protocol,
    /// The Pod port that receives the traffic of the node port.
    pub pod_port: PodPort,
}

impl Entry {
    const fn family(&self) -> Family {
        Family::of(self.node_ip)
    }
}

/// One entry of an annotation from any writer: an earlier agent, Antrea, a user or a Pod template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SeenEntry {
    /// The IP family of the entry.
    pub family: Family,
    /// The node port that clients use.
    pub node_port: NodePort,
    /// The transport protocol of the entry.
    pub protocol: Protocol,
    /// The Pod port that receives the traffic of the node port.
    pub pod_port: PodPort,
}

impl SeenEntry {
    /// The family, node port and protocol to which the entry directs clients.
    pub const fn frontend(&self) -> Frontend {
        Frontend { family: self.family, node_port: self.node_port, protocol: self.protocol }
    }
}

/// An annotation entry as NPL writes it, with the fields in the order of the JSON object.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Wire {
    pod_port: u16,
    #[serde(rename = "nodeIP")]
    node_ip: String,
    node_port: u16,
    /// The protocol of the entry. Absent from an entry with several protocols, as in Antrea before v1.7.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    protocol: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    protocols: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ip_family: Option<String>,
}

/// The format in which the agent writes annotation entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    /// Which fields an entry has.
    pub format: AnnotationFormat,
    /// Whether entries that differ only in the protocol are merged into one entry.
    pub pairing: ProtocolPairing,
}

impl From<AnnotationFormat> for Style {
    fn from(format: AnnotationFormat) -> Self {
        Self { format, pairing: ProtocolPairing::Separate }
    }
}

impl From<&Settings> for Style {
    fn from(settings: &Settings) -> Self {
        Self { format: settings.annotation_format, pairing: settings.protocol_pairing }
    }
}

/// Returns the annotation's value for these entries. The same set of entries, in any order, results in the same bytes.
pub fn encode(entries: &[Entry], style: impl Into<Style>) -> String {
    let mut sorted = entries.to_vec();
    // AKO up to 1.13.1 gives every pool member of a Pod the address of the annotation's last entry, so the IPv6 entries
    // come first.
    sorted.sort_by_key(|entry| (Reverse(entry.family()), entry.node_port, entry.protocol, entry.pod_port));
    let wires = wires(&sorted, style.into());
    // Serialization of integers and strings never fails. If serialization failed, an empty list would publish no wrong
    // entry.
    serde_json::to_string(&wires).unwrap_or_else(|_impossible| "[]".to_owned())
}

/// Whether an annotation's value already has exactly these entries, in any order within a family and with any white
/// space.
///
/// If the agent rewrote an equal set of entries, every reader of the annotation would get a watch event. Only the order
/// of the families matters: IPv6 entries come first.
pub fn is_right(seen: &str, entries: &[Entry], style: impl Into<Style>) -> bool {
    let Some(mut seen) = read::<Vec<Wire>>(seen) else { return false };
    let families: Vec<_> = seen.iter().map(|wire| wire.node_ip.parse().ok().map(Family::of)).collect();
    let mut right = wires(entries, style.into());
    seen.sort_unstable();
    right.sort_unstable();
    seen == right && families.is_sorted_by_key(|family| Reverse(*family))
}

/// Returns the entries that can be decoded from an annotation's value; omits malformed entries.
pub fn seen_entries(seen: &str) -> BTreeSet<SeenEntry> {
    read::<Vec<Lenient>>(seen).unwrap_or_default().into_iter().flat_map(Lenient::entries).collect()
}

/// An annotation entry with the node address to which load balancers send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PublishedEntry {
    /// The Node's address in the entry; `None` if the entry has no address.
    pub node_ip: Option<IpAddr>,
    /// The fields of the entry except the Node's address.
    pub seen: SeenEntry,
}

/// Returns the entries that can be decoded from an annotation's value, with the node addresses.
pub fn published(seen: &str) -> Vec<PublishedEntry> {
    let entries = read::<Vec<Lenient>>(seen).unwrap_or_default();
    let with_address = |entry: Lenient| {
        let node_ip = match &entry {
            Lenient::Entry(entry) => entry.node_ip,
            Lenient::Malformed(_) => None,
        };
        entry.entries().into_iter().map(move |seen| PublishedEntry { node_ip, seen })
    };
    entries.into_iter().flat_map(with_address).collect()
}

/// Returns the entries that a load balancer reads from an annotation's value, and the number of malformed elements. An
/// element is malformed if it cannot be decoded, has no node address, or has an address of another family than the
/// element names. A value that is not an array counts as one malformed element.
pub fn published_entries(seen: &str) -> (Vec<Entry>, usize) {
    let Some(elements) = read::<Vec<Lenient>>(seen) else { return (Vec::new(), 1) };
    let mut entries = Vec::new();
    let mut malformed = 0;
    for element in elements {
        let node_ip = element.node_ip();
        let seen = element.entries();
        let complete = seen.iter().filter_map(|seen| {
            let node_ip = node_ip.filter(|ip| Family::of(*ip) == seen.family)?;
            Some(Entry { node_ip, node_port: seen.node_port, protocol: seen.protocol, pod_port: seen.pod_port })
        });
        let before = entries.len();
        entries.extend(complete);
        malformed += usize::from(entries.len() == before);
    }
    (entries, malformed)
}

/// Returns the entries that can be decoded from a Pod's annotation.
pub fn named_by(pod: &Pod) -> BTreeSet<SeenEntry> {
    pod.annotation.as_deref().map(seen_entries).unwrap_or_default()
}

fn read<'a, T: Deserialize<'a>>(text: &'a str) -> Option<T> {
    // The nesting depth needs no limit here, because the JSON parser limits the depth.
    if text.len() > MAX_BYTES { None } else { serde_json::from_str(text).ok() }
}

fn wires(entries: &[Entry], style: Style) -> Vec<Wire> {
    let Style { format, pairing } = style;
    // If a value contains an IPv6 entry, load balancers need the family of each entry, so each entry names its family.
    let with_family = format == AnnotationFormat::V2_6 || entries.iter().any(|entry| entry.family() == Family::V6);
    let wire = |(entry, protocols): (Entry, BTreeSet<Protocol>)| {
        let protocols: Vec<_> = protocols.iter().map(ToString::to_string).collect();
        let is_one = protocols.len() == 1;
        Wire {
            pod_port: entry.pod_port.0,
            node_ip: entry.node_ip.to_string(),
            node_port: entry.node_port.0,
            protocol: is_one.then(|| entry.protocol.to_string()),
            protocols: (format == AnnotationFormat::V1_7 || !is_one).then_some(protocols),
            ip_family: with_family.then(|| entry.family().to_string()),
        }
    };
    merged(entries, pairing).into_iter().map(wire).collect()
}

/// Returns the entries to write, each with its protocols, in the order of their first occurrence. With
/// [`ProtocolPairing::Merged`], entries that differ only in the protocol become one entry.
fn merged(entries: &[Entry], pairing: ProtocolPairing) -> Vec<(Entry, BTreeSet<Protocol>)> {
    let mut merged: Vec<(Entry, BTreeSet<Protocol>)> = Vec::new();
    for entry in entries {
        let is_same = |(known, _): &&mut (Entry, _)| Entry { protocol: entry.protocol, ..*known } == *entry;
        match merged.iter_mut().find(is_same).filter(|_| pairing == ProtocolPairing::Merged) {
            Some((_, protocols)) => drop(protocols.insert(entry.protocol)),
            None => merged.push((*entry, BTreeSet::from([entry.protocol]))),
        }
    }
    merged
}

/// An element of the annotation's JSON array. A malformed element does not invalidate the array's remaining elements.
#[derive(Deserialize)]
#[serde(untagged)]
enum Lenient {
    Entry(LenientEntry),
    Malformed(IgnoredAny),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LenientEntry {
    pod_port: u16,
    node_port: u16,
    #[serde(rename = "nodeIP")]
    node_ip: Option<IpAddr>,
    protocol: Option<String>,
    protocols: Option<Vec<String>>,
    ip_family: Option<String>,
}

impl Lenient {
    fn node_ip(&self) -> Option<IpAddr> {
        match self {
            Self::Entry(entry) => entry.node_ip,
            Self::Malformed(_) => None,
        }
    }

    fn entries(self) -> Vec<SeenEntry> {
        match self {
            Self::Entry(entry) if entry.pod_port != 0 && entry.node_port != 0 => entry.entries(),
            Self::Entry(_) | Self::Malformed(_) => Vec::new(),
        }
    }
}

impl LenientEntry {
    /// Returns the element's entries, one for each protocol. In old formats, an element without protocols means TCP. An
    /// element without a family has the family of its node address. An element without a family and a node address
    /// means IPv4.
    fn entries(&self) -> Vec<SeenEntry> {
        let family = match self.ip_family.as_deref() {
            Some("IPv4") => Family::V4,
            Some("IPv6") => Family::V6,
            Some(_) => return Vec::new(),
            None => self.node_ip.map_or(Family::V4, Family::of),
        };
        let names = match (&self.protocol, &self.protocols) {
            (Some(protocol), _) => vec![protocol.as_str()],
            (None, Some(protocols)) => protocols.iter().map(String::as_str).collect(),
            (None, None) => vec!["tcp"],
        };
        let (node_port, pod_port) = (NodePort(self.node_port), PodPort(self.pod_port));
        let entry = |protocol| SeenEntry { family, node_port, protocol, pod_port };
        names.iter().filter_map(|name| name.parse().ok()).map(entry).collect()
    }
}

#[cfg(test)]
#[path = "../tests/annotation.rs"]
mod tests;
