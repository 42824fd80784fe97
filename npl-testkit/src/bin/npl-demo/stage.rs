// SPDX-License-Identifier: Apache-2.0
//! What the story is played on: one Node, its Pods, a client, an API server, the agent.

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

/// The Node.
pub(crate) const NODE: &str = "node-1";
/// The namespace of the Pods and of the Service.
pub(crate) const NAMESPACE: &str = "shop";
/// The Service, and the label of its Pods.
pub(crate) const SERVICE: &str = "web";
/// The Pods at the start.
pub(crate) const PODS: [&str; 3] = ["web-0", "web-1", "web-2"];
/// The port that a Pod serves over TCP.
pub(crate) const TCP_PORT: u16 = 8080;
/// The port that a Pod serves over UDP.
pub(crate) const UDP_PORT: u16 = 5300;

/// The story lasts seconds; a watch that outlives it is of no use.
const WATCH_LIMIT: Duration = Duration::from_mins(2);

/// How long the agent may take to end in good order.
const AGENT_GRACE: Duration = Duration::from_secs(10);

/// Everything that the story needs; removed in the order of the fields, the run last.
#[derive(Debug)]
pub(crate) struct Stage {
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

/// How long the parts took to be ready.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) control_plane: Duration,
    pub(crate) agent: Duration,
}

impl Stage {
    /// Builds everything and starts the agent.
    pub(crate) fn build() -> Result<Self> {
        agent::find_binary()?;
        let run = Run::start()?;
        let topology = Topology::new(&run, "", topology::Options::default()).context("build the network")?;
        let start = Instant::now();
        // In the Node's namespace, so that the agent reaches it without any network that is not part of the story.
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
        let mut stage = Self { agent, mappings, enabled, servers, cluster, plane, topology, bpffs, run, times };
        PODS.iter().try_for_each(|name| stage.add_pod(name))?;
        Ok(stage)
    }

    /// Adds a Pod as scheduler, CNI and kubelet together do.
    pub(crate) fn add_pod(&mut self, name: &str) -> Result<()> {
        let ports = vec![Port::new("http", TCP_PORT, Protocol::Tcp), Port::new("dns", UDP_PORT, Protocol::Udp)];
        self.cluster.create_pod(&PodObject::new(NAMESPACE, name, NODE, SERVICE).with_ports(ports))?;
        let pod = self.topology.add_pod(&self.run, name)?;
        let server = EchoServer::start_in(&pod.netns, name, &[TCP_PORT, UDP_PORT])?;
        self.servers.insert(name.to_owned(), server);
        self.cluster.set_pod_running(NAMESPACE, name, self.node_ip(), &pod.ips())
    }

    /// Takes a Pod away: its processes, its network, its object.
    pub(crate) fn remove_pod(&mut self, name: &str) -> Result<()> {
        drop(self.servers.remove(name));
        self.topology.remove_pod(name)?;
        self.cluster.delete_pod(NAMESPACE, name)
    }

    /// The address that clients know the Node by.
    pub(crate) fn node_ip(&self) -> IpAddr {
        self.topology.node_addresses().v4.into()
    }

    /// The client's namespace.
    pub(crate) fn client(&self) -> &Netns {
        &self.topology.client().netns
    }

    /// The address that the Pods must see.
    pub(crate) fn client_ip(&self) -> IpAddr {
        self.topology.client().addresses.v4.into()
    }

    /// What runs the agent's other commands on the Node.
    pub(crate) fn node_command(&self) -> &agent::Options {
        self.agent.options()
    }

    /// The API server's access for an administrator.
    pub(crate) fn plane(&self) -> &ControlPlane {
        &self.plane
    }

    /// What is up now, to be looked for when it has been removed.
    pub(crate) fn inventory(&self) -> Result<Residue> {
        Residue::look_at(&self.run, self.bpffs.path())
    }

    /// Ends the agent in good order, if it can.
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
