// SPDX-License-Identifier: Apache-2.0
//! Builds the chains of a Pod: one for each Pod port that a Service requests.

use std::{collections::BTreeSet, net::IpAddr};

use super::{Chain, Link, LinkReport, outside_of_namespaces};
use crate::core::{
    model::{Frontend, Gate, Pod, PodKey, PodPort, Service, ServiceKey, TargetPort},
    pages,
    ports::select::{Exposure, WantedPort, requests},
    publish::{
        problem::{Cause, Problem},
        request_problem::RequestProblem,
    },
    state::PlannerState,
    view::AgentView,
};

/// The finding if the programs are attached to no uplink.
const NO_UPLINK: &str =
    "no device through which clients reach the Node has the programs: name the uplinks with --devices";

/// Returns the chains of a Pod. If a port or Service is given, the result contains only the chains of that port or
/// Service.
pub(super) fn chains(
    state: &PlannerState,
    view: &AgentView,
    key: &PodKey,
    only_port: Option<PodPort>,
    only_service: Option<&ServiceKey>,
) -> Vec<Chain> {
    let common = common_links(state, view, key);
    let pod = state.snapshot.pod(key).filter(|_| common.iter().all(|link| link.page.is_none()));
    let Some(pod) = pod else { return vec![Chain { subject: format!("pod {key}"), frontend: None, links: common }] };
    let facts = PodFacts { state, view, pod };
    let services = || {
        let all = state.snapshot.services_of(pod);
        all.filter(|service| only_service.is_none_or(|key| service.key == *key))
    };
    let is_asked_for = |port: &WantedPort| {
        only_port.is_none_or(|asked| port.pod_port == asked) && services().any(|service| requests(service, pod, *port))
    };
    let wanted = state.views.get(key).map(|view| &view.wanted);
    let ports: BTreeSet<WantedPort> =
        wanted.into_iter().flat_map(|wanted| wanted.ports.keys().chain(&wanted.bypassing_node)).copied().collect();
    let asked_for = ports.into_iter().filter(is_asked_for);
    let mut chains: Vec<Chain> = asked_for.map(|port| facts.chain(common.clone(), port)).collect();
    let addresses: Vec<String> = pod.ips.iter().map(ToString::to_string).collect();
    let common = [common, vec![LinkReport::ok(Link::Address, addresses.join(", "))]].concat();
    chains.extend(services().flat_map(|service| facts.unresolved(&common, service, only_port)));
    if chains.is_empty() {
        let port = only_port.map_or_else(|| "any port".to_owned(), |port| format!("port {port}"));
        let text = format!(
            "no Service that selects the Pod requests {port} in an IP family that Service and Pod have in common"
        );
        let links = [common, vec![LinkReport::broken(Link::PortResolved, text, pages::NO_ANNOTATION)]].concat();
        chains.push(Chain { subject: format!("pod {key}"), frontend: None, links });
    }
    chains
}

/// Returns the links that do not depend on a port, up to the first broken link.
fn common_links(state: &PlannerState, view: &AgentView, key: &PodKey) -> Vec<LinkReport> {
    let mut links = Vec::new();
    let missing = state.missing_prerequisites();
    if let Some(missing) = missing.first() {
        let text = format!("the agent waits for {missing}, and publishes no node port until then");
        return vec![LinkReport::broken(Link::Agent, text, pages::NOT_READY)];
    }
    if state.is_retiring() {
        let text = "the Node is being retired (NPL_RETIRE), so no node port is published";
        return vec![LinkReport::broken(Link::Agent, text, pages::NO_ANNOTATION)];
    }
    if !state.is_adopted && !view.reaches_clients {
        let text = format!("{NO_UPLINK}; the agent publishes no node port until then");
        return vec![LinkReport::broken(Link::Device, text, pages::DOCTOR)];
    }
    let Some(pod) = state.snapshot.pod(key) else {
        let text = "the agent of this Node does not know this Pod: the Pod runs on another Node, or does not exist";
        return vec![LinkReport::broken(Link::Pod, text, pages::NO_ANNOTATION)];
    };
    if pod.is_finished {
        let text = "the Pod has finished, and a finished Pod has no node port";
        return vec![LinkReport::broken(Link::Pod, text, pages::NO_ANNOTATION)];
    }
    if let Some(outside) = outside_of_namespaces(state, &key.namespace) {
        return vec![outside];
    }
    let services: Vec<&Service> = state.snapshot.services_of(pod).collect();
    let enabled: Vec<&Service> = state.snapshot.services_in(&key.namespace).collect();
    if enabled.is_empty() {
        let text = format!(
            "no Service in namespace {} is enabled: an enabled Service has the annotation DOMAIN/enabled with exactly the \
             value \"true\", the type ClusterIP or LoadBalancer, a selector that is not empty, and labels that match \
             --service-selector if this flag is set",
            key.namespace
        );
        return vec![LinkReport::broken(Link::Enabled, text, pages::NO_ANNOTATION)];
    }
    links.push(LinkReport::ok(Link::Enabled, format!("{} Services of the namespace are enabled", enabled.len())));
    if services.is_empty() {
        let differences: Vec<String> = enabled.iter().take(3).map(|service| difference(service, pod)).collect();
        let text = format!("no enabled Service selects the Pod: {}", differences.join("; "));
        links.push(LinkReport::broken(Link::Selected, text, pages::NO_ANNOTATION));
        return links;
    }
    let names: Vec<&str> = services.iter().map(|service| &*service.key.name).collect();
    links.push(LinkReport::ok(Link::Selected, format!("selected by {}", names.join(", "))));
    if pod.ips.is_empty() {
        let text = "the Pod has no address yet: the container runtime or the CNI has not created the Pod's network";
        links.push(LinkReport::broken(Link::Address, text, pages::NO_ANNOTATION));
    }
    links
}

/// Describes the first label of the Service's selector that the Pod does not have.
fn difference(service: &Service, pod: &Pod) -> String {
    let name = &service.key.name;
    let mut labels = service.selector.iter();
    match labels.find(|(key, value)| pod.labels.get(*key) != Some(*value)) {
        Some((key, value)) => match pod.labels.get(key) {
            Some(other) => format!("{name} selects {key}={value}, and the Pod has {key}={other}"),
            None => format!("{name} selects {key}={value}, and the Pod has no label {key}"),
        },
        None => format!("{name} selects the Pod"),
    }
}

/// The facts about a Pod that has an address and that a Service selects.
struct PodFacts<'a> {
    state: &'a PlannerState,
    view: &'a AgentView,
    pod: &'a Pod,
}

impl PodFacts<'_> {
    /// Returns the chain of a Pod port that a Service requests.
    fn chain(&self, mut links: Vec<LinkReport>, port: WantedPort) -> Chain {
        let WantedPort { pod_port, protocol, family } = port;
        let subject = format!("pod {}, port {pod_port}/{protocol} {family}", self.pod.key);
        let exposure = self.state.views.get(&self.pod.key).and_then(|view| view.wanted.ports.get(&port));
        let is_host_port = matches!(exposure, Some(Exposure::HostPort(_)));
        if let Some(ip) = self.pod.ip_of(family) {
            if let Some(cause) = self.obstacle(ip).filter(|_| !is_host_port) {
                links.push(LinkReport::broken(Link::Address, cause.to_string(), pages::EVENTS));
                return Chain { subject, frontend: None, links };
            }
            links.push(LinkReport::ok(Link::Address, ip.to_string()));
        }
        links.push(LinkReport::ok(Link::PortResolved, format!("Pod port {pod_port}/{protocol}")));
        links.push(LinkReport::ok(Link::Family, format!("{family} of Service, Pod and Node")));
        let frontend = match exposure {
            Some(Exposure::HostPort(node_port)) => {
                let text = format!("host port {node_port}: the kernel or the CNI serves this port without a mapping");
                links.push(LinkReport::ok(Link::NodePort, text));
                links.push(LinkReport::info(Link::KernelEntry, "not needed for a host port"));
                Some(Frontend { family, node_port: *node_port, protocol })
            }
            Some(Exposure::Mapping | Exposure::Pending) | None => self.mapping_links(&mut links, port),
        };
        if let Some(frontend) = frontend {
            links.push(self.annotation(frontend));
            links.push(self.gate());
            links.push(self.device());
        }
        Chain { subject, frontend, links }
    }

    /// Returns the reason why NPL maps no node port to this address of the Pod; `None` if NPL maps node ports to the
    /// address.
    fn obstacle(&self, ip: IpAddr) -> Option<Cause> {
        if let Some(device) = self.state.on_node_network.get(&ip) {
            return Some(Cause::OnNodeNetwork { ip, device: device.clone() });
        }
        let holder = self.state.snapshot.holder(ip).filter(|holder| holder.uid != self.pod.uid)?;
        (!self.pod.host_network).then(|| Cause::AddressConflict { ip, holder: holder.key.clone() })
    }

    /// Appends the links about the node port and its mapping in the kernel. Returns the frontend; `None` if no node
    /// port is allocated to the Pod port.
    fn mapping_links(&self, links: &mut Vec<LinkReport>, port: WantedPort) -> Option<Frontend> {
        let ports = &self.state.ports;
        let mut held = ports.of_port(&self.pod.uid, port);
        held.sort_by_key(|frontend| (ports.rank(*frontend), *frontend));
        let active = held.first().copied().filter(|frontend| ports.is_active(*frontend));
        let Some(frontend) = active else {
            let is_exhausted = |problem: &&Problem| {
                matches!(&problem.cause, Cause::RangeExhausted { pod_port, protocol, family }
                    if (*pod_port, *protocol, *family) == (port.pod_port, port.protocol, port.family))
            };
            let problems = self.state.views.get(&self.pod.key).map(|view| &view.wanted.problems);
            let text = problems.into_iter().flatten().find(is_exhausted).map_or_else(
                || "no node port is allocated to the Pod port yet".to_owned(),
                |problem| problem.cause.to_string(),
            );
            links.push(LinkReport::broken(Link::NodePort, text, pages::EVENTS));
            return None;
        };
        if ports.is_taken(frontend) && !self.is_reserved(frontend) {
            let text = format!("another process of the Node uses port {frontend}: find the process with `ss -tulnp`");
            links.push(LinkReport::broken(Link::NodePort, text, pages::SIGNALS));
        } else {
            let refusal = self.refused_request(port).map(|problem| format!("; {problem}")).unwrap_or_default();
            links.push(LinkReport::ok(Link::NodePort, format!("{frontend} is allocated{refusal}")));
        }
        links.push(self.kernel_entry(frontend));
        Some(frontend)
    }

    /// Returns why the Pod port does not have the node port that the Pod requests; `None` if the Pod port has the
    /// requested node port, or requests none.
    fn refused_request(&self, port: WantedPort) -> Option<&RequestProblem> {
        let problems = &self.state.views.get(&self.pod.key)?.wanted.problems;
        problems.iter().find_map(|problem| {
            let Cause::NodePortRequest(refusal) = &problem.cause else { return None };
            let is_about_port = match refusal {
                RequestProblem::Refused { pod_port, protocol, .. } => {
                    (*pod_port, *protocol) == (port.pod_port, port.protocol)
                }
                RequestProblem::Disabled | RequestProblem::Faulty(_) => true,
            };
            is_about_port.then_some(refusal)
        })
    }

    fn is_reserved(&self, frontend: Frontend) -> bool {
        self.state.observed.as_ref().is_some_and(|observed| observed.reservations.contains(&frontend))
    }

    fn kernel_entry(&self, frontend: Frontend) -> LinkReport {
        let observed = self.state.observed.as_ref().and_then(|observed| observed.mappings.get(&frontend));
        if self.state.mapping_is_current(frontend) {
            let target = observed.map(|backend| format!("{} port {}", backend.pod_ip, backend.pod_port));
            let text = format!("the kernel's mapping of {frontend} leads to {}", target.unwrap_or_default());
            if self.state.lacks_sources(frontend) {
                let text = format!(
                    "{text}, but some allowed sources are missing in the kernel: packets of their clients are dropped"
                );
                return LinkReport::broken(Link::KernelEntry, text, pages::SIZES);
            }
            return LinkReport::ok(Link::KernelEntry, text);
        }
        let text = match observed {
            Some(other) => {
                let target = format!("{} port {}", other.pod_ip, other.pod_port);
                format!("the kernel's mapping of {frontend} leads to {target}, and not to the Pod's address and port")
            }
            None => {
                format!(
                    "the kernel has no mapping of {frontend}: the agent writes the mapping; if the write fails, the agent \
                     tries again, and the agent's log contains the error"
                )
            }
        };
        LinkReport::broken(Link::KernelEntry, text, pages::SIZES)
    }

    fn annotation(&self, frontend: Frontend) -> LinkReport {
        let entries = self.state.entries(self.pod);
        let names =
            |frontend: Frontend| self.state.views.get(&self.pod.key).is_some_and(|view| view.named.contains(&frontend));
        if self.pod.is_terminating && !names(frontend) {
            let text = "the Pod is being deleted, and the agent no longer changes its annotation";
            return LinkReport::broken(Link::Annotation, text, pages::NO_ANNOTATION);
        }
        if !names(frontend) {
            let text = "the annotation does not name the node port yet: the API server has not accepted the patch; if \
                        the patch failed, the agent's log contains the error";
            return LinkReport::broken(Link::Annotation, text, pages::NO_ANNOTATION);
        }
        if !self.state.has_right_annotation(self.pod, &entries) {
            let text = "the annotation names the node port, but other parts of the annotation are wrong; the agent is \
                        about to correct them";
            return LinkReport::broken(Link::Annotation, text, pages::DIFFERENCE);
        }
        LinkReport::ok(Link::Annotation, "the Pod's annotation names the node port")
    }

    fn gate(&self) -> LinkReport {
        match self.pod.gate {
            Gate::Absent => LinkReport::info(Link::ReadinessGate, "the Pod does not name the readiness gate"),
            Gate::Open => LinkReport::ok(Link::ReadinessGate, "open"),
            Gate::Closed { are_containers_ready } => {
                let text = if self.pod.is_terminating {
                    "closed; the gate of a Pod that is being deleted stays closed"
                } else if are_containers_ready {
                    "closed, so the Pod is not ready; its containers are ready, but a requested port is not published"
                } else {
                    "closed, so the Pod is not ready; its containers are not ready either"
                };
                LinkReport::broken(Link::ReadinessGate, text, pages::NO_ANNOTATION)
            }
        }
    }

    fn device(&self) -> LinkReport {
        let attached: Vec<&str> =
            self.view.devices.iter().filter(|device| device.is_attached).map(|device| device.name.as_str()).collect();
        if self.view.reaches_clients {
            return LinkReport::ok(Link::Device, format!("the programs are on {}", attached.join(", ")));
        }
        LinkReport::broken(Link::Device, NO_UPLINK, pages::DOCTOR)
    }

    /// Returns a chain for each port of the Service that gets no node port for this Pod. There are three possible
    /// causes: the agent does not serve the protocol, the Pod has no port with the name of the target port, or the Pod
    /// or the Node has no address of the IP family.
    fn unresolved(&self, common: &[LinkReport], service: &Service, only_port: Option<PodPort>) -> Vec<Chain> {
        let settings = &self.state.settings;
        let mut chains = Vec::new();
        let mut add = |subject: String, link, text: String| {
            let links = [common.to_vec(), vec![LinkReport::broken(link, text, pages::EVENTS)]].concat();
            chains.push(Chain { subject, frontend: None, links });
        };
        for port in &service.ports {
            let target = match &port.target {
                TargetPort::Number(number) if only_port.is_some_and(|asked| asked != *number) => continue,
                TargetPort::Number(number) => number.to_string(),
                TargetPort::Name(name) => name.clone(),
            };
            let subject =
                format!("pod {}, target port {target}/{} of {}", self.pod.key, port.protocol, service.key.name);
            if !settings.protocols.contains(&port.protocol) {
                add(subject, Link::PortResolved, Cause::UnsupportedProtocol { protocol: port.protocol }.to_string());
                continue;
            }
            if let TargetPort::Name(name) = &port.target
                && !self.pod.ports.iter().any(|it| it.protocol == port.protocol && it.name.as_ref() == Some(name))
            {
                let (service, name, protocol) = (service.key.clone(), name.clone(), port.protocol);
                add(subject, Link::PortResolved, Cause::UnresolvedTargetPort { service, name, protocol }.to_string());
                continue;
            }
            for family in service.families.iter().copied().filter(|family| self.pod.ip_of(*family).is_some()) {
                if !self.state.node_ips.contains_key(&family) {
                    add(subject.clone(), Link::Family, Cause::NoNodeAddress { family }.to_string());
                }
            }
            if !service.families.iter().any(|family| self.pod.ip_of(*family).is_some()) {
                let families: Vec<&str> = service.families.iter().map(|family| family.as_str()).collect();
                add(
                    subject,
                    Link::Family,
                    format!("the Pod has no address of the Service's families: {}", families.join(", ")),
                );
            }
        }
        chains
    }
}
