// SPDX-License-Identifier: Apache-2.0
//! The environment of the demo: one Node with Pods, a client, an API server and the agent.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use npl_testkit::agent::{self, Agent};
use npl_testkit::cluster::{AnnotationLog, Cluster, PodObject, Port, ServiceObject};
use npl_testkit::control_plane::ControlPlane;
use npl_testkit::echo::{EchoServer, Protocol};
use npl_testkit::mounts::BpfFs;
use npl_testkit::netns::Netns;
use npl_testkit::residue::Residue;
use npl_testkit::run::Run;
use npl_testkit::tools;
use npl_testkit::topology::{self, Topology};

/// The name of the Node.
pub(crate) const NODE: &str = "node-1";
/// The namespace of the Pods and of the Service.
pub(crate) const NAMESPACE: &str = "shop";
/// The name of the Service, and the `app` label of its Pods.
pub(crate) const SERVICE: &str = "web";
/// The initial Pods.
pub(crate) const PODS: [&str; 3] = ["web-0", "web-1", "web-2"];
/// The container port for TCP.
pub(crate) const TCP_PORT: u16 = 8080;
/// The container port for UDP.
pub(crate) const UDP_PORT: u16 = 5300;

/// The duration of watches; the demo itself takes seconds.
const WATCH_LIMIT: Duration = Duration::from_mins(10);

/// The time limit of the agent's shutdown.
const AGENT_GRACE: Duration = Duration::from_secs(10);

/// The parts of the environment. Fields are dropped in declaration order: the run, which removes all remaining objects,
/// is last.
#[derive(Debug)]
pub(crate) struct Environment {
    pub(crate) agent: Agent,
    pub(crate) mappings: AnnotationLog,
    pub(crate) enabled: AnnotationLog,
    servers: BTreeMap<String, EchoServer>,
    pub(crate) cluster: Cluster,
    plane: ControlPlane,
    pub(crate) topology: Topology,
    pub(crate) bpffs: BpfFs,
    pub(crate) run: Run,
    pub(crate) times: Times,
}

/// The times that the parts needed to become ready.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) control_plane: Duration,
    pub(crate) agent: Duration,
}

impl Environment {
    /// Creates the environment and starts the agent.
    pub(crate) fn build() -> Result<Self> {
        agent::find_binary()?;
        let run = Run::start()?;
        let topology = Topology::new(&run, "", topology::Options::default()).context("build the network")?;
        let start = Instant::now();
        // The API server runs in the Node's namespace, so that the agent reaches it over the loopback device.
        let plane = ControlPlane::start(&run, Some(topology.node()))?;
        let control_plane = start.elapsed();
        let cluster = Cluster::new(&plane)?;
        prepare_cluster(&cluster, &topology)?;
        let bpffs = run.bpffs("bpffs")?;
        let log = run.file("agent.log");
        let options = agent::Options::new(topology.node(), NODE, &plane.agent_kubeconfig(), bpffs.path(), &log)?;
        let start = Instant::now();
        let agent = Agent::start(options)?;
        let times = Times { control_plane, agent: start.elapsed() };
        let mappings = cluster.watch_mappings(NAMESPACE, WATCH_LIMIT)?;
        let enabled = cluster.watch_enabled(NAMESPACE, WATCH_LIMIT)?;
        let servers = BTreeMap::new();
        let mut env = Self { agent, mappings, enabled, servers, cluster, plane, topology, bpffs, run, times };
        PODS.iter().try_for_each(|name| env.add_pod(name))?;
        Ok(env)
    }

    /// Adds a Pod, as scheduler, CNI plug-in and kubelet would together.
    pub(crate) fn add_pod(&mut self, name: &str) -> Result<()> {
        let ports = vec![Port::new("http", TCP_PORT, Protocol::Tcp), Port::new("dns", UDP_PORT, Protocol::Udp)];
        self.cluster.create_pod(&PodObject::new(NAMESPACE, name, NODE, SERVICE).with_ports(ports))?;
        let pod = self.topology.add_pod(&self.run, name)?;
        let server = EchoServer::start_in(&pod.netns, name, &[TCP_PORT, UDP_PORT])?;
        self.servers.insert(name.to_owned(), server);
        self.cluster.set_pod_running(NAMESPACE, name, self.node_ip(), &pod.ips())
    }

    /// Removes a Pod: its processes, its network and its object.
    pub(crate) fn remove_pod(&mut self, name: &str) -> Result<()> {
        drop(self.servers.remove(name));
        self.topology.remove_pod(name)?;
        self.cluster.delete_pod(NAMESPACE, name)
    }

    /// The node address.
    pub(crate) fn node_ip(&self) -> IpAddr {
        self.topology.node_addresses().v4.into()
    }

    /// The client's namespace.
    pub(crate) fn client(&self) -> &Netns {
        &self.topology.client().netns
    }

    /// The client address that the Pods must observe.
    pub(crate) fn client_ip(&self) -> IpAddr {
        self.topology.client().addresses.v4.into()
    }

    /// The options for running `npl-agent` subcommands on the Node.
    pub(crate) fn node_command(&self) -> &agent::Options {
        self.agent.options()
    }

    pub(crate) fn plane(&self) -> &ControlPlane {
        &self.plane
    }

    /// The namespaces, mounts, pins and other objects of this run, for a comparison after the teardown.
    pub(crate) fn inventory(&self) -> Result<Residue> {
        Residue::look_at(&self.run, self.bpffs.path())
    }

    /// Stops the agent with SIGTERM.
    pub(crate) fn end_agent(&mut self) -> Result<ExitStatus> {
        self.agent.terminate(AGENT_GRACE)
    }
}

fn prepare_cluster(cluster: &Cluster, topology: &Topology) -> Result<()> {
    cluster.apply_access(&tools::repository_file("deploy/npl.yaml"))?;
    cluster.create_node(NODE, &[topology.node_addresses().v4.into()])?;
    cluster.create_namespace(NAMESPACE)?;
    let ports = vec![Port::new("http", 80, Protocol::Tcp).to(TCP_PORT), Port::new("dns", 53, Protocol::Udp).to("dns")];
    cluster.create_service(&ServiceObject::new(NAMESPACE, SERVICE, SERVICE, ports))
}
