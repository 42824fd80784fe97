// SPDX-License-Identifier: Apache-2.0
//! Random events of a cluster, for property tests and for the fuzz target `cluster`.

use std::{collections::BTreeMap, net::IpAddr};

use proptest::{prelude::*, sample::select};

use super::{
    chaos::{Chaos, Fate},
    world::{World, settings},
};
use crate::core::model::{
    ContainerPort, Family, Frontend, Gate, Node, NodePort, ObjectKey, Pod, PodPort, PodUid, Protocol, Service,
    ServicePort, ServiceType, ServiceUid, TargetPort,
    node_port_requests::NodePortRequests,
    settings::{ProtocolPairing, Settings},
    sources::{AllowList, SourceRange},
};

const FIRST_PORT: u16 = 61_000;

#[derive(Debug, Clone)]
pub(super) enum Event {
    Pod(Pod),
    PodGone(ObjectKey),
    Tamper(ObjectKey, Option<String>),
    Service(Service),
    ServiceGone(ObjectKey),
    Node(Node),
    Meddle(Frontend, bool),
    MeddleWithSources(Frontend, SourceRange),
    /// From this event on, the kernel's map has room for this number of allowed sources.
    Room(usize),
    Steal(Frontend),
    Return(Frontend),
    Send(Frontend),
    Cease(Frontend),
    Restart(Option<Frontend>),
    Deliver(usize),
    Pass(Vec<Fate>),
    Serve(usize, Vec<Fate>),
    Answer(usize),
    /// This number of milliseconds passes, and the agent runs no pass in this time.
    Idle(u64),
    Wait(u64),
    Settle,
}

pub(super) fn key(text: &str) -> ObjectKey {
    let (namespace, name) = text.split_once('/').unwrap();
    ObjectKey::new(namespace, name)
}

fn protocol() -> impl Strategy<Value = Protocol> {
    select(vec![Protocol::Tcp, Protocol::Udp, Protocol::Sctp])
}

pub(super) fn frontend() -> impl Strategy<Value = Frontend> {
    let family = select(vec![Family::V4, Family::V6]);
    (family, 0..6_u16, protocol()).prop_map(|(family, port, protocol)| Frontend {
        family,
        node_port: NodePort(FIRST_PORT + port),
        protocol,
    })
}

pub(super) fn pod_key() -> impl Strategy<Value = ObjectKey> {
    select(vec!["a/p", "a/q", "a/r", "b/p"]).prop_map(key)
}

pub(super) fn service_key() -> impl Strategy<Value = ObjectKey> {
    select(vec!["a/s", "a/t", "b/s"]).prop_map(key)
}

fn labels() -> impl Strategy<Value = BTreeMap<String, String>> {
    select(vec!["x", "y"]).prop_map(|app| BTreeMap::from([("app".to_owned(), app.to_owned())]))
}

fn families() -> impl Strategy<Value = Vec<Family>> {
    select(vec![vec![Family::V4], vec![Family::V4, Family::V6], vec![Family::V6]])
}

/// Source ranges of both families. Some of these ranges contain other ranges of the list.
const RANGES: [&str; 6] =
    ["198.51.100.0/24", "198.51.100.7", "198.51.0.0/16", "203.0.113.0/24", "2001:db8::/32", "::/0"];

fn range() -> impl Strategy<Value = SourceRange> {
    select(RANGES.to_vec()).prop_map(|text| AllowList::read(text).sources.ranges().next().unwrap())
}

fn allow_list() -> impl Strategy<Value = AllowList> {
    let entries = prop::collection::vec(select([RANGES.as_slice(), &["nonsense", ""]].concat()), 0..4);
    prop::option::of(entries).prop_map(|entries| entries.map_or(AllowList::ABSENT, |it| AllowList::read(&it.join(","))))
}

pub(super) fn service() -> impl Strategy<Value = Service> {
    let target = prop_oneof![
        3 => select(vec![53_u16, 80, 8080]).prop_map(|port| TargetPort::Number(PodPort(port))),
        1 => Just(TargetPort::Name("http".to_owned())),
    ];
    let port = (protocol(), target).prop_map(|(protocol, target)| ServicePort { protocol, target });
    let ports = prop::collection::vec(port, 0..3);
    let service_type = select(vec![ServiceType::ClusterIp, ServiceType::LoadBalancer, ServiceType::NodePort]);
    let node_port = prop::option::weighted(0.1, FIRST_PORT..FIRST_PORT + 6);
    let flags = (prop::bool::weighted(0.8), service_type, node_port);
    (service_key(), flags, labels(), ports, families(), allow_list()).prop_map(
        |(key, (is_enabled, service_type, node_port), selector, ports, families, allow_list)| Service {
            uid: ServiceUid(key.to_string().into()),
            key,
            is_enabled,
            service_type,
            selector,
            ports,
            node_ports: node_port.map(NodePort).into_iter().collect(),
            families,
            allow_list,
        },
    )
}

/// Generates the requests of a Pod for node ports: valid requests, requests outside of the range, requests that
/// contradict each other, and nonsense. Requests of several Pods are often for the same node port.
pub(super) fn requests() -> impl Strategy<Value = NodePortRequests> {
    let pod_port = select(vec!["53", "80", "8080", "80/tcp", "53/udp", "8080/udp", "8080/sctp", "0", "http"]);
    let number = prop_oneof![3 => FIRST_PORT..FIRST_PORT + 2, 1 => FIRST_PORT - 1..FIRST_PORT + 7];
    let entry = (pod_port, number).prop_map(|(pod_port, number)| format!("{pod_port}={number}"));
    let entry = prop_oneof![8 => entry, 1 => Just("nonsense".to_owned())];
    let list = prop::collection::vec(entry, 1..4).prop_map(|entries| NodePortRequests::read(&entries.join(",")));
    prop_oneof![1 => Just(NodePortRequests::default()), 2 => list]
}

/// Generates a Pod as the kubelet may report it. Two generated Pods sometimes have the same address.
pub(super) fn pod() -> impl Strategy<Value = Pod> {
    let ips = (families(), 0..6_u8).prop_map(|(families, host)| {
        let ip = |family: &Family| match family {
            Family::V4 => IpAddr::from([10, 0, 0, host]),
            Family::V6 => IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(host)]),
        };
        families.iter().map(ip).collect()
    });
    let ips = prop_oneof![4 => ips, 1 => Just(Vec::new())];
    let named = (select(vec![80_u16, 8080]), prop::option::weighted(0.2, FIRST_PORT - 1..FIRST_PORT + 3));
    let port = named.prop_map(|(port, host_port)| ContainerPort {
        name: Some("http".to_owned()),
        port: PodPort(port),
        protocol: Protocol::Tcp,
        host_port: host_port.map(NodePort),
        host_ip: None,
    });
    let flags = (prop::bool::weighted(0.1), prop::bool::weighted(0.2), 0..3_u8);
    (pod_key(), flags, labels(), ips, port, requests()).prop_map(
        |(key, (is_finished, is_terminating, life), labels, ips, port, requests)| Pod {
            uid: PodUid(format!("{key}-{life}").into()),
            key,
            resource_version: 0,
            labels,
            is_finished,
            is_terminating,
            host_network: false,
            ips,
            ports: vec![port],
            annotation: None,
            annotation_manager: None,
            gate: Gate::Closed { are_containers_ready: true },
            requests,
        },
    )
}

fn node() -> impl Strategy<Value = Node> {
    let internal_ips = select(vec!["192.0.2.1", "192.0.2.2", "192.0.2.1 2001:db8:1::1", "2001:db8:1::2"]);
    internal_ips.prop_map(node_with)
}

/// The agent's Node with these internal addresses, separated by spaces.
pub(super) fn node_with(internal_ips: &str) -> Node {
    Node {
        name: "n1".to_owned(),
        internal_ips: internal_ips.split_whitespace().map(|ip| ip.parse().unwrap()).collect(),
        external_ips: Vec::new(),
    }
}

fn annotation() -> impl Strategy<Value = Option<String>> {
    let entry = (0..6_u16, select(vec![80_u16, 8080]), select(vec!["tcp", "udp"])).prop_map(|(port, pod_port, protocol)| {
        let node_port = FIRST_PORT + port;
        Some(format!(
            r#"[{{"podPort":{pod_port},"nodeIP":"192.0.2.1","nodePort":{node_port},"protocol":"{protocol}","protocols":["{protocol}"]}}]"#
        ))
    });
    prop_oneof![4 => entry, 1 => Just(None), 1 => Just(Some("[]".to_owned())), 1 => Just(Some("{".to_owned()))]
}

pub(super) fn fates() -> impl Strategy<Value = Vec<Fate>> {
    prop::collection::vec(select(vec![Fate::Done, Fate::Done, Fate::Refused, Fate::Lost]), 0..6)
}

/// Events that change only objects of the cluster.
pub(super) fn cluster_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => pod().prop_map(Event::Pod),
        2 => pod_key().prop_map(Event::PodGone),
        6 => service().prop_map(Event::Service),
        1 => service_key().prop_map(Event::ServiceGone),
        1 => node().prop_map(Event::Node),
    ]
}

/// The sum of the weights in [`agent_event`], so that each of its events is as frequent beside other events as its
/// weight says.
pub(super) const AGENT_WEIGHT: u32 = 34;

/// Passes of the agent, answers of the API server, the passage of time, and the use of ports by other processes and by
/// clients.
pub(super) fn agent_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        1 => frontend().prop_map(Event::Steal),
        1 => frontend().prop_map(Event::Return),
        1 => frontend().prop_map(Event::Send),
        1 => frontend().prop_map(Event::Cease),
        6 => (0..4_usize).prop_map(Event::Deliver),
        10 => fates().prop_map(Event::Pass),
        6 => (0..3_usize, fates()).prop_map(|(count, fates)| Event::Serve(count, fates)),
        4 => (0..3_usize).prop_map(Event::Answer),
        2 => (0..50_u64).prop_map(|seconds| Event::Idle(seconds * 1_000)),
        2 => (0..50_u64).prop_map(|seconds| Event::Wait(seconds * 1_000)),
    ]
}

pub(super) fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        16 => cluster_event(),
        1 => (pod_key(), annotation()).prop_map(|(key, annotation)| Event::Tamper(key, annotation)),
        2 => (frontend(), any::<bool>()).prop_map(|(frontend, is_forged)| Event::Meddle(frontend, is_forged)),
        2 => (frontend(), range()).prop_map(|(frontend, range)| Event::MeddleWithSources(frontend, range)),
        1 => prop_oneof![0..8_usize, Just(usize::MAX)].prop_map(Event::Room),
        1 => prop::option::weighted(0.3, frontend()).prop_map(Event::Restart),
        AGENT_WEIGHT => agent_event(),
        2 => Just(Event::Settle),
    ]
}

pub(super) fn start() -> Chaos {
    start_with(ProtocolPairing::Separate)
}

pub(super) fn start_with(protocol_pairing: ProtocolPairing) -> Chaos {
    let mut world = World::new(Settings { protocol_pairing, ..settings("61000-61005") });
    world.put_node(node_with("192.0.2.1 2001:db8:1::1"));
    Chaos::new(world)
}

/// Keeps in a changed Pod what the API server and the kubelet do not change in an existing Pod, and the annotation,
/// which only the agent writes.
pub(super) fn keep_lasting_fields(pod: &mut Pod, former: &Pod) {
    pod.annotation.clone_from(&former.annotation);
    pod.is_finished |= former.is_finished;
    pod.is_terminating |= former.is_terminating;
    pod.ports.clone_from(&former.ports);
}

pub(super) fn happen(chaos: &mut Chaos, event: Event) {
    match event {
        Event::Pod(mut pod) => {
            // A generated uid that ends in `-0` means a new Pod, which gets an unused uid; otherwise the event changes
            // the known Pod.
            let is_new = pod.uid.0.ends_with("-0");
            match chaos.world.pods.get(&pod.key).filter(|_| !is_new) {
                Some(former) => {
                    pod.uid = former.uid.clone();
                    keep_lasting_fields(&mut pod, former);
                }
                None => pod.uid = PodUid(format!("{}-at-{}", pod.key, chaos.world.resource_version).into()),
            }
            chaos.put_pod(pod);
        }
        Event::PodGone(key) => chaos.remove_pod(&key),
        Event::Tamper(key, annotation) => chaos.tamper(&key, annotation),
        Event::Service(service) => chaos.put_service(service),
        Event::ServiceGone(key) => chaos.world.remove_service(&key),
        Event::Node(node) => chaos.world.put_node(node),
        Event::Meddle(frontend, is_forged) => chaos.meddle(frontend, is_forged),
        Event::MeddleWithSources(frontend, range) => chaos.meddle_with_sources(frontend, range),
        Event::Room(room) => chaos.world.room = room,
        Event::Steal(frontend) => chaos.steal(frontend),
        Event::Return(frontend) => drop(chaos.world.stolen.remove(&frontend)),
        Event::Send(frontend) => drop(chaos.world.recent_traffic.insert(frontend)),
        Event::Cease(frontend) => drop(chaos.world.recent_traffic.remove(&frontend)),
        Event::Restart(stolen) => chaos.restart(stolen),
        Event::Deliver(count) => chaos.deliver(count),
        Event::Pass(fates) => drop(chaos.pass(&mut fates.into_iter())),
        Event::Serve(count, fates) => chaos.serve(count, &mut fates.into_iter()),
        Event::Answer(count) => chaos.answer(count),
        Event::Idle(millis) => chaos.world.now = chaos.world.now.plus(millis),
        Event::Wait(millis) => chaos.wait(millis),
        Event::Settle => chaos.settle(),
    }
}
