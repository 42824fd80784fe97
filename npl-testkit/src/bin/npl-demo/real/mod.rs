// SPDX-License-Identifier: Apache-2.0
//! The demo on a real Kubernetes cluster of two Nodes, with the commands that a user types.

mod moves;
mod routes;

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use npl_testkit::cluster::{ENABLED_ANNOTATION, timeout_option};
use npl_testkit::interrupt;
use npl_testkit::real_cluster::{Options, RealCluster};
use npl_testkit::residue::Residue;
use npl_testkit::tools;

use crate::report::Report;

/// The namespace of the Pods and of the Service.
const NAMESPACE: &str = "shop";

/// The namespace of the agent.
const AGENT_NAMESPACE: &str = "npl-system";

/// Runs the demo and removes the cluster, also after an error.
pub(crate) fn run(report: &mut Report, keep_up: bool) -> Result<()> {
    report.step("Start a real Kubernetes cluster of two Nodes: kubelet, containerd, kube-proxy and a CNI plug-in, in namespaces")?;
    let start = Instant::now();
    let cluster = RealCluster::start(&Options::beside_this_program()?)?;
    report.say(&format!("ready after {:.1} s", start.elapsed().as_secs_f32()))?;
    report.record("clusterReadySeconds", &start.elapsed().as_secs_f32())?;
    let columns = "--output=custom-columns=NODE:.metadata.name,VERSION:.status.nodeInfo.kubeletVersion,\
                   RUNTIME:.status.nodeInfo.containerRuntimeVersion,ADDRESSES:.status.addresses[*].address";
    show(report, &cluster, &["get", "nodes", columns])?;
    install(report, &cluster)?;
    let routes = routes::run(report, &cluster)?;
    routes::ask(report, &cluster, &routes)?;
    moves::run(report, &cluster)?;
    if keep_up {
        return keep(report, &cluster);
    }
    uninstall(report, &cluster)?;
    end(report, cluster)
}

fn install(report: &mut Report, cluster: &RealCluster) -> Result<()> {
    report.step("Install NPL and a Deployment of four Pods")?;
    apply(report, cluster, "deploy/npl.yaml")?;
    show(
        report,
        cluster,
        &["rollout", "status", "daemonset/npl-agent", "--namespace", AGENT_NAMESPACE, timeout_option()],
    )?;
    apply(report, cluster, "npl-testkit/src/bin/npl-demo/real/shop.yaml")?;
    show(report, cluster, &["rollout", "status", "deployment/web", "--namespace", NAMESPACE, timeout_option()])?;
    show(report, cluster, &["get", "pods", "--namespace", NAMESPACE, "--output", "wide"])
}

fn uninstall(report: &mut Report, cluster: &RealCluster) -> Result<()> {
    report.step("Uninstall NPL")?;
    let retire = ["set", "env", "daemonset/npl-agent", "NPL_RETIRE=true", "NPL_DRAIN=5s"];
    show(report, cluster, &[&retire[..], &["--namespace", AGENT_NAMESPACE]].concat())?;
    show(
        report,
        cluster,
        &["rollout", "status", "daemonset/npl-agent", "--namespace", AGENT_NAMESPACE, timeout_option()],
    )?;
    let annotations = routes::annotations(cluster)?;
    let left = annotations.values().flatten().count();
    report.claim("no Pod has an annotation", left == 0, format!("{left} of {}", annotations.len()))?;
    let manifest = tools::repository_file("deploy/npl.yaml");
    report.say(&format!("$ kubectl delete --filename deploy/npl.yaml {}", timeout_option()))?;
    report.quote(&kubectl(cluster, &["delete", "--filename", path(&manifest)?, timeout_option()])?)?;
    let ready = "--output=jsonpath={.status.readyReplicas}";
    let pods = kubectl(cluster, &["get", "deployment", "web", "--namespace", NAMESPACE, ready])?;
    report.claim("the Deployment is not affected", pods.trim() == "4", format!("{} of 4 Pods ready", pods.trim()))
}

fn end(report: &mut Report, cluster: RealCluster) -> Result<()> {
    let inventory = Residue::look_at(cluster.run(), Path::new("/sys/fs/bpf"))?;
    drop(cluster);
    let gone = inventory.assert_gone();
    let detail =
        gone.as_ref().map_or_else(ToString::to_string, |()| format!("{} objects removed", inventory.lines().count()));
    report.claim("no namespace, process, mount or cgroup of the cluster remains", gone.is_ok(), detail)
}

/// Prints commands to inspect the cluster and waits for Ctrl-C.
fn keep(report: &mut Report, cluster: &RealCluster) -> Result<()> {
    report.step("The cluster keeps running: explore it as root in another terminal")?;
    let (lan, client) = (cluster.lan().name(), cluster.client().name());
    let kubeconfig = cluster.kubeconfig();
    let commands = [
        ("kubeconfig", kubeconfig.display().to_string()),
        (
            "kubectl",
            format!(
                "ip netns exec {lan} kubectl --kubeconfig {} get pods --all-namespaces --output wide",
                kubeconfig.display()
            ),
        ),
        ("request", format!("ip netns exec {client} curl --silent http://NODE-IP:NODE-PORT/")),
    ];
    for (what, command) in &commands {
        report.say(&format!("{what:<14} {command}"))?;
    }
    report.say("Press Ctrl-C to remove everything.")?;
    report.record("lookAround", &commands.map(|(_, command)| command))?;
    report.publish()?;
    interrupt::wait();
    Ok(())
}

/// Enables the Service.
fn enable(report: &Report, cluster: &RealCluster) -> Result<()> {
    let enabled = format!("{ENABLED_ANNOTATION}=true");
    show(report, cluster, &["annotate", "service", "web", "--namespace", NAMESPACE, &enabled])
}

/// Applies a manifest of the repository with kubectl. The printed command contains the manifest's path in the
/// repository, independent of the checkout's location.
fn apply(report: &Report, cluster: &RealCluster, file: &str) -> Result<()> {
    report.say(&format!("$ kubectl apply --filename {file}"))?;
    let manifest = tools::repository_file(file);
    report.quote(&kubectl(cluster, &["apply", "--filename", path(&manifest)?])?)
}

/// Prints a kubectl command, runs it and prints its output.
fn show(report: &Report, cluster: &RealCluster, arguments: &[&str]) -> Result<()> {
    report.say(&format!("$ kubectl {}", arguments.join(" ")))?;
    report.quote(&kubectl(cluster, arguments)?)
}

fn kubectl(cluster: &RealCluster, arguments: &[&str]) -> Result<String> {
    cluster.cluster().kubectl(arguments)
}

fn path(file: &Path) -> Result<&str> {
    file.to_str().with_context(|| format!("{} is not valid UTF-8", file.display()))
}
