// SPDX-License-Identifier: Apache-2.0
//! Compares the annotations of one Node's Pods with the mappings in the kernel, in both directions, and with the
//! published addresses of the Node. `npl-agent doctor` reports the differences.

use std::collections::{BTreeMap, BTreeSet};

use super::{Inconsistency, Kind, wrong_address};
use crate::core::{
    model::{Backend, Frontend},
    pages,
    view::{AgentView, AnnotatedPort, PortState},
};

/// Compares the annotations that the running agent knows with the mappings in the kernel.
pub fn check_node(agent: &AgentView, mappings: &BTreeMap<Frontend, Backend>) -> BTreeSet<Inconsistency> {
    let addresses: BTreeSet<_> = agent.node_addresses.iter().copied().collect();
    let states: BTreeMap<Frontend, PortState> =
        agent.node_ports.iter().map(|port| (port.frontend, port.state)).collect();
    let mut found = BTreeSet::new();
    for port in &agent.annotated_ports {
        let difference = |kind, text| Inconsistency {
            kind,
            namespace: port.namespace.clone(),
            pod: port.pod.clone(),
            node: agent.node_name.clone(),
            text,
            page: pages::DIFFERENCE,
        };
        let address = wrong_address(port.node_ip, &agent.node_name, &addresses);
        found.extend(address.map(|text| difference(Kind::WrongAddress, text)));
        if states.get(&port.frontend) != Some(&PortState::HostPort) {
            let target = wrong_target(port, mappings.get(&port.frontend));
            found.extend(target.map(|text| difference(Kind::NotMapped, text)));
        }
    }
    let is_unknown = |frontend: &Frontend| matches!(states.get(frontend), None | Some(PortState::Quarantined));
    for (frontend, backend) in mappings.iter().filter(|(frontend, _)| is_unknown(frontend)) {
        let text = format!(
            "the kernel maps node port {frontend} to {} port {}, but no Pod of the Node has this node port",
            backend.pod_ip, backend.pod_port
        );
        let (namespace, pod, node) = (String::new(), String::new(), agent.node_name.clone());
        found.insert(Inconsistency { kind: Kind::Unowned, namespace, pod, node, text, page: pages::DIFFERENCE });
    }
    found
}

/// Describes the difference between an entry of an annotation and the mapping of its node port; `None` if both match.
fn wrong_target(port: &AnnotatedPort, mapping: Option<&Backend>) -> Option<String> {
    let AnnotatedPort { frontend, pod_ip, pod_port, .. } = port;
    let named = format!("the annotation names node port {frontend} for Pod port {pod_port}");
    match mapping {
        None => Some(format!("{named}, but the kernel has no mapping of this node port")),
        Some(backend) if backend.pod_port != *pod_port || pod_ip.is_some_and(|ip| ip != backend.pod_ip) => {
            Some(format!("{named}, but the kernel maps this node port to {} port {}", backend.pod_ip, backend.pod_port))
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{
        model::{Family, NodePort, PodPort, Protocol},
        view::NodePortView,
    };

    fn frontend(number: u16) -> Frontend {
        Frontend { family: Family::V4, node_port: NodePort(number), protocol: Protocol::Tcp }
    }

    fn backend(ip: &str, port: u16) -> Backend {
        Backend { pod_ip: ip.parse().unwrap(), pod_port: PodPort(port), generation: 1, is_restricted: false }
    }

    fn node_port(number: u16, state: PortState) -> NodePortView {
        NodePortView {
            frontend: frontend(number),
            state,
            namespace: None,
            pod: None,
            pod_port: None,
            pod_ip: None,
            services: Vec::new(),
            age_millis: None,
            ends_in_millis: None,
        }
    }

    /// An agent with a published node port and a host port.
    fn agent() -> AgentView {
        let annotated = |number, pod_port| AnnotatedPort {
            namespace: "shop".to_owned(),
            pod: "web-0".to_owned(),
            node_ip: "192.0.2.10".parse().unwrap(),
            frontend: frontend(number),
            pod_ip: Some("10.0.0.5".parse().unwrap()),
            pod_port: PodPort(pod_port),
        };
        AgentView {
            node_name: "node-1".to_owned(),
            node_addresses: vec!["192.0.2.10".parse().unwrap()],
            node_ports: vec![node_port(61000, PortState::Published), node_port(8080, PortState::HostPort)],
            annotated_ports: vec![annotated(61000, 8080), annotated(8080, 8080)],
            ..AgentView::default()
        }
    }

    fn mappings() -> BTreeMap<Frontend, Backend> {
        [(frontend(61000), backend("10.0.0.5", 8080))].into()
    }

    fn found(agent: &AgentView, mappings: &BTreeMap<Frontend, Backend>) -> Vec<(Kind, String)> {
        check_node(agent, mappings).into_iter().map(|it| (it.kind, it.text)).collect()
    }

    #[test]
    fn annotations_that_match_the_mappings_and_the_node_are_consistent() {
        assert_eq!(found(&agent(), &mappings()), []);
    }

    #[test]
    fn an_annotated_node_port_without_the_mapping_to_its_pod_is_reported() {
        let text = |mappings: &BTreeMap<_, _>| {
            let found = found(&agent(), mappings);
            assert!(found.len() == 1 && found[0].0 == Kind::NotMapped, "{found:?}");
            found[0].1.clone()
        };
        assert!(text(&BTreeMap::new()).ends_with("the kernel has no mapping of this node port"));
        for other in [backend("10.0.0.6", 8080), backend("10.0.0.5", 8081)] {
            let text = text(&[(frontend(61000), other)].into());
            assert!(text.ends_with(&format!("to {} port {}", other.pod_ip, other.pod_port)), "{text}");
        }
    }

    #[test]
    fn an_address_that_is_not_of_the_node_is_reported() {
        let agent = AgentView { node_addresses: vec!["192.0.2.11".parse().unwrap()], ..agent() };
        let found = found(&agent, &mappings());
        assert!(
            found.iter().all(|(kind, text)| *kind == Kind::WrongAddress && text.contains("192.0.2.10")),
            "{found:?}"
        );
        assert!(!found.is_empty());
    }

    #[test]
    fn a_mapping_that_the_agent_does_not_know_is_reported_and_a_draining_one_is_not() {
        let mut mappings = mappings();
        mappings.insert(frontend(61001), backend("10.0.0.7", 80));
        for (state, count) in
            [(None, 1), (Some(PortState::Quarantined), 1), (Some(PortState::Draining), 0), (Some(PortState::Live), 0)]
        {
            let mut agent = agent();
            agent.node_ports.extend(state.map(|state| node_port(61001, state)));
            let found = found(&agent, &mappings);
            assert_eq!(found.len(), count, "{state:?} {found:?}");
            assert!(found.iter().all(|(kind, text)| *kind == Kind::Unowned && text.contains("10.0.0.7 port 80")));
        }
    }
}
