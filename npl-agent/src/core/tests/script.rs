// SPDX-License-Identifier: Apache-2.0
//! Runs scenarios that are written as text: each line changes the cluster or the Node, and the resulting ops are listed
//! below that line.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::IpAddr,
};

pub(super) use super::events::key;
use super::world::{World, settings};
use crate::core::{
    model::{
        ContainerPort, Family, Frontend, Gate, Node, NodePort, Pod, PodPort, PodUid, Protocol, Service, ServicePort,
        ServiceType, ServiceUid, TargetPort,
        node_port_requests::NodePortRequests,
        sources::{AllowList, SourceRange},
    },
    op::{GateReason, Op, PodWrite},
};

/// Runs a scenario, inserts the ops that result from each line into the scenario's text, and compares the text with the
/// expected text.
///
/// Lines before `start` prepare the initial state. If a line ends in `&`, the agent runs no pass before the next line.
#[track_caller]
pub(super) fn check(story: &str, expect: &expect_test::Expect) {
    expect.assert_eq(&play(story));
}

fn play(story: &str) -> String {
    let mut world = World::new(settings("61000-61003"));
    let mut is_started = false;
    let mut text = String::new();
    for line in story.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let command = line.trim_end_matches('&').trim();
        is_started |= command == "start";
        writeln!(text, "{line}").unwrap();
        let ops = run(&mut world, command);
        show(&mut text, &ops);
        if is_started && !line.ends_with('&') {
            let ops = world.settle();
            world.assert_published_works();
            show(&mut text, &ops);
        }
        if command == "show" {
            show_state(&mut text, &world);
        }
    }
    text
}

fn run(world: &mut World, command: &str) -> Vec<Op> {
    let (verb, rest) = command.split_once(' ').unwrap_or((command, ""));
    let words: Vec<&str> = rest.split_whitespace().collect();
    match verb {
        "range" => world.settings.port_range = rest.parse().unwrap(),
        "format" => world.settings.annotation_format = rest.parse().unwrap(),
        "pairing" => world.settings.protocol_pairing = rest.parse().unwrap(),
        "protocols" => world.settings.protocols = words.iter().map(|word| word.parse().unwrap()).collect(),
        "node-ip" => world.settings.node_ip = rest.parse().unwrap(),
        "no-requests" => world.settings.requested_node_ports = false,
        "retire" => world.settings.is_retiring = true,
        "only-ipv4" => world.settings.families = vec![Family::V4],
        "start" => world.start(),
        "show" => {}
        "node" => world.put_node(node(&words)),
        "service" => world.put_service(service(&words)),
        "unservice" => world.remove_service(&key(words[0])),
        "pod" => {
            let former = world.pods.get(&key(words[0])).cloned();
            world.put_pod(pod(&words, former.as_ref()));
        }
        "gone" => world.remove_pod(&key(words[0])),
        "write" => {
            let (name, value) = rest.split_once(' ').unwrap();
            let mut pod = world.pods[&key(name)].clone();
            pod.annotation = (value != "nothing").then(|| value.to_owned());
            pod.annotation_manager = Some("antrea-agent".into());
            world.put_pod(pod);
        }
        "beside-node" => {
            let pairs = words.iter().map(|word| word.split_once('@').unwrap());
            let found = pairs.map(|(ip, device)| (ip.parse().unwrap(), device.to_owned())).collect();
            world.state.set_pods_on_node_network(found);
        }
        "steal" => drop(world.stolen.insert(frontend(rest))),
        "return" => drop(world.stolen.remove(&frontend(rest))),
        "send" => drop(world.recent_traffic.insert(frontend(rest))),
        "cease" => drop(world.recent_traffic.remove(&frontend(rest))),
        "lose" => {
            world.real.mappings.remove(&frontend(rest));
            world.state.observe(world.real.clone());
        }
        "source-room" => world.room = rest.parse().unwrap(),
        "kernel-sources" => {
            let (frontend_text, range) = rest.split_once(' ').unwrap();
            let ranges = AllowList::read(range).sources.ranges().collect();
            world.real.sources.insert(frontend(frontend_text), ranges);
            world.state.observe(world.real.clone());
        }
        "unbind" => {
            world.real.reservations.remove(&frontend(rest));
            world.state.observe(world.real.clone());
        }
        "api" => world.is_api_down = rest == "down",
        "wait" => return world.wait(rest.strip_suffix('s').unwrap().parse::<u64>().unwrap() * 1_000),
        other => panic!("unknown line: {other}"),
    }
    Vec::new()
}

fn port_and_protocol(text: &str) -> (u16, Protocol) {
    let (port, protocol) = text.split_once('/').unwrap();
    (port.parse().unwrap(), protocol.parse().unwrap())
}

fn frontend(text: &str) -> Frontend {
    let (port, protocol) = port_and_protocol(text);
    Frontend { family: Family::V4, node_port: NodePort(port), protocol }
}

pub(super) fn node(words: &[&str]) -> Node {
    let mut node = Node { name: "n1".to_owned(), internal_ips: Vec::new(), external_ips: Vec::new() };
    for word in words {
        match word.split_once('=') {
            Some(("external", ip)) => node.external_ips.push(ip.parse().unwrap()),
            _ => node.internal_ips.push(word.parse().unwrap()),
        }
    }
    node
}

pub(super) fn service(words: &[&str]) -> Service {
    let mut service = Service {
        key: key(words[0]),
        uid: ServiceUid(words[0].into()),
        is_enabled: true,
        service_type: ServiceType::ClusterIp,
        selector: BTreeMap::new(),
        ports: Vec::new(),
        families: vec![Family::V4],
        node_ports: BTreeSet::new(),
        allow_list: AllowList::ABSENT,
    };
    for word in &words[1..] {
        if let Some(ranges) = word.strip_prefix("allow:") {
            service.allow_list = AllowList::read(ranges);
        } else if let Some((label, value)) = word.split_once('=') {
            service.selector.insert(label.to_owned(), value.to_owned());
        } else if let Some((target, protocol)) = word.split_once('/') {
            let target =
                target.parse().map_or_else(|_| TargetPort::Name(target.to_owned()), |n| TargetPort::Number(PodPort(n)));
            service.ports.push(ServicePort { protocol: protocol.parse().unwrap(), target });
        } else {
            match *word {
                port if port.parse::<u16>().is_ok() => {
                    service.node_ports.insert(NodePort(port.parse().unwrap()));
                }
                "off" => service.is_enabled = false,
                "nodeport" => service.service_type = ServiceType::NodePort,
                "loadbalancer" => service.service_type = ServiceType::LoadBalancer,
                "external-name" => service.service_type = ServiceType::ExternalName,
                "dual" => service.families = vec![Family::V4, Family::V6],
                "ipv6" => service.families = vec![Family::V6],
                "no-family" => service.families = Vec::new(),
                other => panic!("unknown word for a Service: {other}"),
            }
        }
    }
    service
}

/// Returns a model cluster with this port range, a Node, and a Service that requests TCP port 8080 of Pods with the
/// label `app=x`. The agent has not started.
pub(super) fn with_service(port_range: &str) -> World {
    let mut world = World::new(settings(port_range));
    world.put_node(node(&["192.0.2.1"]));
    world.put_service(service(&["a/s", "app=x", "8080/tcp"]));
    world
}

/// Returns a Pod as the kubelet reports it, with the uid and annotation of `former`.
pub(super) fn pod(words: &[&str], former: Option<&Pod>) -> Pod {
    let key = key(words[0]);
    let mut pod = Pod {
        uid: former.map_or_else(|| PodUid(key.to_string().into()), |former| former.uid.clone()),
        annotation: former.and_then(|former| former.annotation.clone()),
        key,
        resource_version: 0,
        labels: BTreeMap::new(),
        is_finished: false,
        is_terminating: false,
        host_network: false,
        ips: Vec::new(),
        ports: Vec::new(),
        annotation_manager: former.and_then(|former| former.annotation_manager.clone()),
        gate: former.map_or(Gate::Absent, |former| former.gate),
        requests: former.map(|former| former.requests.clone()).unwrap_or_default(),
    };
    for word in &words[1..] {
        match word.split_once('=') {
            Some(("request", requests)) => pod.requests = NodePortRequests::read(requests),
            Some(("uid", uid)) => pod.uid = PodUid(uid.into()),
            Some(("port", port)) => pod.ports.push(container_port(port)),
            Some((label, value)) => drop(pod.labels.insert(label.to_owned(), value.to_owned())),
            None => match *word {
                "gated" if pod.gate == Gate::Open => {}
                "gated" => pod.gate = Gate::Closed { are_containers_ready: false },
                "gated-ready" if pod.gate == Gate::Open => {}
                "gated-ready" => pod.gate = Gate::Closed { are_containers_ready: true },
                "finished" => pod.is_finished = true,
                "terminating" => pod.is_terminating = true,
                "hostnet" => pod.host_network = true,
                ip => pod.ips.push(ip.parse().unwrap_or_else(|_| panic!("unknown word for a Pod: {ip}"))),
            },
        }
    }
    pod
}

/// Parses `name:port/protocol`, followed by `@host_port` or `@host_ip:host_port` if the container port has a host port.
fn container_port(text: &str) -> ContainerPort {
    let (name, rest) = text.split_once(':').unwrap();
    let (port, host) = rest.split_once('@').map_or((rest, None), |(port, host)| (port, Some(host)));
    let (port, protocol) = port_and_protocol(port);
    let (host_ip, host_port) = match host.map(|host| host.split_once(':').ok_or(host)) {
        Some(Ok((ip, port))) => (Some(ip.parse::<IpAddr>().unwrap()), Some(port)),
        Some(Err(port)) => (None, Some(port)),
        None => (None, None),
    };
    let host_port = host_port.map(|port| NodePort(port.parse().unwrap()));
    ContainerPort { name: Some(name.to_owned()), port: PodPort(port), protocol, host_port, host_ip }
}

fn show(text: &mut String, ops: &[Op]) {
    for same in ops.chunk_by(|one, next| one == next) {
        let times = if same.len() > 1 { format!(", {} times", same.len()) } else { String::new() };
        writeln!(text, "    {}{times}", described(&same[0])).unwrap();
    }
}

fn described(op: &Op) -> String {
    match op {
        Op::Reserve(frontend, _) => format!("reserve {frontend}"),
        Op::AllowSources(frontend, ranges) => format!("allow {frontend} from {}", list(ranges)),
        Op::UpsertMapping(frontend, to) => {
            let restricted = if to.is_restricted { ", restricted" } else { "" };
            format!("map {frontend} -> {} {}{restricted}", to.pod_ip, to.pod_port)
        }
        Op::WritePod { pod, value: PodWrite::Set(value), .. } => format!("annotate {pod} {}", entries(value)),
        Op::WritePod { pod, value: PodWrite::Withdraw, .. } => format!("withdraw {pod}"),
        Op::WritePod { pod, value: PodWrite::OpenGate(GateReason::Published), .. } => format!("open the gate of {pod}"),
        Op::WritePod { pod, value: PodWrite::OpenGate(reason), .. } => {
            format!("open the gate of {pod}: {}", reason.as_str())
        }
        Op::RemoveMapping(frontend) => format!("unmap {frontend}"),
        Op::ForgetSources(frontend, ranges) => format!("forget {frontend} from {}", list(ranges)),
        Op::Release(frontend) => format!("release {frontend}"),
    }
}

fn list(ranges: &BTreeSet<SourceRange>) -> String {
    ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// Formats each entry of an annotation as `podPort=nodeIP:nodePort/protocol`.
fn entries(value: &str) -> String {
    let values: Vec<serde_json::Value> = serde_json::from_str(value).unwrap();
    let entry = |value: &serde_json::Value| {
        let text = |field: &str| value[field].as_str().unwrap().to_owned();
        let protocols = value["protocols"].as_array().into_iter().flatten().filter_map(serde_json::Value::as_str);
        let protocol =
            value["protocol"].as_str().map_or_else(|| protocols.collect::<Vec<_>>().join("+"), str::to_owned);
        format!("{}={}:{}/{protocol}", value["podPort"], text("nodeIP"), value["nodePort"])
    };
    if values.is_empty() { "nothing".to_owned() } else { values.iter().map(entry).collect::<Vec<_>>().join(" ") }
}

fn show_state(text: &mut String, world: &World) {
    for mapping in world.state.mappings() {
        let pod = mapping.pod.map_or_else(|| "nobody".to_owned(), ToString::to_string);
        writeln!(text, "    {} of {pod}: {:?}", mapping.frontend, mapping.phase).unwrap();
    }
    for problem in world.state.problems() {
        writeln!(text, "    {}: {problem}", problem.reason()).unwrap();
    }
    if world.state.is_retired() {
        writeln!(text, "    retired").unwrap();
    }
}
