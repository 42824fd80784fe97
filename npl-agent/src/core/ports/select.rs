// SPDX-License-Identifier: Apache-2.0
//! Which ports of a Pod are wanted, by whom, and where each would be reached.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::core::{
    model::{
        ContainerPort, Family, NodePort, Pod, PodPort, Protocol, Service, ServicePort, TargetPort, settings::Settings,
        snapshot::Snapshot, sources::Sources,
    },
    publish::problem::{AffectedObject, Cause, Problem},
};

/// What one node port is for: a port of a Pod that at least one Service wants. Ordered as ports are allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct WantedPort {
    /// The Pod's port.
    pub pod_port: PodPort,
    /// Its protocol.
    pub protocol: Protocol,
    /// The family under which it is wanted.
    pub family: Family,
}

/// How a wanted port is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::core) enum Exposure {
    /// By a port of the host that leads there already: nothing to map.
    HostPort(NodePort),
    /// By a mapping to the Pod's address.
    Mapping,
    /// Not at present, for the Pod has no address of its own; it keeps the node port that it may have.
    Pending,
}

impl Exposure {
    /// Whether a node port is held for it.
    pub(in crate::core) const fn needs_claim(self) -> bool {
        matches!(self, Self::Mapping | Self::Pending)
    }
}

/// What a Pod is to have.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::core) struct Wanted {
    pub(in crate::core) ports: BTreeMap<WantedPort, Exposure>,
    /// Who may use each port that a Service leads to, also one that cannot be reached at present and whose mapping
    /// drains: whoever may by one of those Services.
    pub(in crate::core) sources: BTreeMap<WantedPort, Sources>,
    pub(in crate::core) problems: BTreeSet<Problem>,
}

/// Decides for one Pod after the other.
#[derive(Debug, Clone, Copy)]
pub(in crate::core) struct Selector<'a> {
    pub(in crate::core) settings: &'a Settings,
    pub(in crate::core) snapshot: &'a Snapshot,
    pub(in crate::core) node_ips: &'a BTreeMap<Family, IpAddr>,
}

/// What is wrong with a Service whatever its Pods are.
fn service_problems(service: &Service, settings: &Settings) -> BTreeSet<Problem> {
    let subject = || AffectedObject::Service(service.key.clone(), service.uid.clone());
    let protocols = service.ports.iter().map(|port| port.protocol);
    let unsupported = protocols.filter(|protocol| !settings.protocols.contains(protocol));
    let mut problems: BTreeSet<_> = unsupported
        .map(|protocol| Problem { subject: subject(), cause: Cause::UnsupportedProtocol { protocol } })
        .collect();
    if let Some(family) = service.families.first().copied()
        && !service.families.iter().any(|family| settings.families.contains(family))
    {
        problems.insert(Problem { subject: subject(), cause: Cause::UnsupportedFamily { family } });
    }
    let list = &service.allow_list;
    let unreadable = list.unreadable.clone().map(Cause::UnreadableSource);
    let beyond = (list.beyond > 0).then_some(Cause::TooManySources { beyond: list.beyond });
    problems.extend(unreadable.into_iter().chain(beyond).map(|cause| Problem { subject: subject(), cause }));
    problems
}

impl Selector<'_> {
    /// What the Pod is to have: the union over the Services that select it.
    pub(in crate::core) fn wanted(self, pod: &Pod) -> Wanted {
        let mut wanted = Wanted::default();
        if pod.is_finished {
            return wanted;
        }
        for service in self.snapshot.services_of(pod) {
            wanted.problems.extend(service_problems(service, self.settings));
            for port in &service.ports {
                let pod_ports = resolve(pod, port);
                wanted.allow(service, port.protocol, &pod_ports);
                if !self.settings.protocols.contains(&port.protocol) {
                    continue;
                }
                if let (true, TargetPort::Name(name)) = (pod_ports.is_empty(), &port.target) {
                    let (service, name, protocol) = (service.key.clone(), name.clone(), port.protocol);
                    wanted.blame(pod, Cause::UnresolvedTargetPort { service, name, protocol });
                }
                for family in self.families(service, pod, &mut wanted) {
                    for pod_port in &pod_ports {
                        let port = WantedPort { pod_port: *pod_port, protocol: port.protocol, family };
                        wanted.ports.insert(port, Exposure::Pending);
                    }
                }
            }
        }
        self.place(pod, &mut wanted);
        wanted
    }

    /// The address under which the Pod alone is reached.
    pub(in crate::core) fn pod_ip(self, pod: &Pod, family: Family) -> Option<IpAddr> {
        let ip = pod.ip_of(family)?;
        let is_own = pod.host_network || self.snapshot.holder(ip).is_some_and(|holder| holder.uid == pod.uid);
        (is_own && !pod.is_finished).then_some(ip)
    }

    /// The families of the Service that this Pod can be reached by. A Pod without any address may yet get each.
    fn families(self, service: &Service, pod: &Pod, wanted: &mut Wanted) -> Vec<Family> {
        let is_possible = |family: &Family| pod.ips.is_empty() || pod.ip_of(*family).is_some();
        let served = service.families.iter().filter(|family| self.settings.families.contains(family));
        let mut families = Vec::new();
        for family in served.copied().filter(is_possible) {
            if self.node_ips.contains_key(&family) {
                families.push(family);
            } else {
                wanted.blame(pod, Cause::NoNodeAddress { family });
            }
        }
        families
    }

    fn place(self, pod: &Pod, wanted: &mut Wanted) {
        let mut host_ports = BTreeSet::new();
        let mut causes = BTreeSet::new();
        for (port, exposure) in &mut wanted.ports {
            let Some(ip) = pod.ip_of(port.family) else { continue };
            let host_port = self.host_port(pod, *port).filter(|node_port| {
                // Two containers may share a hostPort under different addresses; a published port leads to one.
                host_ports.insert((*node_port, port.protocol, port.family))
            });
            if let Some(node_port) = host_port {
                *exposure = Exposure::HostPort(node_port);
                if wanted.sources.get(port).is_some_and(Sources::is_restricted) {
                    causes.insert(Cause::UnenforcedSources { node_port, protocol: port.protocol });
                }
            } else if self.pod_ip(pod, port.family).is_some() {
                *exposure = Exposure::Mapping;
            } else if let Some(holder) = self.snapshot.holder(ip) {
                causes.insert(Cause::AddressConflict { ip, holder: holder.key.clone() });
            }
        }
        for cause in causes {
            wanted.blame(pod, cause);
        }
    }

    /// The port of the Node that leads to the Pod's port without NPL.
    ///
    /// A `hostPort` bound to an address other than the published one does not: that port gets a mapping.
    fn host_port(self, pod: &Pod, port: WantedPort) -> Option<NodePort> {
        if pod.host_network {
            return Some(NodePort(port.pod_port.0));
        }
        let node_ip = self.node_ips.get(&port.family);
        let is_it = |candidate: &&ContainerPort| {
            candidate.port == port.pod_port
                && candidate.protocol == port.protocol
                && candidate.host_ip.is_none_or(|ip| Some(&ip) == node_ip)
        };
        pod.ports.iter().filter(is_it).find_map(|candidate| candidate.host_port)
    }
}

impl Wanted {
    fn allow(&mut self, service: &Service, protocol: Protocol, pod_ports: &BTreeSet<PodPort>) {
        for family in service.families.iter().copied() {
            let sources = service.allow_list.sources.of_family(family);
            for pod_port in pod_ports.iter().copied() {
                let port = WantedPort { pod_port, protocol, family };
                let all = self.sources.get(&port).map_or_else(|| sources.clone(), |others| others.or(&sources));
                self.sources.insert(port, all);
            }
        }
    }

    fn blame(&mut self, pod: &Pod, cause: Cause) {
        self.problems.insert(Problem { subject: AffectedObject::Pod(pod.key.clone(), pod.uid.clone()), cause });
    }
}

/// The Pod's ports that a Service's port leads to: one for a number, all of the name and protocol for a name.
fn resolve(pod: &Pod, port: &ServicePort) -> BTreeSet<PodPort> {
    match &port.target {
        TargetPort::Number(number) => BTreeSet::from([*number]),
        TargetPort::Name(name) => {
            let is_named = |candidate: &&ContainerPort| {
                candidate.protocol == port.protocol && candidate.name.as_ref() == Some(name)
            };
            pod.ports.iter().filter(is_named).map(|candidate| candidate.port).collect()
        }
    }
}
