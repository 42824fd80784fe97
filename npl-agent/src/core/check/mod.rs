// SPDX-License-Identifier: Apache-2.0
//! Compares the annotations of all Pods with the Services that request node ports, and with the addresses of the Nodes.
//! `kubectl npl check` prints the differences.

mod node;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use serde::Serialize;

pub use self::node::check_node;
use super::{
    model::{Family, NodePort, Pod, Protocol, Service},
    pages,
    ports::select::{WantedPort, requests, resolve},
    publish::annotation::{self, PublishedEntry},
};

/// The Pods, Services and Nodes of a cluster, as far as the comparison needs them.
#[derive(Debug, Default)]
pub struct Cluster {
    /// Every Pod of the cluster, with the name of the Pod's Node; `None` if the Pod is not scheduled yet.
    pub pods: Vec<(Pod, Option<String>)>,
    /// Every Service of the cluster.
    pub services: Vec<Service>,
    /// The addresses of every Node, by the Node's name.
    pub nodes: BTreeMap<String, BTreeSet<IpAddr>>,
}

/// The kind of a difference between annotations, objects of the cluster and the kernel's mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A Service requests a port of the Pod that the Pod's annotation does not name.
    Missing,
    /// The annotation names a port of the Pod that no Service requests.
    Stale,
    /// The annotation names an address that the Pod's Node does not have.
    WrongAddress,
    /// The annotations of two or more Pods name the same node address, node port and protocol.
    Duplicate,
    /// The value of the Pod's annotation cannot be decoded.
    Unreadable,
    /// The annotation names a node port that the kernel does not map to the Pod's port.
    NotMapped,
    /// The kernel maps a node port that belongs to no Pod of the Node.
    Unowned,
}

impl Kind {
    /// The name of this kind of inconsistency in tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Stale => "stale",
            Self::WrongAddress => "wrong-address",
            Self::Duplicate => "duplicate",
            Self::Unreadable => "unreadable",
            Self::NotMapped => "not-mapped",
            Self::Unowned => "unowned",
        }
    }
}

/// A difference between annotations, objects of the cluster and the kernel's mappings.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Inconsistency {
    /// The kind of the inconsistency.
    pub kind: Kind,
    /// The namespace of the Pod; empty for [`Kind::Unowned`].
    pub namespace: String,
    /// The name of the Pod; empty for [`Kind::Unowned`].
    pub pod: String,
    /// The Node of the Pod or of the mapping.
    pub node: String,
    /// The description of the inconsistency, one sentence.
    pub text: String,
    /// The documentation section about this kind of inconsistency: file and anchor.
    pub page: &'static str,
}

/// A node address, node port and protocol.
type Address = (IpAddr, NodePort, Protocol);

/// Compares the annotations of all Pods that have a Node and have not finished. Sorts the inconsistencies by kind and
/// Pod.
pub fn check(cluster: &Cluster) -> BTreeSet<Inconsistency> {
    let mut found = BTreeSet::new();
    let mut named: BTreeMap<Address, Vec<PodOnNode<'_>>> = BTreeMap::new();
    for (pod, node) in &cluster.pods {
        let Some(node) = node.as_deref().filter(|_| !pod.is_finished) else { continue };
        let subject = PodOnNode { pod, node };
        let entries = pod.annotation.as_deref().map(annotation::published).unwrap_or_default();
        for entry in &entries {
            let Some(ip) = entry.node_ip else { continue };
            named.entry((ip, entry.seen.node_port, entry.seen.protocol)).or_default().push(subject);
        }
        found.extend(check_pod(cluster, subject, &entries));
    }
    for ((ip, node_port, protocol), subjects) in named {
        let pods: BTreeSet<String> = subjects.iter().map(|subject| subject.pod.key.to_string()).collect();
        if pods.len() > 1 {
            let names: Vec<String> = pods.into_iter().collect();
            let text = format!("the annotations of {} all name {ip} port {node_port}/{protocol}", names.join(" and "));
            found.extend(subjects.iter().map(|it| it.inconsistency(Kind::Duplicate, text.clone(), pages::DIFFERENCE)));
        }
    }
    found
}

/// A Pod and the name of its Node.
#[derive(Debug, Clone, Copy)]
struct PodOnNode<'a> {
    pod: &'a Pod,
    node: &'a str,
}

impl PodOnNode<'_> {
    fn inconsistency(self, kind: Kind, text: String, page: &'static str) -> Inconsistency {
        let key = &self.pod.key;
        let (namespace, pod) = (key.namespace.to_string(), key.name.to_string());
        Inconsistency { kind, namespace, pod, node: self.node.to_owned(), text, page }
    }
}

fn check_pod(cluster: &Cluster, subject: PodOnNode<'_>, entries: &[PublishedEntry]) -> Vec<Inconsistency> {
    let PodOnNode { pod, node } = subject;
    let mut found = Vec::new();
    let text = pod.annotation.as_deref().unwrap_or("[]");
    if entries.is_empty() && text.trim() != "[]" {
        let text = "the annotation cannot be decoded".to_owned();
        found.push(subject.inconsistency(Kind::Unreadable, text, pages::DIFFERENCE));
    }
    let none = BTreeSet::new();
    let addresses = cluster.nodes.get(node).unwrap_or(&none);
    for entry in entries {
        if let Some(text) = entry.node_ip.and_then(|ip| wrong_address(ip, node, addresses)) {
            found.push(subject.inconsistency(Kind::WrongAddress, text, pages::DIFFERENCE));
        }
    }
    let services: Vec<&Service> =
        cluster.services.iter().filter(|service| service.is_active() && service.has_labels_of(pod)).collect();
    let names = |port: &WantedPort| {
        entries.iter().any(|entry| {
            let seen = entry.seen;
            (seen.pod_port, seen.protocol, seen.family) == (port.pod_port, port.protocol, port.family)
        })
    };
    if !pod.is_terminating {
        let stale = entries.iter().map(|entry| entry.seen).filter(|seen| {
            let port = WantedPort { pod_port: seen.pod_port, protocol: seen.protocol, family: seen.family };
            !services.iter().any(|service| requests(service, pod, port))
        });
        found.extend(stale.map(|seen| {
            let text = format!(
                "the annotation names node port {} for Pod port {}/{} {}, which no enabled Service requests",
                seen.node_port, seen.pod_port, seen.protocol, seen.family
            );
            subject.inconsistency(Kind::Stale, text, pages::DIFFERENCE)
        }));
        let missing = wanted(&services, pod, addresses).into_iter().filter(|port| !names(port));
        found.extend(missing.map(|WantedPort { pod_port, protocol, family }| {
            let text = format!("the annotation names no node port for Pod port {pod_port}/{protocol} {family}");
            subject.inconsistency(Kind::Missing, text, pages::NO_ANNOTATION)
        }));
    }
    found
}

/// Describes an address of an annotation that the Node does not have; `None` if the Node has the address.
fn wrong_address(ip: IpAddr, node: &str, addresses: &BTreeSet<IpAddr>) -> Option<String> {
    (!addresses.contains(&ip)).then(|| format!("the annotation names address {ip}, which Node {node} does not list"))
}

/// The Pod ports that the annotation should name, for each IP family in which Pod and Node both have an address. SCTP
/// ports are left out: agents serve SCTP only if `--protocols` names SCTP, so an annotation without the SCTP port may
/// be correct.
fn wanted(services: &[&Service], pod: &Pod, addresses: &BTreeSet<IpAddr>) -> BTreeSet<WantedPort> {
    let has_family =
        |family: &Family| pod.ip_of(*family).is_some() && addresses.iter().any(|ip| Family::of(*ip) == *family);
    let mut wanted = BTreeSet::new();
    for service in services {
        let ports = service.ports.iter().filter(|port| port.protocol != Protocol::Sctp);
        for (port, family) in ports.flat_map(|port| service.families.iter().map(move |family| (port, *family))) {
            let pod_ports = resolve(pod, port).into_iter().filter(|_| has_family(&family));
            wanted.extend(pod_ports.map(|pod_port| WantedPort { pod_port, protocol: port.protocol, family }));
        }
    }
    wanted
}
