// SPDX-License-Identifier: Apache-2.0
//! A control plane with a Service, the feed, and load balancers with the configuration of docs/load-balancers.md.

use std::env;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use npl_agent::core::members::PortMembers;
use npl_testkit::cluster::{AnnotationLog, Cluster, MAPPING_ANNOTATION, PodObject, Port, ServiceObject};
use npl_testkit::control_plane::ControlPlane;
use npl_testkit::echo::{EchoServer, Protocol};
use npl_testkit::load_balancers::{self, LoadBalancer};
use npl_testkit::netns::Netns;
use npl_testkit::process::Process;
use npl_testkit::run::Run;
use npl_testkit::{http, poll};
use serde_json::json;

/// The time limit of every wait.
pub(super) const LIMIT: Duration = Duration::from_mins(1);

/// The interval at which the load balancers query the feed.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);

/// The address at which each load balancer listens. Only one load balancer runs at a time.
pub(super) const BALANCER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8000);

/// The addresses of the Nodes in docs/load-balancers.md. The Pods' Node has the first address.
const NODES: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 2, 10), Ipv4Addr::new(192, 0, 2, 11)];

const FEED_HTTP: SocketAddr = SocketAddr::new(IpAddr::V4(NODES[0]), 30181);

/// The arguments of the feed, with the ports of docs/load-balancers.md. The feed listens on IPv4 only, because the
/// kernel may lack IPv6.
const FEED: [&str; 6] = ["--xds", "0.0.0.0:30180", "--http", "0.0.0.0:30181", "--dns", "0.0.0.0:30153"];

/// The namespace and name of the Service in docs/load-balancers.md.
const NAMESPACE: &str = "default";
const SERVICE: &str = "web";

const NODE: &str = "node-1";
pub(super) const POD_PORT: u16 = 8080;
pub(super) const FIRST_NODE_PORT: u16 = 61_000;

/// The duration of the watch, longer than any run.
const WATCH_LIMIT: Duration = Duration::from_hours(1);

/// The cluster and the running feed.
pub(super) struct Scene<'a> {
    run: &'a Run,
    netns: &'a Netns,
    cluster: Cluster,
    annotations: AnnotationLog,
    feed: Process,
    kubeconfig: PathBuf,
    created: u16,
}

/// A ready Pod, and the server that answers at its node port.
pub(super) struct Pod {
    pub(super) name: String,
    node_port: u16,
    _server: EchoServer,
}

/// Creates the network namespace of the API server, the feed and the load balancers, with the addresses of the Nodes.
pub(super) fn namespace(run: &Run) -> Result<Netns> {
    let netns = run.netns("feed")?;
    netns.ip("link set lo up")?;
    for address in NODES {
        netns.ip(&format!("address add {address}/32 dev lo"))?;
    }
    Ok(netns)
}

impl<'a> Scene<'a> {
    /// Creates the Node and the Service, and starts the feed. Also returns a Pod, which must exist until the
    /// measurement ends. The calling thread must be in the network namespace `netns`.
    pub(super) fn start(run: &'a Run, netns: &'a Netns, plane: &ControlPlane) -> Result<(Self, Pod)> {
        let cluster = Cluster::new(plane)?.from_inside();
        cluster.create_node(NODE, &[NODES[0].into()])?;
        let ports = vec![Port::new("http", 80, Protocol::Tcp).to(POD_PORT)];
        cluster.create_service(&ServiceObject::new(NAMESPACE, SERVICE, SERVICE, ports).enabled())?;
        let annotations = cluster.watch_mappings(NAMESPACE, WATCH_LIMIT)?;
        let feed = start_feed(run, netns, &plane.admin_kubeconfig())?;
        let mut scene =
            Self { run, netns, cluster, annotations, feed, kubeconfig: plane.admin_kubeconfig(), created: 0 };
        let permanent = scene.create_pod()?;
        scene.annotate(&permanent)?;
        let is_served = || scene.members("").ok().filter(|body| body.members.len() == 1);
        poll::until("the first member", LIMIT, is_served).with_context(|| scene.feed.log_tail(10))?;
        Ok((scene, permanent))
    }

    /// Starts a load balancer, and waits for its first answer.
    pub(super) fn launch(&self, balancer: &LoadBalancer) -> Result<Process> {
        let process = balancer.start(self.run, self.netns, &[])?;
        let answer = || load_balancers::ask(BALANCER).ok();
        poll::until("the first answer", LIMIT, answer).with_context(|| process.log_tail(10))?;
        Ok(process)
    }

    /// Creates a running and ready Pod without an annotation.
    pub(super) fn create_pod(&mut self) -> Result<Pod> {
        let (name, node_port) = (format!("web-{}", self.created), FIRST_NODE_PORT + self.created);
        self.created += 1;
        let server = EchoServer::start(&name, &[node_port])?;
        let declared = vec![Port::new("http", POD_PORT, Protocol::Tcp)];
        self.cluster.create_pod(&PodObject::new(NAMESPACE, &name, NODE, SERVICE).with_ports(declared))?;
        // No process uses this address: the echo server answers at the addresses of the Nodes.
        let address = Ipv4Addr::new(10, 64, 0, 1).into();
        self.cluster.set_pod_running(NAMESPACE, &name, NODES[0].into(), &[address])?;
        Ok(Pod { name, node_port, _server: server })
    }

    /// Writes a Pod's annotation. Returns the time just before the request was sent.
    pub(super) fn annotate(&self, pod: &Pod) -> Result<Instant> {
        let value = json!([{ "podPort": POD_PORT, "nodeIP": NODES[0], "nodePort": pod.node_port, "protocol": "tcp",
                             "protocols": ["tcp"] }]);
        let patch = json!({ "metadata": { "annotations": { MAPPING_ANNOTATION: value.to_string() } } });
        let began = Instant::now();
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{}/status", pod.name);
        self.cluster.client().merge_patch_unread(&path, &patch)?;
        Ok(began)
    }

    /// The time at which a plain watch delivered a Pod's annotation.
    pub(super) fn event_of(&self, pod: &Pod) -> Result<Instant> {
        Ok(self.annotations.wait_for(&pod.name, LIMIT, |value| value.is_some())?.at)
    }

    pub(super) fn delete(&self, pod: &Pod) -> Result<()> {
        self.cluster.delete_pod(NAMESPACE, &pod.name)
    }

    /// The cluster with its objects.
    pub(super) const fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Kills the feed and starts it again. Waits until the feed has listed `members` members, and returns its PID.
    pub(super) fn restart_feed(&mut self, members: usize) -> Result<u32> {
        self.feed.kill()?;
        self.feed = start_feed(self.run, self.netns, &self.kubeconfig)?;
        let expected = format!("npl_feed_members {members}\n");
        let has_all = || http::get(self.netns, FEED_HTTP, "/metrics").ok().filter(|(_, text)| text.contains(&expected));
        poll::until("all members", LIMIT, has_all).with_context(|| self.feed.log_tail(10))?;
        Ok(self.feed.id())
    }

    /// The members of the Service, by HTTP.
    pub(super) fn members(&self, query: &str) -> Result<PortMembers> {
        let path = format!("/v1/members/{NAMESPACE}/{SERVICE}/http{query}");
        let (status, body) = http::get(self.netns, FEED_HTTP, &path)?;
        ensure!(status == 200, "the feed answered {status} to {path}");
        serde_json::from_str(&body).with_context(|| format!("parse the answer to {path}"))
    }
}

/// Starts the feed's program from the directory of the bench, because both programs are built together.
fn start_feed(run: &Run, netns: &Netns, kubeconfig: &Path) -> Result<Process> {
    let program = env::current_exe().context("find this program")?.with_file_name("npl-feed");
    let mut command = netns.command(program)?;
    command.args(FEED).arg("--kubeconfig").arg(kubeconfig);
    Process::spawn("npl-feed", command, &run.file("npl-feed.log"))
}
