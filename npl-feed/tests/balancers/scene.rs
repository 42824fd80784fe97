// SPDX-License-Identifier: Apache-2.0
//! A Service behind a load balancer, and the events in its life.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    hash::{BuildHasher as _, Hasher as _, RandomState},
    net::SocketAddr,
    ops::Deref,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use clap::Parser as _;
use npl_agent::core::model::{
    self, Family, Gate, ObjectKey, PodPort, PodUid, Protocol, ServicePort, ServiceType, ServiceUid, TargetPort,
    node_port_requests::NodePortRequests, sources::AllowList,
};
use npl_feed::{
    config::Config,
    connection_limits::ConnectionLimits,
    core::model::{Change, NamedPort, Node, Pod, Service},
    follow, run,
    status::Status,
};
use npl_testkit::load_balancers::{ENVOY, LoadBalancer};
use tokio::{
    runtime::Runtime,
    sync::{mpsc, watch},
    task::JoinSet,
};

use crate::{
    backends::Backends,
    load::{self, Load, Seen},
    network::NODES,
};

/// The timeout of each wait.
pub(crate) const LIMIT: Duration = Duration::from_mins(3);
/// If this many successive requests reach other Pods, the test assumes that the load balancer no longer uses a deleted
/// Pod.
pub(crate) const QUIET: usize = 150;
/// The port on which each load balancer listens in docs/load-balancers.md.
pub(crate) const BALANCER: &str = "127.0.0.1:8000";

/// All running parts of a test. Fields are dropped in declaration order, so the clients of `load` stop first.
pub(crate) struct Scene {
    load: Option<Load>,
    process: Child,
    log: PathBuf,
    /// The replicas of the feed; `None` while the replica is stopped.
    feeds: Vec<Option<Feed>>,
    backends: Backends,
    /// The cluster's Pods by name.
    pods: BTreeMap<String, Pod>,
    started: u16,
    clients: Runtime,
    name: &'static str,
    _folder: Folder,
}

/// A feed whose cluster objects come from the test.
pub(crate) struct Feed {
    runtime: Runtime,
    status: Arc<Status>,
    changes: mpsc::Sender<Change>,
}

impl Feed {
    /// Starts a replica that listens on the address of a Node.
    pub(crate) fn start(node_ip: &str, pods: Vec<Pod>) -> Self {
        let at = |port: u16| format!("{node_ip}:{port}");
        let arguments = ["npl-feed", "--xds", &at(30180), "--http", &at(30181), "--dns", &at(30153), "--drain", "3s"];
        let config = Config::try_parse_from(arguments).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (sender, changes) = mpsc::channel(16);
        let (publisher, published) = watch::channel(None);
        let status = Arc::new(Status::default());
        runtime.block_on(async {
            let mut tasks = JoinSet::new();
            run::serve(&config, ConnectionLimits::LARGEST, &published, &status, &mut tasks).await.unwrap();
            tasks.spawn(follow::run(changes, config.port_range, config.drain, Arc::clone(&status), publisher));
            tasks.detach_all();
        });
        let feed = Self { runtime, status, changes: sender };
        let nodes = (0..NODES.len()).map(|index| node(index, "")).collect();
        feed.send(Change::Nodes(nodes));
        feed.send(Change::Services(vec![service("web"), service("other")]));
        feed.send(Change::Pods(pods));
        feed
    }

    pub(crate) fn send(&self, change: Change) {
        self.runtime.block_on(self.changes.send(change)).unwrap();
    }

    /// Whether a client has accepted xDS resources. Panics if a client has rejected a resource or has requested an
    /// unknown type.
    pub(crate) fn has_accepted_resources(&self) -> bool {
        let metrics = self.status.encode().unwrap();
        let count = |event: &str| {
            let mark = format!("event=\"{event}\"");
            metrics.lines().filter(|line| line.contains(&mark) && !line.ends_with(" 0")).count()
        };
        assert_eq!(count("nack") + count("unknown_type"), 0, "{metrics}");
        count("ack") > 0
    }
}

impl Scene {
    /// Starts two Pods of the Service, a Pod of another Service, `replicas` replicas of the feed, and the load balancer
    /// under load. Only the first replica is ever stopped. In the load balancer's configuration, the first text of each
    /// pair of `replacements` is replaced by the second one.
    pub(crate) fn start(balancer: &LoadBalancer, replicas: usize, replacements: &[(&str, &str)]) -> Self {
        let clients = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let folder = Folder::new(balancer.name);
        let mut backends = Backends::new(clients.handle());
        let mut pods = BTreeMap::new();
        for (name, app, number) in [("web-0", "web", 0), ("web-1", "web", 1), ("other-0", "other", 2)] {
            let pod = pod(name, app, number);
            backends.start(name, address(number));
            pods.insert(name.to_owned(), pod);
        }
        let replicas = NODES.iter().take(replicas);
        let feeds = replicas.map(|node_ip| Some(Feed::start(node_ip, pods.values().cloned().collect()))).collect();
        let log = folder.join("log");
        let process = launch(balancer, &folder, &log, replacements);
        let name = balancer.name;
        let (load, started) = (None, 3);
        let mut scene = Self { load, process, log, feeds, backends, pods, started, clients, name, _folder: folder };
        scene.wait("the first answer", |scene| {
            let answer = scene.clients.block_on(load::request(BALANCER.parse().unwrap()));
            answer.is_ok_and(|pod| pod.starts_with("web-"))
        });
        scene.load = Some(Load::start(scene.clients.handle(), BALANCER.parse().unwrap()));
        scene.wait_for_all();
        scene
    }

    /// Adds `count` Pods. Four or more Pods outnumber the Nodes, so at least two of the Pods are on the same Node.
    pub(crate) fn scale_up(&mut self, count: usize) {
        let started = Instant::now();
        let names: Vec<String> = (0..count).map(|_| self.add()).collect();
        for name in names {
            self.wait_until_answering(&name);
            println!("{}: {name} answers {:?} after its annotation", self.name, started.elapsed());
        }
        self.wait_for_all();
    }

    /// Replaces half of the Pods at a time: new Pods become ready, then the old Pods are deleted, drain and stop.
    pub(crate) fn roll(&mut self) {
        let old = self.of_web();
        for half in old.chunks(old.len().div_ceil(2)) {
            let new: Vec<String> = half.iter().map(|_| self.add()).collect();
            for name in &new {
                self.wait_until_answering(name);
            }
            self.drain_and_end(half);
        }
        self.wait_for_all();
    }

    /// Crashes a Pod without a drain: first, the Pod's server resets connections; then no process listens at the Pod's
    /// address. The load balancer has to repeat requests at another Pod until the feed reports the crashed Pod as not
    /// ready.
    pub(crate) fn lose_a_pod(&mut self) {
        let lost = self.of_web().remove(0);
        self.backends.crash(&lost);
        self.pass(QUIET);
        self.backends.stop(&lost);
        self.pass(2 * QUIET);
        self.change(&lost, |pod| pod.is_ready = false);
        self.pass(QUIET);
        self.remove(&lost);
        self.wait_for_all();
    }

    /// Kills the first replica of the feed, adds a Pod to the Service, and starts the replica again.
    pub(crate) fn be_away(&mut self) {
        let feed = self.feeds[0].take().unwrap();
        feed.runtime.shutdown_timeout(LIMIT);
        self.pass(2 * QUIET);
        let new = self.add();
        let pods = self.pods.values().cloned().collect();
        self.feeds[0] = Some(Feed::start(NODES[0], pods));
        self.wait_until_answering(&new);
        self.wait_for_all();
    }

    /// Scales the Service down to one Pod.
    pub(crate) fn scale_down(&mut self) {
        self.drain_and_end(&self.of_web().split_off(1));
        self.wait_for_all();
    }

    /// Checks that no request failed, and that no Pod of another Service answered a request.
    pub(crate) fn finish(mut self) {
        // Envoy acknowledges each valid xDS resource; the other load balancers do not use xDS.
        let feed = self.feeds[0].as_ref().unwrap();
        assert_eq!(feed.has_accepted_resources(), self.name == ENVOY.name);
        let seen = self.load.as_ref().unwrap().seen();
        self.load = None;
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        println!("{}: {} requests, {} lost, {} Pods", self.name, seen.requests, seen.lost.len(), seen.answers.len());
        assert!(seen.lost.is_empty(), "{} of {} lost: {:#?}", seen.lost.len(), seen.requests, seen.lost);
        let others: Vec<_> = seen.answers.keys().filter(|pod| !pod.starts_with("web-")).collect();
        assert!(others.is_empty(), "Pods of other Services answered: {others:?}");
    }

    fn of_web(&self) -> Vec<String> {
        self.pods.keys().filter(|name| name.starts_with("web-")).cloned().collect()
    }

    fn add(&mut self) -> String {
        let number = self.started;
        self.started += 1;
        // With three digits, the alphabetical order of these names is the order in which the Pods start.
        let name = format!("web-{number:03}");
        self.backends.start(&name, address(number));
        self.put(&name, &pod(&name, "web", number));
        name
    }

    fn put(&mut self, name: &str, pod: &Pod) {
        self.pods.insert(name.to_owned(), pod.clone());
        for feed in self.feeds.iter().flatten() {
            feed.send(Change::Pod(Box::new(pod.clone())));
        }
    }

    fn change(&mut self, name: &str, change: impl FnOnce(&mut Pod)) {
        let mut pod = self.pods[name].clone();
        change(&mut pod);
        self.put(name, &pod);
    }

    fn remove(&mut self, name: &str) {
        let pod = self.pods.remove(name).unwrap();
        for feed in self.feeds.iter().flatten() {
            feed.send(Change::PodGone(pod.object.key.clone(), pod.object.uid.clone()));
        }
    }

    /// Deletes Pods. As with a `preStop` sleep, the Pods stop only after the load balancer sends them no more requests.
    fn drain_and_end(&mut self, names: &[String]) {
        let started = Instant::now();
        for name in names {
            self.change(name, |pod| pod.object.is_terminating = true);
        }
        let deleted_at = self.seen().requests;
        self.wait(&format!("the end of requests to {names:?}"), |scene| {
            let seen = scene.seen();
            let last = names.iter().filter_map(|name| seen.answers.get(name)).map(|(_, last)| *last).max();
            seen.requests > last.unwrap_or_default().max(deleted_at) + QUIET
        });
        println!("{}: requests to {names:?} ended {:?} after the Pods' deletion", self.name, started.elapsed());
        for name in names {
            self.backends.stop(name);
            self.remove(name);
        }
    }

    fn seen(&self) -> Seen {
        self.load.as_ref().unwrap().seen()
    }

    fn wait_until_answering(&mut self, name: &str) {
        let before = self.seen().answers.get(name).map_or(0, |(count, _)| *count);
        self.wait(&format!("an answer of {name}"), |scene| {
            scene.seen().answers.get(name).is_some_and(|(count, _)| *count > before)
        });
    }

    /// Waits until each Pod of the Service has answered a request.
    fn wait_for_all(&mut self) {
        for name in self.of_web() {
            self.wait_until_answering(&name);
        }
    }

    /// Waits for a number of further requests.
    fn pass(&mut self, requests: usize) {
        let until = self.seen().requests + requests;
        self.wait("further requests", |scene| scene.seen().requests >= until);
    }

    fn wait(&mut self, what: &str, is_over: impl Fn(&Self) -> bool) {
        let until = Instant::now() + LIMIT;
        while !is_over(self) {
            let ended = self.process.try_wait().unwrap();
            if ended.is_some() || Instant::now() > until {
                let log = fs::read_to_string(&self.log).unwrap_or_default();
                let lost = self.load.as_ref().map(|load| load.seen().lost);
                panic!("{}: no {what}; ended: {ended:?}; lost: {lost:#?}\n{}", self.name, last_lines(&log));
            }
            self.clients.block_on(async { tokio::time::sleep(Duration::from_millis(5)).await });
        }
    }
}

pub(crate) fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

/// Starts a load balancer with the configuration that the document shows. In this configuration, the first text of each
/// pair of `replacements` is replaced by the second one.
pub(crate) fn launch(balancer: &LoadBalancer, folder: &Path, log: &Path, replacements: &[(&str, &str)]) -> Child {
    let output = fs::File::create(log).unwrap();
    let mut command = Command::new(balancer.program().unwrap());
    balancer.configure(&mut command, folder, replacements).unwrap();
    command.process_group(0).stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
    command.spawn().unwrap_or_else(|error| panic!("start {}: {error}", balancer.name))
}

/// A directory for the files of a test. Dropping this value removes the directory.
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// Creates a directory with a random name. A PID would not be unique, because processes in other PID namespaces may
    /// have the same one.
    pub(crate) fn new(purpose: &str) -> Self {
        let random = RandomState::new().build_hasher().finish();
        let folder = env::temp_dir().join(format!("npl-feed-{purpose}-{random:016x}"));
        fs::create_dir(&folder).unwrap();
        Self(folder)
    }
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let removed = fs::remove_dir_all(&self.0);
        // If the test has failed, the test's error is shown instead of an error of the removal.
        if !thread::panicking() {
            removed.unwrap();
        }
    }
}

/// The address of a Pod's node port.
pub(crate) fn address(number: u16) -> SocketAddr {
    let node = NODES[usize::from(number) % NODES.len()];
    SocketAddr::new(node.parse().unwrap(), 61_000 + number)
}

pub(crate) fn pod(name: &str, app: &str, number: u16) -> Pod {
    let at = address(number);
    let annotation =
        format!(r#"[{{"podPort":8080,"nodeIP":"{}","nodePort":{},"protocol":"tcp"}}]"#, at.ip(), at.port());
    let object = model::Pod {
        key: ObjectKey::new("default", name),
        uid: PodUid(name.into()),
        resource_version: 1,
        labels: BTreeMap::from([("app".to_owned(), app.to_owned())]),
        is_finished: false,
        is_terminating: false,
        host_network: false,
        ips: Vec::new(),
        ports: Vec::new(),
        annotation: Some(annotation),
        annotation_manager: None,
        requests: NodePortRequests::default(),
        gate: Gate::Absent,
    };
    let node = format!("node-{}", usize::from(number) % NODES.len());
    Pod { object, node: Some(node.into()), is_ready: true, created: 0 }
}

fn service(name: &str) -> Service {
    let object = model::Service {
        key: ObjectKey::new("default", name),
        uid: ServiceUid(name.into()),
        is_enabled: true,
        service_type: ServiceType::ClusterIp,
        selector: BTreeMap::from([("app".to_owned(), name.to_owned())]),
        ports: Vec::new(),
        node_ports: BTreeSet::new(),
        families: vec![Family::V4],
        allow_list: AllowList::ABSENT,
    };
    let target = ServicePort { protocol: Protocol::Tcp, target: TargetPort::Number(PodPort(8080)) };
    Service { object, ports: vec![NamedPort { name: Some("http".into()), number: 80, target }] }
}

/// The Node with an index of [`NODES`].
pub(crate) fn node(index: usize, zone: &str) -> Node {
    let object = model::Node {
        name: format!("node-{index}"),
        internal_ips: vec![NODES[index].parse().unwrap()],
        external_ips: Vec::new(),
    };
    Node { object, zone: zone.into() }
}
