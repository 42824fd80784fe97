// SPDX-License-Identifier: Apache-2.0
//! Random changes of the cluster and of the Node. Each change is one step, so that a failed test names the changes that
//! preceded the failure.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use npl_testkit::agent::{Agent, Options};
use npl_testkit::client_cgroup::ClientCgroup;
use npl_testkit::cluster::{Entry, PodObject, Port, ServiceObject};
use npl_testkit::echo::{EchoServer, Protocol};
use npl_testkit::random::Random;
use npl_testkit::traffic;
use serde_json::{Value, json};

use crate::world::{NAMESPACE, NODE, POD_PORT, World};

/// The number of names of Pods, of Services, and of addresses and devices of each kind. Each name is free or in use.
const PODS: usize = 6;
const SERVICES: usize = 3;
const OTHERS: usize = 3;

/// An interface index above those of all Pods' devices.
const FIRST_INDEX: usize = 1_000_000;

/// The forwarding modes of restarted agents.
const MODES: [&str; 3] = ["redirect", "stack", "offload"];

/// The annotation that restricts the clients of a Service.
const SOURCES: &str = "nodeportlocal.antrea.io/allowed-source-ranges";

/// The ranges of the clients of the churn, and ranges without clients.
const RANGES: [&str; 2] =
    ["198.51.100.0/24,2001:db8::/32,192.0.2.0/24,10.0.0.0/8", "0.0.0.0/0,::/0,203.0.113.7,203.0.113.64/26"];

/// The time for which a node port serves after the annotation has lost it: the agent's `--drain`.
const DRAIN: Duration = Duration::from_secs(1);

/// The number of changes that a failure shows.
const SHOWN: usize = 40;

/// The time after which an agent that received SIGTERM is killed.
const TERMINATION: Duration = Duration::from_secs(20);

/// Whether agents are restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Restarts {
    Yes,
    No,
}

/// The objects of the churn that exist, and the source of the next change.
pub(super) struct Churn {
    random: Random,
    flags: Vec<String>,
    cgroup: ClientCgroup,
    pods: BTreeMap<usize, Pod>,
    services: BTreeMap<usize, bool>,
    addresses: BTreeSet<usize>,
    devices: BTreeSet<String>,
    /// The number of Pods that have been created, which distinguishes successive Pods with the same name.
    created: usize,
    /// The number of interface indexes that devices of the churn have got.
    devices_created: usize,
    latest: VecDeque<String>,
}

/// A Pod of the churn.
struct Pod {
    /// The name by which the echo server answers.
    server_name: String,
    has_ended: bool,
    _server: EchoServer,
}

/// The kinds of changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Pod,
    Replacement,
    End,
    Service,
    Enabled,
    Ports,
    Sources,
    Address,
    Veth,
    Vlan,
    Request,
    LocalRequest,
    Termination,
    Kill,
}

const KINDS: [Kind; 14] = [
    Kind::Pod,
    Kind::Service,
    Kind::Enabled,
    Kind::Request,
    Kind::LocalRequest,
    Kind::Replacement,
    Kind::Ports,
    Kind::Sources,
    Kind::Address,
    Kind::Veth,
    Kind::Vlan,
    Kind::End,
    Kind::Termination,
    Kind::Kill,
];

impl Churn {
    pub(super) fn new(seed: u64, flags: Vec<String>, cgroup: ClientCgroup) -> Self {
        Self {
            random: Random::new(seed),
            flags,
            cgroup,
            pods: BTreeMap::new(),
            services: BTreeMap::new(),
            addresses: BTreeSet::new(),
            devices: BTreeSet::new(),
            created: 0,
            devices_created: 0,
            latest: VecDeque::new(),
        }
    }

    /// Starts the agent with the first forwarding mode, in place of a running agent.
    pub(super) fn start_agent(&self, world: &mut World) {
        self.replace_agent(world, MODES[0]);
    }

    /// Starts an agent in each forwarding mode, the last one in the first mode. An agent keeps the pins of the programs
    /// that agents with other modes have loaded.
    pub(super) fn start_agent_in_every_mode(&self, world: &mut World) {
        for mode in MODES.into_iter().rev() {
            self.replace_agent(world, mode);
        }
    }

    fn replace_agent(&self, world: &mut World, mode: &str) {
        // A value that is dropped kills its agent; this agent must end before its successor starts.
        world.agent = None;
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).chain(["--forwarding", mode]).collect();
        let options: Options = world.agent_options(&flags);
        world.agent = Some(Agent::start(options).unwrap());
    }

    /// Makes one change of each kind.
    pub(super) fn every_kind(&mut self, world: &mut World, restarts: Restarts, check: &dyn Fn(&str)) {
        for kind in KINDS.into_iter().filter(|kind| kind.is_possible(restarts)) {
            let change = self.make(world, kind);
            check(&change);
        }
    }

    /// Makes a random change. Returns the latest changes.
    pub(super) fn step(&mut self, world: &mut World, restarts: Restarts) -> String {
        // A restart takes as long as about ten other changes, and most changes should meet a running agent.
        let kind = loop {
            let kind = KINDS[self.random.below(KINDS.len())];
            let is_rare = matches!(kind, Kind::Termination | Kind::Kill) && self.random.below(4) != 0;
            if kind.is_possible(restarts) && !is_rare {
                break kind;
            }
        };
        self.make(world, kind)
    }

    fn make(&mut self, world: &mut World, kind: Kind) -> String {
        let (pod, service, other) = (self.random.below(PODS), self.random.below(SERVICES), self.random.below(OTHERS));
        self.latest.push_back(format!("{kind:?}, Pod {pod}, Service {service}, other {other}"));
        if self.latest.len() > SHOWN {
            self.latest.pop_front();
        }
        match kind {
            Kind::Pod if self.pods.contains_key(&pod) => self.delete_pod(world, pod),
            Kind::Pod => self.create_pod(world, pod),
            Kind::Replacement if self.pods.contains_key(&pod) => {
                self.delete_pod(world, pod);
                self.create_pod(world, pod);
            }
            Kind::Replacement => {}
            Kind::End => self.end_pod(world, pod),
            Kind::Service if self.services.contains_key(&service) => self.delete_service(world, service),
            Kind::Service => self.create_service(world, service),
            Kind::Enabled => self.toggle_enabled(world, service),
            Kind::Ports => self.change_ports(world, service),
            Kind::Sources => self.change_sources(world, service),
            Kind::Address => self.toggle_address(world, other),
            Kind::Veth => {
                let batches = veth(other, self.next_index());
                self.toggle_device(world, &format!("up{other}"), &batches);
            }
            Kind::Vlan => {
                let batches = vlan(other, self.next_index());
                self.toggle_device(world, &format!("eth0.10{other}"), &batches);
            }
            Kind::Request => self.request(world, false),
            Kind::LocalRequest => self.request(world, true),
            Kind::Termination => {
                world.agent().terminate(TERMINATION).unwrap();
                self.replace_agent(world, MODES[other]);
            }
            Kind::Kill => {
                world.agent().kill().unwrap();
                self.replace_agent(world, MODES[other]);
            }
        }
        self.latest()
    }

    /// The latest changes, one per line.
    fn latest(&self) -> String {
        self.latest.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }

    fn create_pod(&mut self, world: &mut World, number: usize) {
        let (name, app) = (pod_name(number), app_name(number % SERVICES));
        self.created += 1;
        let server_name = format!("{name}.{}", self.created);
        let pod = world.topology.add_pod(&world.run, &name).unwrap();
        let server = EchoServer::start_in(&pod.netns, &server_name, &[POD_PORT]).unwrap();
        let port = Port::new("web", POD_PORT, Protocol::Tcp);
        world.cluster.create_pod(&PodObject::new(NAMESPACE, &name, NODE, &app).with_ports(vec![port])).unwrap();
        let families = 1 + self.random.below(2);
        let ips: Vec<IpAddr> = pod.ips().into_iter().take(families).collect();
        world.cluster.set_pod_running(NAMESPACE, &name, world.node_ip(), &ips).unwrap();
        self.pods.insert(number, Pod { server_name, has_ended: false, _server: server });
    }

    fn delete_pod(&mut self, world: &mut World, number: usize) {
        world.delete_pod(&pod_name(number));
        self.pods.remove(&number);
    }

    fn end_pod(&mut self, world: &World, number: usize) {
        if let Some(pod) = self.pods.get_mut(&number) {
            let phase = ["Succeeded", "Failed"][self.random.below(2)];
            world.cluster.set_pod_phase(NAMESPACE, &pod_name(number), phase).unwrap();
            pod.has_ended = true;
        }
    }

    fn create_service(&mut self, world: &World, number: usize) {
        let name = app_name(number);
        let port = Port::new("http", 80, Protocol::Tcp).to("web");
        world.cluster.create_service(&ServiceObject::new(NAMESPACE, &name, &name, vec![port]).enabled()).unwrap();
        self.services.insert(number, true);
        patch_service(world, number, &json!({"spec": {"ipFamilyPolicy": "PreferDualStack"}}));
    }

    fn delete_service(&mut self, world: &World, number: usize) {
        world.cluster.delete_service(NAMESPACE, &app_name(number)).unwrap();
        self.services.remove(&number);
    }

    fn toggle_enabled(&mut self, world: &World, number: usize) {
        if let Some(is_enabled) = self.services.get_mut(&number) {
            *is_enabled = !*is_enabled;
            world.cluster.set_service_enabled(NAMESPACE, &app_name(number), *is_enabled).unwrap();
        }
    }

    /// Gives a Service one or two ports, some of which target the same Pod port.
    fn change_ports(&mut self, world: &World, number: usize) {
        if !self.services.contains_key(&number) {
            return;
        }
        let tcp = json!({"name": "http", "port": 80, "protocol": "TCP", "targetPort": "web"});
        let udp = json!({"name": "dns", "port": 53, "protocol": "UDP", "targetPort": POD_PORT});
        let other = json!({"name": "other", "port": 81, "protocol": "TCP", "targetPort": POD_PORT});
        let choices = [json!([tcp]), json!([udp]), json!([tcp, udp]), json!([other, udp])];
        patch_service(world, number, &json!({"spec": {"ports": choices[self.random.below(choices.len())]}}));
    }

    fn change_sources(&mut self, world: &World, number: usize) {
        if self.services.contains_key(&number) {
            let choices = [Value::Null, json!(RANGES[0]), json!(RANGES[1])];
            let value = &choices[self.random.below(choices.len())];
            patch_service(world, number, &json!({"metadata": {"annotations": {SOURCES: value}}}));
        }
    }

    fn toggle_address(&mut self, world: &World, number: usize) {
        let device = ["lo", "eth0", "eth0"][number];
        let verb = if self.addresses.remove(&number) { "del" } else { "add" };
        if verb == "add" {
            self.addresses.insert(number);
        }
        let lines = format!(
            "addr {verb} 192.0.2.7{number}/32 dev {device}\naddr {verb} 2001:db8:0:1::7{number}/128 dev {device}"
        );
        world.topology.node().ip(&lines).unwrap();
    }

    /// Returns the interface index of a new device. The next index is free, too. The kernel would choose an index that
    /// the test kit later gives to the device of a new Pod.
    fn next_index(&mut self) -> usize {
        self.devices_created += 1;
        FIRST_INDEX + 2 * self.devices_created
    }

    /// Removes a device, or adds it by the first of these batches of `ip` commands that succeeds.
    fn toggle_device(&mut self, world: &World, name: &str, batches: &[String]) {
        let node = world.topology.node();
        if self.devices.remove(name) {
            node.ip(&format!("link del {name}")).unwrap();
            return;
        }
        let is_added = batches.iter().any(|batch| node.ip(batch).is_ok());
        assert!(is_added, "{batches:?}");
        self.devices.insert(name.to_owned());
    }

    /// Sends a request to a published node port of the churn. The Pod of the annotation must answer, unless the
    /// annotation changes meanwhile.
    fn request(&mut self, world: &World, is_local: bool) {
        let Some(number) = self.pods.keys().nth(self.random.below(self.pods.len())).copied() else { return };
        let published = || {
            let value = world.cluster.pod_annotation(NAMESPACE, &pod_name(number)).unwrap();
            value.map(|text| Entry::parse(&text).unwrap()).unwrap_or_default()
        };
        let (entries, began) = (published(), Instant::now());
        let Some(entry) = entries.get(self.random.below(entries.len())) else { return };
        let ask = |from| traffic::request(from, entry.protocol, entry.address(), "who?");
        let answer = if is_local {
            self.cgroup.run(|| ask(world.topology.node())).unwrap()
        } else {
            ask(&world.topology.client().netns)
        };
        let pod = &self.pods[&number];
        // Later, another Pod may have the node port.
        if began.elapsed() >= DRAIN || pod.has_ended || published() != entries {
            return;
        }
        let answer = answer.map(|answer| answer.pod);
        assert!(
            matches!(&answer, Ok(name) if *name == pod.server_name),
            "{answer:?} in place of {}, by {entry:?}\n{}",
            pod.server_name,
            self.latest()
        );
    }

    /// Removes all objects of the churn.
    pub(super) fn remove_all(&mut self, world: &mut World) {
        while let Some((&number, _)) = self.pods.first_key_value() {
            self.delete_pod(world, number);
        }
        while let Some((&number, _)) = self.services.first_key_value() {
            self.delete_service(world, number);
        }
        for number in self.addresses.clone() {
            self.toggle_address(world, number);
        }
        for name in self.devices.clone() {
            self.toggle_device(world, &name, &[]);
        }
    }
}

impl Kind {
    fn is_possible(self, restarts: Restarts) -> bool {
        restarts == Restarts::Yes || !matches!(self, Self::Termination | Self::Kill)
    }
}

fn pod_name(number: usize) -> String {
    format!("churn-{number}")
}

fn app_name(number: usize) -> String {
    format!("app-{number}")
}

fn patch_service(world: &World, number: usize, patch: &Value) {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/services/{}", app_name(number));
    world.cluster.client().merge_patch(&path, patch).unwrap();
}

/// Adds a veth pair whose Node end is an uplink. The ends get `index` and the next interface index.
fn veth(number: usize, index: usize) -> Vec<String> {
    let (name, of_peer) = (format!("up{number}"), index + 1);
    vec![format!(
        "link add {name} index {index} type veth peer name {name}-end index {of_peer}\nlink set {name}-end up\nlink set {name} up\n\
         addr add 198.18.{number}.1/24 dev {name}\naddr add fd00:18:{number}::1/64 dev {name} nodad"
    )]
}

/// Adds a VLAN device, or a macvlan device if the kernel does not support VLANs.
fn vlan(number: usize, index: usize) -> Vec<String> {
    let name = format!("eth0.10{number}");
    let kinds = [format!("vlan id 10{number}"), "macvlan mode bridge".to_owned()];
    let batch = |kind: &String| {
        format!(
            "link add link eth0 name {name} index {index} type {kind}\nlink set {name} up\n\
             addr add 198.18.10{number}.1/24 dev {name}\naddr add fd00:18:10{number}::1/64 dev {name} nodad"
        )
    };
    kinds.iter().map(batch).collect()
}
