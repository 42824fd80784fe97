// SPDX-License-Identifier: Apache-2.0
//! A real multi-node Kubernetes cluster on one machine. All Kubernetes programs are real; only the machines are
//! emulated with namespaces.
//!
//! Each Node has its own network, mount, PID, UTS, IPC and cgroup namespaces, its own BPF file system, and its own
//! files in place of the host-wide sysctls that a kubelet writes. The host's network, settings and directories are not
//! changed.

mod binaries;
mod calico;
mod cilium;
mod cni;
mod containerd;
mod controllers;
mod flannel;
mod init;
mod kube_proxy;
mod kube_router;
mod kubelet;
mod network;
mod node;
mod provider;
pub mod publication;
mod space;

use std::env;
use std::net::IpAddr;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};

use self::binaries::{Images, Programs};
pub use self::cni::Cni;
use self::controllers::Controllers;
pub use self::init::{InitArguments, run as run_init};
pub use self::kube_proxy::KubeProxy;
use self::network::Network;
pub use self::network::{CLIENT, MAX_NODES, NodeNumber};
pub use self::node::Node;
use self::node::Parts;
use self::provider::Provider;
pub use self::space::Space;
use crate::cluster::{Cluster, timeout_option};
use crate::control_plane::{Account, ControlPlane};
use crate::netns::Netns;
use crate::poll;
use crate::run::Run;

/// The time limit for a Node to become ready, which takes 2 s after the start of its kubelet on an idle machine.
const READY_LIMIT: Duration = Duration::from_mins(3);

/// The configuration of a cluster.
#[derive(Clone, Debug)]
pub struct Options {
    /// The number of Nodes.
    pub nodes: u8,
    /// The mode of kube-proxy on the Nodes.
    pub kube_proxy: KubeProxy,
    /// The CNI plug-in that connects the Pods.
    pub cni: Cni,
    /// A program whose subcommand `node-init` calls [`run_init`].
    pub init_program: PathBuf,
}

impl Options {
    /// Returns the options for two Nodes, kube-proxy with iptables, and a bridge network.
    pub fn new(init_program: impl Into<PathBuf>) -> Self {
        Self { nodes: 2, kube_proxy: KubeProxy::default(), cni: Cni::default(), init_program: init_program.into() }
    }

    /// Returns the options of [`Self::new`], with the `npl-cluster` binary from this program's directory.
    pub fn beside_this_program() -> Result<Self> {
        let own = env::current_exe().context("find the path of this program")?;
        Ok(Self::new(own.with_file_name("npl-cluster")))
    }
}

/// A running cluster. Dropping this value ends all processes, and then removes the run.
#[derive(Debug)]
pub struct RealCluster {
    nodes: Vec<Node>,
    _controllers: Controllers,
    cluster: Cluster,
    plane: ControlPlane,
    cni: Cni,
    lan: Netns,
    client: Netns,
    run: Run,
}

impl RealCluster {
    /// Starts the cluster and waits until every Node is ready.
    pub fn start(options: &Options) -> Result<Self> {
        Self::start_in(Run::start()?, options)
    }

    /// Starts the cluster as [`Self::start`] does, in an existing run.
    pub fn start_in(run: Run, options: &Options) -> Result<Self> {
        let Options { nodes, kube_proxy, cni, init_program } = options;
        let modes = cni.kube_proxy_modes();
        ensure!(modes.contains(kube_proxy), "{cni} replaces kube-proxy: use `--kube-proxy none`");
        ensure!((1..=MAX_NODES).contains(nodes), "a cluster has 1 to {MAX_NODES} Nodes, not {nodes}");
        let (programs, images, provider) = (Programs::find()?, Images::find()?, Provider::find(*cni)?);
        let network = Network::build(&run, *nodes)?;
        if cni.needs_routes() {
            network.route_pods().context("add the routes to Pods")?;
        }
        let parts = Parts { init_program: init_program.clone(), programs, images, provider };
        let (plane, mut booted) = boot_all(&run, &network, &parts)?;
        let controllers = Controllers::start(&plane, &network.lan, &parts.programs)?;
        booted.iter_mut().try_for_each(|node| node.join(&plane, *kube_proxy))?;
        let cluster = Cluster::new(&plane)?;
        parts.provider.define(&cluster)?;
        booted.iter_mut().try_for_each(|node| node.start_network(&plane, cluster.client()))?;
        let numbers: Vec<NodeNumber> = booted.iter().map(Node::number).collect();
        booted.iter().try_for_each(|node| node.connect_pods(&numbers))?;
        let Network { lan, client, nodes: _ } = network;
        let this = Self { nodes: booted, _controllers: controllers, cluster, plane, cni: *cni, lan, client, run };
        this.wait_until_ready()?;
        Ok(this)
    }

    /// The Nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The Nodes, to stop and restart their components.
    pub fn nodes_mut(&mut self) -> &mut [Node] {
        &mut self.nodes
    }

    pub fn node(&self, name: &str) -> Result<&Node> {
        self.nodes.iter().find(|node| node.name() == name).with_context(|| format!("this cluster has no Node {name}"))
    }

    /// Returns a client for Kubernetes objects with administrator rights.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The API server and etcd.
    pub fn plane(&mut self) -> &mut ControlPlane {
        &mut self.plane
    }

    /// The administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.plane.admin_kubeconfig()
    }

    /// The CNI plug-in that connects the cluster's Pods.
    pub fn cni(&self) -> Cni {
        self.cni
    }

    /// The network namespace of the API server. This namespace is also the router of the Nodes.
    pub fn lan(&self) -> &Netns {
        &self.lan
    }

    /// The namespace of a client outside the Nodes' network.
    pub fn client(&self) -> &Netns {
        &self.client
    }

    /// The run that owns the cluster.
    pub fn run(&self) -> &Run {
        &self.run
    }

    /// Gives a name to the network namespace of a Pod, so that tests can send requests from this namespace.
    pub fn pod_netns(&self, namespace: &str, name: &str) -> Result<Netns> {
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        let pod = self.cluster.client().get(&path)?;
        let text = |pointer: &str| {
            let value = pod.pointer(pointer).and_then(serde_json::Value::as_str);
            value.with_context(|| format!("Pod {namespace}/{name} has no {pointer}"))
        };
        let node = self.node(text("/spec/nodeName")?)?;
        let processes = node.pod_processes(text("/metadata/uid")?)?;
        let process = processes.first().with_context(|| format!("Pod {namespace}/{name} has no running process"))?;
        self.run.netns_of_process(&format!("pod-{namespace}-{name}"), *process)
    }

    /// Switches all agents to `--forwarding offload`, as an administrator would, after setting the required sysctl on
    /// all Nodes.
    pub fn offload(&self) -> Result<()> {
        for node in &self.nodes {
            node.netns().set_liberal_tracking(true)?;
        }
        let agents = ["daemonset/npl-agent", "--namespace", "npl-system"];
        self.cluster.kubectl(&[&["set", "env"], &agents[..], &["NPL_FORWARDING=offload"]].concat())?;
        self.cluster.kubectl(&[&["rollout", "status"], &agents[..], &[timeout_option()]].concat()).map(drop)
    }

    fn wait_until_ready(&self) -> Result<()> {
        for node in &self.nodes {
            let path = format!("/api/v1/nodes/{}", node.name());
            poll::until(&format!("the readiness of {}", node.name()), READY_LIMIT, || {
                let object = self.cluster.client().find(&path).ok().flatten()?;
                is_ready(&object).then_some(())
            })
            .with_context(|| node.log_tail())?;
        }
        // Wait for this account, because the ServiceAccount admission plug-in rejects Pods until the account exists.
        let account = "/api/v1/namespaces/default/serviceaccounts/default";
        let exists = || self.cluster.client().find(account).ok().flatten().map(drop);
        poll::until("the default service account", READY_LIMIT, exists).map(drop)
    }
}

/// Starts the control plane and, in parallel, those components of the Nodes that need no control plane.
fn boot_all(run: &Run, network: &Network, parts: &Parts) -> Result<(ControlPlane, Vec<Node>)> {
    let kubelets = network.nodes.iter().map(|(number, _)| Account::new(&kubelet::user(*number), &[kubelet::GROUP]));
    let accounts: Vec<Account> = kubelets
        .chain(controllers::accounts())
        .chain([Account::new(kube_proxy::USER, &[]), flannel::account(), calico::account()])
        .chain([kube_router::account(), cilium::account()])
        .collect();
    thread::scope(|scope| {
        let mut boots = Vec::new();
        for (number, netns) in &network.nodes {
            boots.push(scope.spawn(move || {
                Node::boot(run, *number, netns, parts).with_context(|| format!("boot {}", number.name()))
            }));
        }
        let plane = ControlPlane::start_for_nodes(run, &network.lan, network::ROUTER, &accounts);
        let joined = boots.into_iter().map(|boot| boot.join().map_err(|_panic| anyhow!("a Node's boot panicked"))?);
        let nodes = joined.collect::<Result<Vec<_>>>()?;
        Ok((plane?, nodes))
    })
}

/// Whether an object has the condition `Ready` with status `True`.
pub fn is_ready(object: &serde_json::Value) -> bool {
    let conditions = object.pointer("/status/conditions").and_then(serde_json::Value::as_array);
    conditions.into_iter().flatten().any(|it| it["type"] == "Ready" && it["status"] == "True")
}

/// The client's addresses, in the same family order as [`NodeNumber::addresses`].
pub fn client_addresses() -> [IpAddr; 2] {
    [CLIENT.0.into(), CLIENT.1.into()]
}
