// SPDX-License-Identifier: Apache-2.0
//! A test environment: one Node with Pods and a client, a real control plane, and the agent with the privileges of
//! `deploy/npl.yaml`.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use npl_agent::core::repairs::RepairedObject;
use npl_common::names;
use npl_testkit::agent::{Agent, Options};
use npl_testkit::client_cgroup::ClientCgroup;
use npl_testkit::cluster::{AnnotationLog, Cluster, Entry, PodObject, Port, ServiceObject};
use npl_testkit::control_plane::{AGENT_USER, AuditLog, ControlPlane, Pool, PooledControlPlane};
use npl_testkit::echo::{EchoServer, Protocol};
use npl_testkit::mounts::{self, BpfFs};
use npl_testkit::poll;
use npl_testkit::proxy::Proxy;
use npl_testkit::run::Run;
use npl_testkit::tools;
use npl_testkit::topology::{self, Topology};
use npl_testkit::traffic::{self, Request};
use serde_json::json;

/// The name of the Node.
pub(crate) const NODE: &str = "node-1";
/// The namespace of the user's objects.
pub(crate) const NAMESPACE: &str = "shop";
/// The port on which the Pods listen.
pub(crate) const POD_PORT: u16 = 8080;
/// The time limit of a wait, except where a test needs a longer one.
pub(crate) const LIMIT: Duration = Duration::from_mins(1);
/// The interval at which the agent's connections are closed until the agent logs the expected words. Within the
/// interval, the agent can retry several times.
const AGAIN: Duration = Duration::from_secs(20);

/// The control planes of tests that do not change the API server itself.
static PLANES: Pool = Pool::new(prepare);

/// A control plane of a test. Only a test's own control plane can be stopped or damaged.
pub(crate) enum Plane {
    Own(ControlPlane),
    Pooled(PooledControlPlane),
}

/// The parts of the environment. Fields are dropped in declaration order.
pub(crate) struct World {
    pub(crate) agent: Option<Agent>,
    pub(crate) proxy: Option<Proxy>,
    pub(crate) servers: Vec<EchoServer>,
    pub(crate) annotations: AnnotationLog,
    pub(crate) cluster: Cluster,
    pub(crate) plane: Plane,
    pub(crate) topology: Topology,
    pub(crate) bpffs: BpfFs,
    pub(crate) run: Run,
}

impl World {
    /// Creates a control plane and the network of a Node, without a Node object, Pods or an agent.
    pub(crate) fn new() -> Self {
        Self::with_clients(1)
    }

    /// Creates an environment as [`Self::new`] does, with this number of clients. Each client has an uplink of its own.
    pub(crate) fn with_clients(clients: u8) -> Self {
        let (run, topology) = start(clients);
        let plane = Plane::Pooled(PLANES.take(topology.node()).unwrap());
        Self::with_plane(run, topology, plane)
    }

    /// Creates an environment as [`Self::new`] does, with a control plane that the test may stop and damage.
    pub(crate) fn with_own_plane() -> Self {
        let (run, topology) = start(1);
        Self::with_own(run, topology, &[])
    }

    /// Creates an environment as [`Self::new`] does, whose API server logs the agent's requests.
    pub(crate) fn audited() -> (Self, AuditLog) {
        Self::audited_with_flags(&[])
    }

    /// Creates an environment as [`Self::audited`] does, with further flags of the API server.
    pub(crate) fn audited_with_flags(flags: &[&str]) -> (Self, AuditLog) {
        let (run, topology) = start(1);
        let audit = AuditLog::new(&run).unwrap();
        let flags: Vec<String> = audit.flags().into_iter().chain(flags.iter().map(ToString::to_string)).collect();
        (Self::with_own(run, topology, &flags), audit)
    }

    /// Starts a control plane with further flags of the API server, which no other test uses.
    fn with_own(run: Run, topology: Topology, flags: &[String]) -> Self {
        let plane = ControlPlane::start_with_flags(&run, Some(topology.node()), flags).unwrap();
        prepare(&plane).unwrap();
        Self::with_plane(run, topology, Plane::Own(plane))
    }

    fn with_plane(run: Run, topology: Topology, plane: Plane) -> Self {
        let bpffs = run.bpffs("bpf").unwrap();
        let cluster = Cluster::new(&plane).unwrap();
        let annotations = cluster.watch_mappings(NAMESPACE, Duration::from_mins(10)).unwrap();
        Self { agent: None, proxy: None, servers: Vec::new(), annotations, cluster, plane, topology, bpffs, run }
    }

    /// Creates a cluster with a Node object and an agent with these flags.
    pub(crate) fn with_agent(flags: &[&str]) -> Self {
        let mut world = Self::new();
        world.create_node();
        world.start_agent(flags);
        world
    }

    /// Creates a cluster as [`Self::with_agent`] does, with socket programs for a cgroup, and with one served Pod.
    pub(crate) fn with_local_clients(flags: &[&str]) -> (Self, ClientCgroup) {
        let mut world = Self::new();
        let (cgroup, shown) = world.client_cgroup();
        world.create_node();
        world.start_agent(&[&["--cgroup", &shown], flags].concat());
        world.serve(&["web-0"]);
        (world, cgroup)
    }

    /// Creates a cgroup for local clients. Returns the cgroup, and the path for `--cgroup`.
    pub(crate) fn client_cgroup(&self) -> (ClientCgroup, String) {
        let cgroup = self.run.client_cgroup("clients").unwrap();
        // /sys does not show the Node's cgroups, as in the DaemonSet's container, so the hierarchy is mounted at
        // another path.
        let shown = self.run.file("cgroup");
        mounts::bind(cgroup.path(), &shown).unwrap();
        (cgroup, shown.to_str().unwrap().to_owned())
    }

    /// Creates a cluster as [`Self::with_agent`] does, with a proxy between the agent and the API server. The test
    /// itself bypasses the proxy.
    pub(crate) fn behind_proxy(flags: &[&str]) -> Self {
        let mut world = Self::behind_proxy_without_agent();
        world.start_agent(flags);
        world
    }

    /// Creates a cluster as [`Self::behind_proxy`] does, without an agent.
    pub(crate) fn behind_proxy_without_agent() -> Self {
        Self::new().through_proxy()
    }

    /// Adds a proxy as [`Self::behind_proxy`] does, and the Node object.
    pub(crate) fn through_proxy(mut self) -> Self {
        self.proxy = Some(Proxy::start(self.topology.node(), self.plane.address()).unwrap());
        self.create_node();
        self
    }

    /// The control plane of a test that may stop and damage it.
    pub(crate) fn own_plane(&mut self) -> &mut ControlPlane {
        let own = match &mut self.plane {
            Plane::Own(plane) => Ok(plane),
            Plane::Pooled(_shared) => Err("other tests use this control plane: create `World::with_own_plane`"),
        };
        own.unwrap()
    }

    /// The directory in which agents pin maps, programs and links.
    pub(crate) fn pins(&self) -> PathBuf {
        self.bpffs.path().join(names::PIN_ROOT).join(format!("v{}", names::ABI_VERSION))
    }

    pub(crate) fn proxy(&self) -> &Proxy {
        self.proxy.as_ref().unwrap()
    }

    pub(crate) fn create_node(&self) {
        self.cluster.create_node(NODE, &[self.node_ip()]).unwrap();
    }

    pub(crate) fn agent_options(&self, flags: &[&str]) -> Options {
        let node = self.topology.node();
        let kubeconfig = match &self.proxy {
            Some(proxy) => self.plane.agent_kubeconfig_by(proxy.port()).unwrap(),
            None => self.plane.agent_kubeconfig(),
        };
        let log = self.run.file("npl-agent.log");
        let mut options = Options::new(node, NODE, &kubeconfig, self.bpffs.path(), &log).unwrap();
        options.has_perfmon = true;
        options.flags.extend(flags.iter().map(ToString::to_string));
        options
    }

    pub(crate) fn start_agent(&mut self, flags: &[&str]) {
        self.agent = Some(Agent::start(self.agent_options(flags)).unwrap());
    }

    pub(crate) fn agent(&mut self) -> &mut Agent {
        self.agent.as_mut().unwrap()
    }

    pub(crate) fn node_ip(&self) -> IpAddr {
        self.topology.node_addresses().v4.into()
    }

    pub(crate) fn client_ip(&self) -> IpAddr {
        self.topology.client().addresses.v4.into()
    }

    /// Creates a running Pod of the app `web` with an echo server, as scheduler and kubelet would.
    pub(crate) fn create_pod(&mut self, name: &str) {
        self.create_pod_with_port(name, Port::new("web", POD_PORT, Protocol::Tcp));
    }

    /// Creates a Pod as [`Self::create_pod`] does, but with the declared port `port`.
    pub(crate) fn create_pod_with_port(&mut self, name: &str, port: Port) {
        let ip = self.start_pod(name, port);
        self.cluster.set_pod_running(NAMESPACE, name, self.node_ip(), &[ip]).unwrap();
    }

    /// Creates a Pod as [`Self::create_pod`] does, with a status that contains only the phase `Pending` and the Pod's
    /// address.
    pub(crate) fn create_unready_pod(&mut self, name: &str) {
        let ip = self.start_pod(name, Port::new("web", POD_PORT, Protocol::Tcp)).to_string();
        let status = json!({"status": {"phase": "Pending", "podIP": ip, "podIPs": [{"ip": ip}]}});
        self.cluster
            .client()
            .merge_patch(&format!("/api/v1/namespaces/{NAMESPACE}/pods/{name}/status"), &status)
            .unwrap();
    }

    /// Creates a Pod's network and object, without the kubelet's status.
    fn start_pod(&mut self, name: &str, port: Port) -> IpAddr {
        let pod = self.topology.add_pod(&self.run, name).unwrap();
        self.servers.push(EchoServer::start_in(&pod.netns, name, &[POD_PORT]).unwrap());
        self.cluster.create_pod(&PodObject::new(NAMESPACE, name, NODE, "web").with_ports(vec![port])).unwrap();
        pod.ip().into()
    }

    /// Deletes a Pod's object, network and server.
    pub(crate) fn delete_pod(&mut self, name: &str) {
        self.cluster.delete_pod(NAMESPACE, name).unwrap();
        self.topology.remove_pod(name).unwrap();
    }

    /// Creates the Service `web` for the app `web`. The target of its TCP port is a port name, and that of its UDP port
    /// a port number. The Service lacks the annotation that enables node ports.
    pub(crate) fn create_service(&self) {
        let tcp = Port::new("http", 80, Protocol::Tcp).to("web");
        let udp = Port::new("dns", 53, Protocol::Udp).to(POD_PORT);
        self.cluster.create_service(&ServiceObject::new(NAMESPACE, "web", "web", vec![tcp, udp])).unwrap();
    }

    /// Creates the Service `web`, enables it, and creates these Pods. Returns when each Pod is served.
    pub(crate) fn serve(&mut self, pods: &[&str]) {
        self.create_service();
        self.enable_service();
        for pod in pods {
            self.create_pod(pod);
            self.assert_served(pod);
        }
    }

    pub(crate) fn enable_service(&self) {
        self.cluster.set_service_enabled(NAMESPACE, "web", true).unwrap();
    }

    /// Waits until the Pod's annotation has this many entries, and parses them as a consumer does.
    pub(crate) fn wait_for_entries(&self, pod: &str, count: usize) -> Vec<Entry> {
        let enough =
            |value: Option<&str>| value.is_some_and(|text| Entry::parse(text).is_ok_and(|it| it.len() == count));
        let seen = self.annotations.wait_for(pod, LIMIT, enough).unwrap();
        Entry::parse(&seen.value.unwrap()).unwrap()
    }

    /// Returns the node address and node port that the Pod's annotation contains for a protocol.
    pub(crate) fn address(&self, pod: &str, protocol: Protocol) -> SocketAddr {
        let entries = self.wait_for_entries(pod, 2);
        entries.iter().find(|entry| entry.protocol == protocol).unwrap().address()
    }

    /// Sends one request per protocol. The Pod must respond and observe the client's address.
    pub(crate) fn assert_served(&self, pod: &str) {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            self.assert_answers(protocol, self.address(pod, protocol), pod);
        }
    }

    /// Sends one request to an address. The Pod must respond and observe the client's address.
    pub(crate) fn assert_answers(&self, protocol: Protocol, server: SocketAddr, pod: &str) {
        let answer = traffic::request(&self.topology.client().netns, protocol, server, "who?").unwrap();
        assert_eq!(answer.pod, pod, "{protocol:?} {server}");
        assert_eq!(answer.client.ip(), self.client_ip(), "{protocol:?} {server}");
    }

    /// Returns the requests of a load: one TCP and one UDP request to each of these Pods.
    pub(crate) fn load_requests(&self, pods: &[&str]) -> Vec<Request> {
        let protocols = [Protocol::Tcp, Protocol::Udp];
        let of = |pod: &&str| {
            let pod = (*pod).to_owned();
            protocols.map(|protocol| Request {
                protocol,
                server: self.address(&pod, protocol),
                pod: pod.clone(),
                client: self.client_ip(),
            })
        };
        pods.iter().flat_map(of).collect()
    }

    /// The output of `npl-agent mappings --output json`.
    pub(crate) fn kernel_mappings(&self) -> Vec<serde_json::Value> {
        let options = self.agent_options(&[]);
        options.command_json("mappings").unwrap().as_array().unwrap().clone()
    }

    /// Waits until the agent's metrics contain this line.
    pub(crate) fn wait_for_metric(&mut self, line: &str) {
        let agent = self.agent();
        let has_line = || agent.metrics().is_ok_and(|text| text.lines().any(|found| found == line)).then_some(());
        let waited = poll::until(&format!("the metric `{line}`"), LIMIT, has_line);
        assert!(waited.is_ok(), "{waited:?}\n{}", self.agent().metrics().unwrap());
    }

    /// Returns the number of passes of the agent's main loop.
    pub(crate) fn passes(&mut self) -> u64 {
        let metrics = self.agent().metrics().unwrap();
        metrics.lines().find_map(|line| line.strip_prefix("npl_pass_seconds_count ")).unwrap().parse().unwrap()
    }

    /// Returns the values of the agent's metric of repairs, by object.
    pub(crate) fn repairs(&mut self) -> BTreeMap<RepairedObject, u64> {
        let metrics = self.agent().metrics().unwrap();
        let value = |object: RepairedObject| {
            let series = format!("npl_repairs_total{{object=\"{}\"}} ", object.as_str());
            metrics.lines().find_map(|line| line.strip_prefix(&series)?.parse().ok())
        };
        RepairedObject::ALL.into_iter().map(|object| (object, value(object).unwrap())).collect()
    }

    /// Returns the number of the agent's writes to a Pod's annotation, including withdrawals.
    pub(crate) fn writes(&self, pod: &str) -> usize {
        // Entries of the history before the first write have no value, and do not count.
        self.annotations.history(pod).iter().skip_while(|seen| seen.value.is_none()).count()
    }

    /// The agent's log.
    pub(crate) fn agent_log(&mut self) -> String {
        fs::read_to_string(self.agent().process().log()).unwrap()
    }

    /// Waits until the agent's log contains these words. A failure shows the end of the log.
    pub(crate) fn wait_for_log(&mut self, words: &str) {
        let has_words = || self.agent_log().contains(words).then_some(());
        let waited = poll::until(&format!("the agent to log `{words}`"), LIMIT, has_words);
        assert!(waited.is_ok(), "{waited:?}\n{}", self.agent().process().log_tail(40));
    }

    /// Closes the agent's connections, and waits until the agent's log contains these words after its first `bytes`
    /// bytes. If the agent does not log the words, the connections are closed again: the API server authorizes a watch
    /// only when the watch starts, and caches a successful token review for ten seconds.
    pub(crate) fn cut_until_logged(&mut self, words: &str, bytes: usize) {
        let mut cut = None::<Instant>;
        let waited = poll::until(&format!("the agent to log `{words}`"), LIMIT, || {
            if cut.is_none_or(|at| at.elapsed() >= AGAIN * poll::patience()) {
                cut = Some(Instant::now());
                self.proxy().cut();
            }
            self.agent_log().get(bytes..).is_some_and(|log| log.contains(words)).then_some(())
        });
        assert!(waited.is_ok(), "{waited:?}\n{}", self.agent().process().log_tail(40));
    }

    /// Waits until the API server refuses this request of the agent. After RBAC rules are removed, the API server
    /// grants requests until its own watch of the rules has delivered the removal.
    pub(crate) fn wait_until_denied(&self, verb: &str, group: &str, resource: &str) {
        wait_for_decision(&self.cluster, (verb, group, resource), false).unwrap();
    }

    /// Waits until the kernel has this many mappings.
    pub(crate) fn wait_for_kernel_mappings(&self, count: usize) {
        poll::until(&format!("{count} kernel mappings"), LIMIT, || {
            (self.kernel_mappings().len() == count).then_some(())
        })
        .unwrap();
    }
}

impl Deref for Plane {
    type Target = ControlPlane;

    fn deref(&self) -> &ControlPlane {
        match self {
            Self::Own(plane) => plane,
            Self::Pooled(plane) => plane,
        }
    }
}

/// Starts a run with the network of a Node.
fn start(clients: u8) -> (Run, Topology) {
    let run = Run::start().unwrap();
    let options = topology::Options { clients, ..topology::Options::default() };
    let topology = Topology::new(&run, "", options).unwrap();
    (run, topology)
}

/// Creates the agent's RBAC rules and the namespace of the user's objects.
fn prepare(plane: &ControlPlane) -> Result<()> {
    let cluster = Cluster::new(plane)?;
    cluster.apply_access(&manifest())?;
    cluster.create_namespace(NAMESPACE)?;
    // Wait until the API server applies the agent's RBAC rules, because an agent that starts earlier may exit.
    ["pods", "services", "nodes"]
        .into_iter()
        .try_for_each(|resource| wait_for_decision(&cluster, ("watch", "", resource), true))
}

/// Waits until the API server grants or refuses this request of the agent: a verb, an API group and a resource.
fn wait_for_decision(cluster: &Cluster, request: (&str, &str, &str), is_allowed: bool) -> Result<()> {
    let (verb, group, resource) = request;
    let attributes = json!({"verb": verb, "group": group, "resource": resource, "namespace": NAMESPACE});
    let review = json!({"spec": {"user": AGENT_USER, "resourceAttributes": attributes}});
    let wanted = if is_allowed { "grant" } else { "refuse" };
    let decided = || {
        let answer = cluster.client().create("/apis/authorization.k8s.io/v1/subjectaccessreviews", &review);
        (answer.ok()?["status"]["allowed"] == is_allowed).then_some(())
    };
    poll::until(&format!("the API server to {wanted} `{verb} {resource}`"), LIMIT, decided).map(drop)
}

/// The manifest with the agent's RBAC rules.
pub(crate) fn manifest() -> PathBuf {
    tools::repository_file("deploy/npl.yaml")
}
