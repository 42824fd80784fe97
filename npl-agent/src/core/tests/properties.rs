// SPDX-License-Identifier: Apache-2.0
//! Tests properties of the planner that hold after any sequence of events.

use std::{borrow::Cow, collections::BTreeMap, net::IpAddr};

use proptest::{prelude::*, sample::select};

use super::{
    chaos::{Chaos, Fate},
    world::{World, settings},
};
use crate::core::{
    model::{
        ContainerPort, Family, Frontend, Gate, Node, NodePort, ObjectKey, Pod, PodPort, PodUid, Protocol, Service,
        ServicePort, ServiceType, ServiceUid, TargetPort,
        settings::{ProtocolPairing, Settings},
        snapshot::Change,
        sources::{AllowList, SourceRange},
    },
    op::{Op, PodWrite, RecentTraffic},
    publish::problem::{Cause, Problem},
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

fn pod_key() -> impl Strategy<Value = ObjectKey> {
    select(vec!["a/p", "a/q", "a/r", "b/p"]).prop_map(super::script::key)
}

fn service_key() -> impl Strategy<Value = ObjectKey> {
    select(vec!["a/s", "a/t", "b/s"]).prop_map(super::script::key)
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

fn service() -> impl Strategy<Value = Service> {
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

/// Generates a Pod as the kubelet may report it. Two generated Pods sometimes have the same address.
fn pod() -> impl Strategy<Value = Pod> {
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
    (pod_key(), flags, labels(), ips, port).prop_map(|(key, (is_finished, is_terminating, life), labels, ips, port)| {
        Pod {
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
        }
    })
}

fn node() -> impl Strategy<Value = Node> {
    let internal_ips = select(vec!["192.0.2.1", "192.0.2.2", "192.0.2.1 2001:db8:1::1", "2001:db8:1::2"]);
    internal_ips.prop_map(|ips| Node {
        name: "n1".to_owned(),
        internal_ips: ips.split_whitespace().map(|ip| ip.parse().unwrap()).collect(),
        external_ips: Vec::new(),
    })
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

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        16 => cluster_event(),
        1 => (pod_key(), annotation()).prop_map(|(key, annotation)| Event::Tamper(key, annotation)),
        2 => (frontend(), any::<bool>()).prop_map(|(frontend, is_forged)| Event::Meddle(frontend, is_forged)),
        2 => (frontend(), range()).prop_map(|(frontend, range)| Event::MeddleWithSources(frontend, range)),
        1 => prop_oneof![0..8_usize, Just(usize::MAX)].prop_map(Event::Room),
        1 => frontend().prop_map(Event::Steal),
        1 => frontend().prop_map(Event::Return),
        1 => frontend().prop_map(Event::Send),
        1 => frontend().prop_map(Event::Cease),
        1 => prop::option::weighted(0.3, frontend()).prop_map(Event::Restart),
        6 => (0..4_usize).prop_map(Event::Deliver),
        10 => fates().prop_map(Event::Pass),
        6 => (0..3_usize, fates()).prop_map(|(count, fates)| Event::Serve(count, fates)),
        4 => (0..3_usize).prop_map(Event::Answer),
        2 => (0..50_u64).prop_map(|seconds| Event::Idle(seconds * 1_000)),
        2 => (0..50_u64).prop_map(|seconds| Event::Wait(seconds * 1_000)),
        2 => Just(Event::Settle),
    ]
}

pub(super) fn start() -> Chaos {
    start_with(ProtocolPairing::Separate)
}

pub(super) fn start_with(protocol_pairing: ProtocolPairing) -> Chaos {
    let mut world = World::new(Settings { protocol_pairing, ..settings("61000-61005") });
    world.put_node(Node {
        name: "n1".to_owned(),
        internal_ips: vec!["192.0.2.1".parse().unwrap(), "2001:db8:1::1".parse().unwrap()],
        external_ips: Vec::new(),
    });
    Chaos::new(world)
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
                    pod.annotation.clone_from(&former.annotation);
                    pod.is_finished |= former.is_finished;
                    pod.is_terminating |= former.is_terminating;
                    pod.ports.clone_from(&former.ports);
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

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// After every op, every published mapping works, even if earlier ops failed. When ops no longer fail, the state
    /// converges: no op is left.
    #[test]
    fn every_published_mapping_works(events in prop::collection::vec(event(), 0..60)) {
        let mut chaos = start();
        for event in events {
            happen(&mut chaos, event);
        }
        chaos.settle();
    }

    /// If the cluster and the kernel do not change while no agent runs, a restarted agent only binds its sockets, and
    /// may set the annotation of a terminating Pod to `[]`.
    #[test]
    fn a_restart_without_other_changes_only_binds_sockets(events in prop::collection::vec(event(), 0..60)) {
        let mut chaos = start();
        for event in events {
            happen(&mut chaos, event);
        }
        chaos.world.stolen.clear();
        chaos.world.room = usize::MAX;
        chaos.wait(300_000);
        let (before, sources) = (chaos.world.real.mappings.clone(), chaos.world.real.sources.clone());
        let problems: Vec<_> = chaos.world.state.problems().map(Cow::into_owned).collect();
        let is_exhausted = problems.iter().any(|problem| matches!(problem.cause, Cause::RangeExhausted { .. }));
        let is_held_for_later = chaos.world.state.mappings().any(|view| view.backend.is_none());
        let is_contested = problems.iter().any(|problem| matches!(problem.cause, Cause::NodePortConflict { .. }));
        // A node port that is reserved for a Pod without an address is in no annotation. So the restarted agent may
        // allocate the node port to another Pod, and does not know that a Service also has this node port.
        prop_assume!(!is_held_for_later || !(is_exhausted || is_contested));
        // If neither of two Pods with the same address has a mapping, the restarted agent cannot know which of them was
        // served.
        let is_without_trace = |problem: &Problem| {
            let Cause::AddressConflict { ip, .. } = problem.cause else { return false };
            before.values().all(|backend| backend.pod_ip != ip)
        };
        prop_assume!(!problems.iter().any(is_without_trace));
        chaos.world.start();
        for op in chaos.world.settle() {
            // The restarted agent may set the annotation of a terminating Pod to `[]`: the annotation stays only while
            // the agent that reserved the node port runs.
            let is_emptied = |key: &ObjectKey| chaos.world.pods[key].is_terminating;
            let is_expected = match &op {
                Op::Reserve(_, RecentTraffic::Tolerated) => true,
                Op::WritePod { pod, value: PodWrite::Set(value), .. } => value == "[]" && is_emptied(pod),
                Op::Reserve(_, RecentTraffic::Refused)
                | Op::AllowSources(..)
                | Op::UpsertMapping(..)
                | Op::WritePod { .. }
                | Op::RemoveMapping(_)
                | Op::ForgetSources(..)
                | Op::Release(_) => false,
            };
            prop_assert!(is_expected, "{op:?}");
        }
        prop_assert_eq!(before, chaos.world.real.mappings);
        prop_assert_eq!(sources, chaos.world.real.sources);
        prop_assert_eq!(problems, chaos.world.state.problems().map(Cow::into_owned).collect::<Vec<_>>());
    }

    /// Decisions do not depend on the order in which the watches deliver changes.
    #[test]
    fn the_order_of_events_makes_no_difference(
        scene in prop::collection::vec(cluster_event(), 0..20),
        pods in prop::collection::btree_map(pod_key(), pod(), 0..4),
        services in prop::collection::btree_map(service_key(), service(), 0..3),
        order in prop::collection::vec(any::<u32>(), 8),
    ) {
        let run = |is_shuffled: bool| {
            let mut chaos = start();
            for event in scene.clone() {
                happen(&mut chaos, event);
            }
            chaos.settle();
            let pods = pods.iter().zip(1_000_u64..).map(|((key, pod), resource_version)| {
                Change::Pod(Pod { key: key.clone(), resource_version, ..pod.clone() })
            });
            let services = services.iter().map(|(key, it)| Change::Service(Service { key: key.clone(), ..it.clone() }));
            let mut changes: Vec<_> = pods.chain(services).zip(&order).collect();
            if is_shuffled {
                changes.sort_by_key(|(_, rank)| **rank);
            }
            for (change, _) in changes {
 chaos.world.state.apply(change);
 }
            chaos.world.state.pass(chaos.world.now)
        };
        prop_assert_eq!(run(false), run(true));
    }
}

proptest! {
    /// The agent does not open the readiness gate of a Pod that is being deleted. Otherwise, a restarted agent would
    /// open a gate that the earlier agent has left closed.
    #[test]
    fn the_gate_of_a_pod_that_is_being_deleted_stays_closed(pod in pod()) {
        let mut chaos = start();
        let key = pod.key.clone();
        happen(&mut chaos, Event::Pod(Pod { is_terminating: true, ..pod }));
        chaos.wait(300_000);
        prop_assert_eq!(chaos.world.pods[&key].gate, Gate::Closed { are_containers_ready: true });
    }
}
