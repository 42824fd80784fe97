// SPDX-License-Identifier: Apache-2.0
//! Computes the members of Service ports.

use std::{collections::BTreeMap, sync::Arc};

use npl_agent::core::{
    model::{Family, settings::PortRange},
    ports::select::resolve,
    publish::annotation::Entry,
};

use super::{
    entries::{Claim, Claims, Served, target},
    model::{NamedPort, Node, Pod, Service},
    snapshot::{Condition, Group, Member, PortKey, Snapshot, WEIGHT},
};

/// Computes the members of all Service ports from all objects of a cluster. In the result, a member is draining only if
/// its Pod is being deleted: entries that were withdrawn before are known only to [`super::state::State`].
pub fn members(pods: &[Pod], services: &[Service], nodes: &[Node], range: PortRange) -> Snapshot {
    let nodes: BTreeMap<&str, &Node> = nodes.iter().map(|node| (node.object.name.as_str(), node)).collect();
    let served = pods.iter().map(|pod| {
        let node = pod.node.as_deref().and_then(|name| nodes.get(name).copied());
        Served::new(pod.clone(), node, range)
    });
    let served: Vec<Served> = served.collect();
    let mut claims = Claims::default();
    for pod in &served {
        for entry in &pod.entries {
            claims.add(target(entry), Claim::of(&pod.pod));
        }
    }
    let active = services.iter().filter(|service| service.object.is_active());
    let groups = active.flat_map(|service| {
        let selected: Vec<&Served> = served
            .iter()
            .filter(|it| it.pod.object.key.namespace == service.object.key.namespace)
            .filter(|it| service.object.selects(&it.pod.object))
            .collect();
        groups(service, &selected, &claims)
    });
    Snapshot::new(groups.map(|group| (group.key.clone(), Arc::new(group))).collect())
}

/// Computes the member groups of a Service, one for each port. `selected` contains the Pods that the Service selects.
pub fn groups(service: &Service, selected: &[&Served], claims: &Claims) -> Vec<Group> {
    service.ports.iter().map(|port| group(service, port, selected, claims)).collect()
}

fn group(service: &Service, port: &NamedPort, selected: &[&Served], claims: &Claims) -> Group {
    let mut members = Vec::new();
    for served in selected {
        let pod_ports = resolve(&served.pod.object, &port.target);
        let is_of_port = |entry: &Entry| {
            entry.protocol == port.target.protocol
                && pod_ports.contains(&entry.pod_port)
                && service.object.families.contains(&Family::of(entry.node_ip))
        };
        let published = served.entries.iter().filter(|entry| is_of_port(entry));
        for entry in published.filter(|entry| claims.is_held_by(&target(entry), &served.pod.object.key)) {
            let condition = match (served.pod.object.is_terminating, served.pod.is_ready) {
                (true, _) => Condition::Draining,
                (false, true) => Condition::Ready,
                (false, false) => Condition::NotReady,
            };
            members.push(member(served, entry, condition));
        }
        let withdrawn = served.withdrawn.iter().map(|withdrawn| &withdrawn.entry).filter(|entry| is_of_port(entry));
        for entry in withdrawn.filter(|entry| !claims.has(&target(entry))) {
            members.push(member(served, entry, Condition::Draining));
        }
    }
    let key = PortKey { service: service.object.key.clone(), number: port.number, protocol: port.target.protocol };
    Group::new(key, port.name.clone(), members)
}

fn member(served: &Served, entry: &Entry, condition: Condition) -> Member {
    let (node, zone) = &served.place;
    Member {
        address: entry.node_ip,
        port: entry.node_port.0,
        pod: Arc::clone(&served.pod.object.key.name),
        node: Arc::clone(node),
        zone: Arc::clone(zone),
        condition,
        weight: WEIGHT,
    }
}
