// SPDX-License-Identifier: Apache-2.0
//! Decides which ports of a Pod are wanted, that is, requested by a Service, and how each wanted port is exposed.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::core::{
    devices::node_network::PodsOnNodeNetwork,
    model::{
        ContainerPort, Family, NodePort, Pod, PodPort, Protocol, Service, ServicePort, TargetPort,
        settings::{ProtocolPairing, Settings},
        snapshot::Snapshot,
        sources::Sources,
    },
    publish::annotation::SeenEntry,
    publish::problem::{AffectedObject, Cause, Problem},
};

/// A Pod port that at least one Service requests. Node ports are allocated in the sort order of this type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct WantedPort {
    /// The number of the Pod's port.
    pub pod_port: PodPort,
    /// The protocol of the Pod's port.
    pub protocol: Protocol,
    /// The IP family for which a node port is requested.
    pub family: Family,
}

/// How a wanted port is exposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::core) enum Exposure {
    /// The Pod port is exposed by a host port that leads to the Pod without NPL, so no mapping is needed.
    HostPort(NodePort),
    /// The Pod port is exposed by a mapping to the Pod's address.
    Mapping,
    /// The Pod port is not exposed at present, because the Pod has no address of its own. The node port stays reserved.
    Pending,
}

impl Exposure {
    /// Whether this kind of exposure needs a node port that NPL allocates.
    pub(in crate::core) const fn needs_claim(self) -> bool {
        matches!(self, Self::Mapping | Self::Pending)
    }
}

/// The desired exposure of a Pod's ports.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::core) struct Wanted {
    pub(in crate::core) ports: BTreeMap<WantedPort, Exposure>,
    /// Requested ports that get no exposure, because the Pod's address is on the Node's own network.
    pub(in crate::core) bypassing_node: BTreeSet<WantedPort>,
    /// The allowed sources of each requested port: the union over all Services that request the port. The map also
    /// contains ports that cannot be exposed at present, and ports whose mapping drains.
    pub(in crate::core) sources: BTreeMap<WantedPort, Sources>,
    pub(in crate::core) problems: BTreeSet<Problem>,
}

/// Selects the wanted ports of a Pod.
#[derive(Debug, Clone, Copy)]
pub(in crate::core) struct Selector<'a> {
    pub(in crate::core) settings: &'a Settings,
    pub(in crate::core) snapshot: &'a Snapshot,
    pub(in crate::core) node_ips: &'a BTreeMap<Family, IpAddr>,
    pub(in crate::core) on_node_network: &'a PodsOnNodeNetwork,
}

/// Returns the problems of a Service that do not depend on the Service's Pods.
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
    /// Returns the wanted ports of a Pod: the union over all Services that select the Pod.
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
        self.report_separate_protocols(pod, &mut wanted);
        wanted
    }

    /// Adds a problem for each Service that requests several protocols of one Pod port if these protocols get separate
    /// node ports.
    fn report_separate_protocols(self, pod: &Pod, wanted: &mut Wanted) {
        if self.settings.protocol_pairing == ProtocolPairing::Merged {
            return;
        }
        let mapped = wanted.ports.iter().filter(|(_, exposure)| exposure.needs_claim()).map(|(port, _)| *port);
        let is_separate = |port: &WantedPort| {
            let is_other = |other: &WantedPort| other.pod_port == port.pod_port && other.protocol != port.protocol;
            wanted.ports.keys().any(is_other)
        };
        let separate: BTreeSet<PodPort> = mapped.filter(is_separate).map(|port| port.pod_port).collect();
        if separate.is_empty() {
            return;
        }
        for service in self.snapshot.services_of(pod) {
            let served = service.ports.iter().filter(|port| self.settings.protocols.contains(&port.protocol));
            for pod_port in served.flat_map(|port| resolve(pod, port)).filter(|port| separate.contains(port)) {
                let subject = AffectedObject::Service(service.key.clone(), service.uid.clone());
                wanted.problems.insert(Problem { subject, cause: Cause::ProtocolsNotMerged { pod_port } });
            }
        }
    }

    /// Returns the Pod's address of the family; `None` if the Pod has finished, or if another Pod's claim to the
    /// address takes precedence.
    pub(in crate::core) fn pod_ip(self, pod: &Pod, family: Family) -> Option<IpAddr> {
        let ip = pod.ip_of(family)?;
        let is_own = pod.host_network || self.snapshot.holder(ip).is_some_and(|holder| holder.uid == pod.uid);
        (is_own && !pod.is_finished).then_some(ip)
    }

    /// Returns the families of the Service in which this Pod is exposed. A Pod that has no address yet is treated as if
    /// it had an address of each family, because it may still get these addresses.
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
                // Two containers may use the same host port on different addresses. Only one of these host ports is
                // published.
                host_ports.insert((*node_port, port.protocol, port.family))
            });
            if let Some(node_port) = host_port {
                *exposure = Exposure::HostPort(node_port);
                if wanted.sources.get(port).is_some_and(Sources::is_restricted) {
                    causes.insert(Cause::UnenforcedSources { node_port, protocol: port.protocol });
                }
            } else if let Some(device) = self.on_node_network.get(&ip) {
                causes.insert(Cause::OnNodeNetwork { ip, device: device.clone() });
                wanted.bypassing_node.insert(*port);
            } else if self.pod_ip(pod, port.family).is_some() {
                *exposure = Exposure::Mapping;
            } else if let Some(holder) = self.snapshot.holder(ip) {
                causes.insert(Cause::AddressConflict { ip, holder: holder.key.clone() });
            }
        }
        // Ports of a Pod on the Node's own network get no exposure, so that an existing mapping drains.
        // `Exposure::Pending` would keep the mapping.
        wanted.ports.retain(|port, _| !wanted.bypassing_node.contains(port));
        for cause in causes {
            wanted.blame(pod, cause);
        }
    }

    /// Returns the host port that leads to the Pod port without NPL; `None` if there is no such host port.
    ///
    /// If the `hostPort` is bound to another address than the published address, the `hostPort` does not serve the
    /// published address, so the Pod port gets a mapping.
    fn host_port(self, pod: &Pod, port: WantedPort) -> Option<NodePort> {
        let node_ip = self.node_ips.get(&port.family).copied();
        pod.host_ports(port.pod_port, port.protocol, node_ip).next()
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

/// Whether a Service that selects the Pod requests this Pod port.
pub(in crate::core) fn requests(service: &Service, pod: &Pod, port: WantedPort) -> bool {
    let leads_there =
        |spec: &ServicePort| spec.protocol == port.protocol && resolve(pod, spec).contains(&port.pod_port);
    service.families.contains(&port.family) && service.ports.iter().any(leads_there)
}

/// Whether this Service requests the Pod port of an annotation entry, and NPL assigns node ports to the Service's Pods.
pub fn requests_entry(service: &Service, pod: &Pod, entry: &SeenEntry) -> bool {
    let port = WantedPort { pod_port: entry.pod_port, protocol: entry.protocol, family: entry.family };
    service.has_labels_of(pod) && service.is_active() && requests(service, pod, port)
}

/// Returns the Pod ports that a `targetPort` selects: the number, or every container port with that name and protocol.
pub fn resolve(pod: &Pod, port: &ServicePort) -> BTreeSet<PodPort> {
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
