// SPDX-License-Identifier: Apache-2.0
//! A control plane with many objects, and agents that start without kernel state. The bench runs in the Node's network
//! namespace, so that requests to the API server need no additional thread that enters this namespace.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use npl_testkit::agent::{Agent, Options};
use npl_testkit::cluster::{AnnotationLog, Cluster, PodObject, Port, ServiceObject};
use npl_testkit::control_plane::ControlPlane;
use npl_testkit::echo::Protocol;
use npl_testkit::mounts::BpfFs;
use npl_testkit::netns::Netns;
use npl_testkit::run::Run;
use npl_testkit::topology::{self, NodeAddresses, Topology};
use npl_testkit::{poll, tools};

use crate::figures::say;

/// The Node of the agents.
pub(crate) const NODE: &str = "node-1";
/// A Node without an agent.
pub(crate) const OTHER_NODE: &str = "node-2";
pub(crate) const NAMESPACE: &str = "bench";
pub(crate) const POD_PORT: u16 = 8080;

/// The time limit of every wait.
pub(crate) const LIMIT: Duration = Duration::from_mins(2);
/// The duration of watches, longer than any run.
const WATCH_LIMIT: Duration = Duration::from_hours(1);
/// The number of threads that create objects.
const MAKERS: usize = 8;
/// The port range, large enough for all mappings of a round and for released ports in quarantine.
const PORT_RANGE: &str = "20000-29999";
/// The address of the first Pod. No network device has a Pod's address, because the Pods are only API objects.
const FIRST_POD_IP: u32 = u32::from_be_bytes([10, 64, 0, 1]);

/// The cluster, with clients for threads that run in the Node's network namespace.
#[derive(Debug)]
pub(crate) struct Environment<'a> {
    pub(crate) annotations: AnnotationLog,
    pub(crate) cluster: Cluster,
    pub(crate) plane: &'a ControlPlane,
    run: &'a Run,
    pub(super) netns: &'a Netns,
    agents: u32,
    next_ip: AtomicU32,
}

/// An agent, and the BPF file system with the agent's pins. Fields are dropped in declaration order, so the agent ends
/// first.
#[derive(Debug)]
pub(crate) struct Agents {
    pub(crate) agent: Agent,
    pub(crate) bpffs: BpfFs,
}

/// Starts a control plane whose API server has these flags, and runs `work` in the API server's network namespace.
pub(super) fn with_control_plane<T: Send>(
    run: &Run,
    flags: &[String],
    work: impl FnOnce(&mut Environment<'_>) -> Result<T> + Send,
) -> Result<T> {
    say("starting a control plane");
    let topology = Topology::new(run, "", topology::Options::default())?;
    let plane = ControlPlane::start_with_flags(run, Some(topology.node()), flags)?;
    topology.node().run(|| work(&mut Environment::new(run, &topology, &plane)?))?
}

impl<'a> Environment<'a> {
    /// Creates a cluster with two Nodes and without Pods.
    pub(crate) fn new(run: &'a Run, topology: &'a Topology, plane: &'a ControlPlane) -> Result<Self> {
        let cluster = Cluster::new(plane)?.from_inside();
        cluster.apply_access(&manifest())?;
        cluster.create_namespace(NAMESPACE)?;
        cluster.create_node(NODE, &[node_ip()])?;
        cluster.create_node(OTHER_NODE, &[Ipv4Addr::new(192, 0, 2, 20).into()])?;
        let annotations = cluster.watch_mappings(NAMESPACE, WATCH_LIMIT)?;
        let next_ip = AtomicU32::new(FIRST_POD_IP);
        Ok(Self { annotations, cluster, plane, run, netns: topology.node(), agents: 0, next_ip })
    }

    /// Starts an agent on a Node without NPL's kernel state and waits until it is ready.
    pub(crate) fn start_agent(&mut self) -> Result<Agents> {
        self.start_agent_with(&self.plane.agent_kubeconfig(), &[])
    }

    /// Starts an agent as [`Self::start_agent`] does, with this kubeconfig and further flags.
    pub(crate) fn start_agent_with(&mut self, kubeconfig: &Path, flags: &[&str]) -> Result<Agents> {
        self.agents += 1;
        let bpffs = self.run.bpffs(&format!("bpf{}", self.agents))?;
        let log = self.run.file("npl-agent.log");
        let mut options = Options::new(self.netns, NODE, kubeconfig, bpffs.path(), &log)?;
        // The drain is short, so that withdrawn mappings are removed before the next measurement.
        let usual = ["--port-range", PORT_RANGE, "--drain", "1s"];
        options.flags = usual.iter().chain(flags).map(ToString::to_string).collect();
        Ok(Agents { agent: Agent::start(options)?, bpffs })
    }

    /// Runs the Go garbage collector in the API server's process now. Without this call, the collector would run after
    /// every few hundred patches. A run of the collector takes as long as two hundred patches, and would distort a
    /// measurement.
    pub(crate) fn collect_garbage(&self) -> Result<()> {
        self.cluster.client().text("/debug/pprof/heap?gc=1&debug=1").map(drop)
    }

    /// Creates Pods in their state after scheduling, without addresses.
    pub(crate) fn create_pods(&self, names: &[String], node: &str, app: &str) -> Result<()> {
        in_parallel(names, |name| {
            let declared = vec![Port::new("web", POD_PORT, Protocol::Tcp)];
            self.cluster.create_pod(&PodObject::new(NAMESPACE, name, node, app).with_ports(declared))
        })
    }

    /// Assigns an address to each Pod, as a kubelet does.
    pub(crate) fn run_pods(&self, names: &[String]) -> Result<()> {
        in_parallel(names, |name| self.run_pod(name))
    }

    /// Assigns an address to a Pod, as a kubelet does. Returns after the API server has confirmed the change.
    pub(crate) fn run_pod(&self, name: &str) -> Result<()> {
        let ip = Ipv4Addr::from(self.next_ip.fetch_add(1, Ordering::Relaxed));
        self.cluster.set_pod_running(NAMESPACE, name, node_ip(), &[ip.into()])
    }

    pub(crate) fn delete_pods(&self, names: &[String]) -> Result<()> {
        in_parallel(names, |name| self.cluster.delete_pod(NAMESPACE, name))
    }

    /// Creates the Service `name` for the Pods whose label `app` has the value `name`. The target port is a number, and
    /// the annotation that enables node ports is absent.
    pub(crate) fn create_service(&self, name: &str) -> Result<()> {
        self.cluster.create_service(&service(NAMESPACE, name, name))
    }

    /// Waits until the annotations of all `pods` satisfy `wanted`, and returns the time of the last change.
    pub(crate) fn wait_for_all(&self, pods: &[String], wanted: impl Fn(Option<&str>) -> bool) -> Result<Instant> {
        let mut last = None;
        for pod in pods {
            last = last.max(Some(self.annotations.wait_for(pod, LIMIT, &wanted)?.at));
        }
        last.ok_or_else(|| anyhow!("the list of Pods is empty"))
    }

    /// Returns the last value of each Pod's annotation.
    pub(crate) fn values(&self, pods: &[String]) -> Vec<Option<String>> {
        pods.iter().map(|pod| self.annotations.history(pod).pop().and_then(|seen| seen.value)).collect()
    }
}

/// Returns a Service with one TCP port for the Pods whose label `app` has the value `app`, without the annotation that
/// enables node ports.
pub(crate) fn service(namespace: &str, name: &str, app: &str) -> ServiceObject {
    ServiceObject::new(namespace, name, app, vec![Port::new("http", 80, Protocol::Tcp).to(POD_PORT)])
}

/// The address of the agent's Node.
pub(crate) fn node_ip() -> IpAddr {
    NodeAddresses::default().v4.into()
}

/// Whether an annotation contains a mapping.
pub(crate) fn is_published(value: Option<&str>) -> bool {
    value.is_some_and(|text| text.contains("nodePort"))
}

/// Numbered names: `name-0`, `name-1` …
pub(crate) fn numbered(name: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{name}-{number}")).collect()
}

/// Runs `work` for every item, on several threads.
pub(crate) fn in_parallel<T: Sync>(items: &[T], work: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    share_out(&[(); MAKERS], items, |(), item| work(item))
}

/// Distributes items over workers until no item is left. A worker ends at its first error. The first error of all
/// workers is returned.
pub(crate) fn share_out<W: Sync, T: Sync>(
    workers: &[W],
    items: &[T],
    work: impl Fn(&W, &T) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let (failed, failures) = mpsc::channel();
    thread::scope(|scope| {
        for worker in workers {
            let (next, work, failed) = (&next, &work, failed.clone());
            scope.spawn(move || {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = work(worker, item) {
                        // Sending cannot fail, because the receiver exists until all workers have ended.
                        drop(failed.send(error));
                        return;
                    }
                }
            });
        }
    });
    failures.try_iter().next().map_or(Ok(()), Err)
}

/// Waits for `time`, or until an interruption.
pub(crate) fn let_pass(time: Duration) -> Result<()> {
    let began = Instant::now();
    let is_over = || (began.elapsed() >= time).then_some(());
    poll::until("the observation to end", time + LIMIT, is_over).map(drop)
}

/// The manifest whose RBAC rules apply to the agents.
pub(crate) fn manifest() -> PathBuf {
    tools::repository_file("deploy/npl.yaml")
}
