// SPDX-License-Identifier: Apache-2.0

mod entries;
mod life;
mod properties;

use std::collections::BTreeMap;

use npl_agent::core::model::{
    self, Family, Gate, ObjectKey, PodPort, PodUid, Protocol, ServicePort, ServiceType, ServiceUid, TargetPort,
    node_port_requests::NodePortRequests, settings::PortRange, sources::AllowList,
};

use super::{
    model::{Change, NamedPort, Node, Pod, Service},
    snapshot::{Group, Snapshot},
    state::State,
};

pub(crate) const DRAIN: u64 = 30_000;

pub(crate) fn range() -> PortRange {
    "61000-62000".parse().unwrap()
}

pub(crate) fn state() -> State {
    State::new(range(), DRAIN)
}

/// Returns a ready Pod `default/NAME` on the Node `node`, with the label `app: web`.
pub(crate) fn pod(name: &str, node: &str, annotation: &str) -> Pod {
    let object = model::Pod {
        key: ObjectKey::new("default", name),
        uid: PodUid(name.into()),
        resource_version: 1,
        labels: BTreeMap::from([("app".to_owned(), "web".to_owned())]),
        is_finished: false,
        is_terminating: false,
        host_network: false,
        ips: Vec::new(),
        ports: Vec::new(),
        annotation: Some(annotation.to_owned()),
        annotation_manager: None,
        requests: NodePortRequests::default(),
        gate: Gate::Absent,
    };
    Pod { object, node: Some(node.into()), is_ready: true, created: 0 }
}

/// Returns the value of an annotation with one TCP entry.
pub(crate) fn annotation(pod_port: u16, ip: &str, node_port: u16) -> String {
    format!(r#"[{{"podPort":{pod_port},"nodeIP":"{ip}","nodePort":{node_port},"protocol":"tcp"}}]"#)
}

/// Returns an enabled Service `default/NAME` with port `http` 80, which selects `app: web`.
pub(crate) fn service(name: &str, target: u16) -> Service {
    let object = model::Service {
        key: ObjectKey::new("default", name),
        uid: ServiceUid(name.into()),
        is_enabled: true,
        service_type: ServiceType::ClusterIp,
        selector: BTreeMap::from([("app".to_owned(), "web".to_owned())]),
        ports: Vec::new(),
        node_ports: std::collections::BTreeSet::new(),
        families: vec![Family::V4],
        allow_list: AllowList::ABSENT,
    };
    let target = ServicePort { protocol: Protocol::Tcp, target: TargetPort::Number(PodPort(target)) };
    Service { object, ports: vec![NamedPort { name: Some("http".into()), number: 80, target }] }
}

pub(crate) fn node(name: &str, ip: &str, zone: &str) -> Node {
    let object =
        model::Node { name: name.to_owned(), internal_ips: vec![ip.parse().unwrap()], external_ips: Vec::new() };
    Node { object, zone: zone.into() }
}

/// Returns a state with these Pods, the Nodes `n1` (192.0.2.1, zone west) and `n2` (192.0.2.2), and the Service `web`
/// with target port 8080.
pub(crate) fn cluster(pods: Vec<Pod>) -> State {
    let mut state = state();
    state.apply(Change::Nodes(vec![node("n1", "192.0.2.1", "west"), node("n2", "192.0.2.2", "")]), 0);
    state.apply(Change::Services(vec![service("web", 8080)]), 0);
    state.apply(Change::Pods(pods), 0);
    state
}

/// Returns the snapshot of a cluster with the Service `web` and these Pods.
pub(crate) fn snapshot(pods: Vec<Pod>) -> Snapshot {
    let mut state = cluster(pods);
    state.refresh();
    state.snapshot()
}

/// Formats each member as `POD ADDRESS:PORT CONDITION`.
pub(crate) fn texts(group: &Group) -> Vec<String> {
    let text = |member: &super::snapshot::Member| {
        format!("{} {}:{} {}", member.pod, member.address, member.port, member.condition.as_str())
    };
    group.members.iter().map(text).collect()
}

/// Returns the members of `default/web`.
pub(crate) fn web(state: &mut State) -> Vec<String> {
    state.refresh();
    state.snapshot().port("default", "web", "http").map(|group| texts(group)).unwrap_or_default()
}
