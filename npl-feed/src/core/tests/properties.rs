// SPDX-License-Identifier: Apache-2.0
//! Tests properties that the members of Service ports have after any sequence of changes.

use std::{collections::BTreeSet, net::IpAddr};

use npl_agent::core::model::NodePort;
use proptest::{prelude::*, sample::select};
use serde_json::Value;

use super::*;
use crate::core::{
    members::members,
    snapshot::{Condition, PortKey},
};

const NODES: [(&str, &str); 3] = [("n1", "192.0.2.1"), ("n2", "192.0.2.2"), ("n3", "192.0.2.3")];

fn entry() -> impl Strategy<Value = String> {
    let ip = select(vec!["192.0.2.1", "192.0.2.2", "192.0.2.3", "203.0.113.1"]);
    let node_port = prop_oneof![4 => 61_000..61_004_u16, 1 => Just(22_u16)];
    (select(vec![8080_u16, 9090]), ip, node_port, select(vec!["tcp", "udp"])).prop_map(
        |(pod_port, ip, port, protocol)| {
            format!(r#"{{"podPort":{pod_port},"nodeIP":"{ip}","nodePort":{port},"protocol":"{protocol}"}}"#)
        },
    )
}

fn a_pod() -> impl Strategy<Value = Pod> {
    let annotation = prop_oneof![
        8 => prop::collection::vec(entry(), 0..3).prop_map(|entries| Some(format!("[{}]", entries.join(",")))),
        1 => "\\PC*".prop_map(Some),
        1 => Just(None),
    ];
    let name = select(vec!["a", "b", "c", "d"]);
    let flags = (any::<bool>(), prop::bool::weighted(0.2), prop::bool::weighted(0.1), prop::bool::weighted(0.2));
    (name, select(vec!["n1", "n2", "n3"]), annotation, flags, 0..3_i64, select(vec!["web", "other"])).prop_map(
        |(name, node, annotation, (is_ready, is_terminating, is_finished, is_foreign), created, app)| {
            let mut pod = pod(name, node, "");
            pod.object.annotation = annotation;
            pod.object.labels.insert("app".to_owned(), app.to_owned());
            (pod.object.is_terminating, pod.object.is_finished) = (is_terminating, is_finished);
            pod.object.annotation_manager = is_foreign.then(|| "somebody".into());
            (pod.is_ready, pod.created) = (is_ready, created);
            pod
        },
    )
}

fn a_service() -> impl Strategy<Value = Service> {
    (select(vec!["web", "api"]), select(vec![8080_u16, 9090]), prop::bool::weighted(0.8)).prop_map(
        |(name, target, is_enabled)| {
            let mut service = service(name, target);
            service.object.is_enabled = is_enabled;
            service
        },
    )
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        6 => a_pod().prop_map(|pod| Change::Pod(Box::new(pod))),
        2 => select(vec!["a", "b", "c", "d"])
            .prop_map(|name| Change::PodGone(ObjectKey::new("default", name), PodUid(name.into()))),
        2 => a_service().prop_map(|service| Change::Service(Box::new(service))),
        1 => select(vec!["web", "api"]).prop_map(|name| Change::ServiceGone(ObjectKey::new("default", name))),
        2 => select(NODES.to_vec()).prop_map(|(name, ip)| Change::Node(node(name, ip, "zone"))),
        1 => select(NODES.to_vec()).prop_map(|(name, _)| Change::NodeGone(name.into())),
    ]
}

/// The time that passes before a change, in milliseconds: none, a part of the drain time, or the whole drain time.
fn passed() -> impl Strategy<Value = u64> {
    prop_oneof![2 => Just(0), 3 => 0..DRAIN, 1 => Just(DRAIN)]
}

/// An entry of an annotation: the Pod port, and the node address, node port and protocol by which clients reach this
/// port.
type Named = (u16, IpAddr, u16, Protocol);

/// Reads the entries of a Pod's current annotation, without the code that the test checks.
fn named(pod: &Pod) -> Vec<Named> {
    let text = pod.object.annotation.as_deref().unwrap_or_default();
    let annotation: Value = serde_json::from_str(text).unwrap_or_default();
    let entries = annotation.as_array().into_iter().flatten();
    let port = |entry: &Value, key: &str| u16::try_from(entry[key].as_u64()?).ok();
    let text = |entry: &Value, key: &str| entry[key].as_str().map(str::to_owned);
    let read = entries.filter_map(|entry| {
        let ip = text(entry, "nodeIP")?.parse().ok()?;
        let protocol = text(entry, "protocol")?.parse().ok()?;
        Some((port(entry, "podPort")?, ip, port(entry, "nodePort")?, protocol))
    });
    read.collect()
}

/// The Kubernetes objects of the cluster after all changes.
#[derive(Default)]
struct Objects {
    pods: BTreeMap<ObjectKey, Pod>,
    services: BTreeMap<ObjectKey, Service>,
    nodes: BTreeMap<String, Node>,
}

impl Objects {
    fn apply(&mut self, change: &Change) {
        match change.clone() {
            Change::Pod(pod) => drop(self.pods.insert(pod.object.key.clone(), *pod)),
            Change::PodGone(key, _) => drop(self.pods.remove(&key)),
            Change::Service(service) => drop(self.services.insert(service.object.key.clone(), *service)),
            Change::ServiceGone(key) => drop(self.services.remove(&key)),
            Change::Node(node) => drop(self.nodes.insert(node.object.name.clone(), node)),
            Change::NodeGone(name) => drop(self.nodes.remove(&*name)),
            Change::Pods(_) | Change::Services(_) | Change::Nodes(_) => {}
        }
    }

    /// Returns the target port of a Service port.
    fn target(&self, key: &PortKey) -> u16 {
        let ports = &self.services[&key.service].ports;
        let port = ports.iter().find(|port| (port.number, port.target.protocol) == (key.number, key.protocol)).unwrap();
        match &port.target.target {
            TargetPort::Number(number) => number.0,
            TargetPort::Name(name) => panic!("the test has no port with the name {name}"),
        }
    }

    fn members(&self) -> Snapshot {
        let pods: Vec<Pod> = self.pods.values().cloned().collect();
        let services: Vec<Service> = self.services.values().cloned().collect();
        let nodes: Vec<Node> = self.nodes.values().cloned().collect();
        members(&pods, &services, &nodes, range())
    }
}

/// Returns the Services whose groups differ between two snapshots.
fn differing(one: &Snapshot, other: &Snapshot) -> BTreeSet<ObjectKey> {
    let of = |snapshot: &Snapshot| -> BTreeSet<_> {
        snapshot.groups().map(|group| (group.key.clone(), group.version)).collect()
    };
    of(one).symmetric_difference(&of(other)).map(|(key, _)| key.service.clone()).collect()
}

proptest! {
    /// With a drain time of zero, the state that has applied changes one by one has the same members as a computation
    /// from all objects.
    #[test]
    fn following_changes_equals_computing_from_all_objects(changes in prop::collection::vec(change(), 0..60)) {
        let mut state = State::new(range(), 0);
        let mut objects = Objects::default();
        for change in changes {
            objects.apply(&change);
            state.apply(change, 0);
            state.expire(0);
            state.refresh();
            prop_assert_eq!(state.snapshot(), objects.members());
        }
    }

    /// A member has an address of its Pod's Node, and a node port of the range. Members of different Pods differ in
    /// address, node port or protocol. The Pod's current annotation names the member's node port for the Service's
    /// target port, unless the member drains. If a draining member has no such entry, the annotation contained the
    /// entry less than the drain time ago.
    #[test]
    fn every_member_has_an_address_and_port_of_its_pods_annotation(
        changes in prop::collection::vec((change(), passed()), 0..60)
    ) {
        let mut state = State::new(range(), DRAIN);
        let mut objects = Objects::default();
        let mut last_named: BTreeMap<(ObjectKey, Named), u64> = BTreeMap::new();
        let mut now = 0;
        for (change, passed) in changes {
            now += passed;
            state.expire(now);
            for (key, pod) in &objects.pods {
                last_named.extend(named(pod).into_iter().map(|entry| ((key.clone(), entry), now)));
            }
            if let Change::PodGone(gone, _) = &change {
                last_named.retain(|(key, _), _| key != gone);
            }
            objects.apply(&change);
            let before = state.snapshot();
            state.apply(change, now);
            state.refresh();
            prop_assert!(state.has_right_index());
            prop_assert_eq!(&*state.snapshot().services_changed_since(&before), &differing(&before, &state.snapshot()));
            let mut holders: BTreeMap<(IpAddr, u16, Protocol), std::sync::Arc<str>> = BTreeMap::new();
            for group in state.snapshot().groups() {
                let target = objects.target(&group.key);
                for member in &group.members {
                    let pod = &objects.pods[&ObjectKey::new("default", &member.pod)];
                    prop_assert_eq!(pod.node.as_ref(), Some(&member.node));
                    let own = NODES.iter().any(|(node, ip)| *node == &*member.node && *ip == member.address.to_string());
                    prop_assert!(own && range().contains(NodePort(member.port)));
                    let entry = (target, member.address, member.port, group.key.protocol);
                    if named(pod).contains(&entry) {
                        let condition = match (pod.object.is_terminating, pod.is_ready) {
                            (true, _) => Condition::Draining,
                            (false, true) => Condition::Ready,
                            (false, false) => Condition::NotReady,
                        };
                        prop_assert_eq!(member.condition, condition);
                    } else {
                        prop_assert_eq!(member.condition, Condition::Draining, "{:?} is not in the annotation", entry);
                        let last = last_named.get(&(pod.object.key.clone(), entry));
                        prop_assert!(last.is_some_and(|last| now < last + DRAIN), "{:?}: {:?} at {}", entry, last, now);
                    }
                    let place = (member.address, member.port, group.key.protocol);
                    let holder = holders.entry(place).or_insert_with(|| std::sync::Arc::clone(&member.pod));
                    prop_assert_eq!(&*holder, &member.pod);
                }
            }
        }
    }

    /// Replicas that have the same objects compute the same versions.
    #[test]
    fn the_order_of_objects_does_not_matter(
        pods in prop::collection::vec(a_pod(), 0..5), services in prop::collection::vec(a_service(), 0..3)
    ) {
        let nodes: Vec<Node> = NODES.iter().map(|(name, ip)| node(name, ip, "")).collect();
        let mut unique: BTreeMap<_, _> = pods.into_iter().map(|pod| (pod.object.key.clone(), pod)).collect();
        let pods: Vec<Pod> = std::mem::take(&mut unique).into_values().collect();
        let services: BTreeMap<_, _> = services.into_iter().map(|it| (it.object.key.clone(), it)).collect();
        let services: Vec<Service> = services.into_values().collect();
        let forward = members(&pods, &services, &nodes, range());
        let reversed = |list: &[Pod]| list.iter().rev().cloned().collect::<Vec<_>>();
        let backward = members(&reversed(&pods), &services, &nodes, range());
        prop_assert_eq!(forward.version(), backward.version());
        prop_assert_eq!(forward, backward);
    }
}
