// SPDX-License-Identifier: Apache-2.0
//! A cluster in which NPL and a sample application, the shop, are installed.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use npl_testkit::cluster::{Entry, annotation_of, pods_with_label, timeout_option};
use npl_testkit::real_cluster::{KubeProxy, Node, NodeNumber, Options, RealCluster, is_ready};
use npl_testkit::residue::Residue;
use npl_testkit::{agent, poll, tools};
use serde_json::Value;

use crate::machine::Machine;
use crate::network::Network;

/// The namespace of the user's objects.
pub(crate) const NAMESPACE: &str = "shop";

/// The agent's namespace.
pub(crate) const AGENT_NAMESPACE: &str = "npl-system";

/// The usual time limit of waits. The commands of kubectl and Helm have their own limits.
pub(crate) const LIMIT: Duration = Duration::from_mins(3);

/// A running cluster.
pub(crate) struct World {
    pub(crate) cluster: RealCluster,
    pub(crate) kube_proxy: KubeProxy,
    /// The state of the host before the cluster was started.
    pub(crate) machine: Machine,
    /// The number of requests under load; each received a response from the intended Pod.
    pub(crate) answered: u64,
    /// The number of IPv6 requests that were lost during an event of the CNI that loses IPv6 packets without NPL, too.
    pub(crate) lost: u64,
    /// The versions that the Nodes report.
    pub(crate) platform: String,
}

/// A Pod as reported by the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) node: String,
    pub(crate) uid: String,
    pub(crate) ips: Vec<std::net::IpAddr>,
    pub(crate) is_ready: bool,
    pub(crate) annotation: Option<String>,
}

impl World {
    /// Starts a cluster and applies the manifests of NPL and of the shop, as a user would.
    pub(crate) fn start(Network { cni, kube_proxy }: Network) -> Self {
        let machine = Machine::look();
        let start = Instant::now();
        let options = Options { kube_proxy, cni, ..Options::new(env!("CARGO_BIN_EXE_npl-cluster")) };
        let cluster = RealCluster::start(&options).unwrap();
        let ready = start.elapsed();
        let platform = platform(&cluster);
        let world = Self { cluster, kube_proxy, machine, answered: 0, lost: 0, platform };
        let manifests = [
            tools::repository_file("deploy/npl.yaml"),
            tools::repository_file("npl-testkit/tests/cluster/manifests/shop.yaml"),
        ];
        for manifest in manifests {
            world.kubectl(&["apply", "--filename", manifest.to_str().unwrap()]);
        }
        world.wait_for_rollout(AGENT_NAMESPACE, "daemonset/npl-agent");
        world.wait_for_rollout(NAMESPACE, "deployment/web");
        world.wait_for_rollout(NAMESPACE, "daemonset/caller");
        let (ready, all) = (ready.as_secs_f32(), start.elapsed().as_secs_f32());
        println!("    the Nodes were ready after {ready:.1} s, agent and shop after {all:.1} s");
        world
    }

    /// Removes the cluster and verifies that no object of it remains.
    pub(crate) fn end(self) {
        let residue = Residue::look_at(self.cluster.run(), &PathBuf::from("/sys/fs/bpf")).unwrap();
        assert!(residue.lines().count() > 10, "a running cluster must have processes and namespaces: {residue:?}");
        drop(self);
        residue.assert_gone().unwrap();
    }

    /// A command that runs `kubectl npl` with these arguments, as an administrator on a machine that is not a Node.
    pub(crate) fn plug_in(&self, arguments: &[&str]) -> Command {
        let folder = self.cluster.run().file("plug-in");
        if !folder.exists() {
            fs::create_dir(&folder).unwrap();
            symlink(fs::canonicalize(agent::find_binary().unwrap()).unwrap(), folder.join("kubectl-npl")).unwrap();
        }
        let mut command = self.cluster.cluster().command("kubectl").unwrap();
        let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
        command.env("PATH", path).arg("npl").args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// The Namespaces with this value of the label `app.kubernetes.io/name`.
    pub(crate) fn namespaces_named(&self, name: &str) -> Vec<Value> {
        let path = format!("/api/v1/namespaces?labelSelector=app.kubernetes.io/name%3D{name}");
        self.cluster.cluster().client().get(&path).unwrap()["items"].as_array().unwrap().clone()
    }

    /// Runs kubectl with administrator rights.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> String {
        self.cluster.cluster().kubectl(arguments).unwrap()
    }

    pub(crate) fn wait_for_rollout(&self, namespace: &str, what: &str) {
        self.kubectl(&["rollout", "status", what, "--namespace", namespace, timeout_option()]);
    }

    /// Sets environment variables of all agents, or unsets them (`NAME-`), and waits for the rollout.
    pub(crate) fn set_agent_variables(&self, variables: &[&str]) {
        let agents = ["set", "env", "daemonset/npl-agent", "--namespace", AGENT_NAMESPACE];
        self.kubectl(&[&agents[..], variables].concat());
        self.wait_for_rollout(AGENT_NAMESPACE, "daemonset/npl-agent");
    }

    /// Runs a subcommand of the agent's program in an agent's Pod.
    pub(crate) fn agent_command(&self, agent: &Pod, arguments: &[&str]) -> String {
        let exec = ["exec", &agent.name, "--namespace", AGENT_NAMESPACE, "--", "/npl-agent"];
        self.kubectl(&[&exec[..], arguments].concat())
    }

    /// Returns the Pods with this label that are not terminating.
    pub(crate) fn pods(&self, namespace: &str, selector: &str) -> Vec<Pod> {
        let list = self.cluster.cluster().client().get(&pods_with_label(namespace, selector)).unwrap();
        let pods = list["items"].as_array().unwrap().iter();
        pods.filter(|pod| pod.pointer("/metadata/deletionTimestamp").is_none()).map(Pod::read).collect()
    }

    /// Returns the annotation entries of a Pod, once there are as many as expected.
    pub(crate) fn entries(&self, pod: &str, count: usize) -> Vec<Entry> {
        let read = |value: Option<&str>| Entry::parse(value?).ok().filter(|entries| entries.len() == count);
        let wanted = |value: Option<&str>| read(value).is_some();
        let value = self.cluster.cluster().wait_for_annotation(NAMESPACE, pod, LIMIT, wanted).unwrap();
        read(value.as_deref()).unwrap()
    }

    /// Returns a Node on which a Pod does not run.
    pub(crate) fn other_node(&self, pod: &Pod) -> NodeNumber {
        self.cluster.nodes().iter().map(Node::number).find(|number| number.name() != pod.node).unwrap()
    }

    /// Waits until the shop has `count` Pods, all ready and annotated.
    pub(crate) fn wait_for_shop(&self, count: usize) -> BTreeMap<String, Pod> {
        let complete = || {
            let pods = self.pods(NAMESPACE, "app=web");
            let done = pods.len() == count && pods.iter().all(|pod| pod.is_ready && pod.annotation.is_some());
            done.then_some(pods)
        };
        let (pods, _) = poll::until("the shop's Pods", LIMIT, complete).unwrap();
        pods.into_iter().map(|pod| (pod.name.clone(), pod)).collect()
    }

    /// The state of the cluster for diagnosis after a failure.
    pub(crate) fn describe(&self) -> String {
        let questions: [&[&str]; 3] = [
            &["get", "pods", "--all-namespaces", "--output", "wide"],
            &["get", "events", "--all-namespaces", "--field-selector", "type=Warning"],
            &["logs", "--namespace", AGENT_NAMESPACE, "daemonset/npl-agent", "--all-pods", "--tail", "20"],
        ];
        let answers =
            questions.map(|words| self.cluster.cluster().kubectl(words).unwrap_or_else(|err| err.to_string()));
        answers.join("\n")
    }
}

fn platform(cluster: &RealCluster) -> String {
    let node = cluster.cluster().client().get("/api/v1/nodes/node-1").unwrap();
    let info = |name: &str| node["status"]["nodeInfo"][name].as_str().unwrap_or_default().to_owned();
    let (kubelet, kernel, runtime) = (info("kubeletVersion"), info("kernelVersion"), info("containerRuntimeVersion"));
    format!("Kubernetes {kubelet}, Linux {kernel}, {runtime}")
}

impl Pod {
    fn read(object: &Value) -> Self {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let ips = object.pointer("/status/podIPs").and_then(Value::as_array).into_iter().flatten();
        Self {
            name: text("/metadata/name"),
            node: text("/spec/nodeName"),
            uid: text("/metadata/uid"),
            ips: ips.filter_map(|ip| ip["ip"].as_str()?.parse().ok()).collect(),
            is_ready: is_ready(object),
            annotation: annotation_of(object).map(str::to_owned),
        }
    }
}
