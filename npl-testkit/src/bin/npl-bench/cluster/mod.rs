// SPDX-License-Identifier: Apache-2.0
//! Measures a real cluster: the time until Pods are annotated, and the time of a request to each address of a Pod.
//!
//! The bench starts one cluster per kube-proxy mode and one with Cilium in place of kube-proxy, one after the other. In
//! each of these clusters, every round sends requests to every address. In a further cluster, many Pods are started at
//! the same time.

mod figures;
mod load;

use std::iter;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use npl_testkit::cluster::{Entry, annotation_of, pods_with_label, timeout_option};
use npl_testkit::real_cluster::publication::{Seen, watch_pods};
use npl_testkit::real_cluster::{Cni, KubeProxy, Options, RealCluster};
use npl_testkit::{interrupt, poll, tools};
use serde_json::Value;

use self::figures::ClusterFigures;
pub(crate) use self::figures::figures;
use self::load::Measured;
use crate::Effort;
use crate::figures::{Figure, Samples, Stage, say};

const NAMESPACE: &str = "bench";
/// The API path of the Pod that receives the requests.
const POD: &str = "/api/v1/namespaces/bench/pods/echo";
const POD_PORT: u16 = 8080;
/// The node port of the Service in `shop.yaml`.
const NODE_PORT: u16 = 30080;
/// The number of Pods that are started at the same time.
const CROWD: usize = 80;
const CROWD_LABEL: &str = "app=crowd";
/// The time limit of every wait.
const LIMIT: Duration = Duration::from_mins(3);

/// The addresses at which clients reach the measured Pod: the Pod's own address, its mapping, and the node port of a
/// Service of type `NodePort`, on the Pod's Node and on another Node.
struct Targets {
    own: SocketAddr,
    mapping: SocketAddr,
    same_node: SocketAddr,
    other_node: SocketAddr,
}

/// Measures these figures. Stages that none of the figures needs are not run.
pub(crate) fn measure(figures: &[&Figure], effort: Effort, samples: &mut Samples) -> Result<()> {
    let needs = |stage: Stage| figures.iter().any(|figure| figure.stage == stage);
    for (stage, mode, by_stack, by_offload) in [
        (Stage::Iptables, KubeProxy::Iptables, &figures::IPTABLES, &figures::IPTABLES_OFFLOAD),
        (Stage::Nftables, KubeProxy::Nftables, &figures::NFTABLES, &figures::NFTABLES_OFFLOAD),
    ] {
        if needs(stage) {
            let cluster = start(Cni::default(), mode)?;
            let targets = prepare_targets(&cluster)?;
            measure_addresses(&cluster, &targets, by_stack, effort, samples)?;
            say("switching the agents to --forwarding offload");
            cluster.offload()?;
            measure_addresses(&cluster, &targets, by_offload, effort, samples)?;
        }
    }
    if needs(Stage::Cilium) {
        // The Nodes of a cloud have routes to the Pods of other Nodes; Cilium's mode with routes is also its faster one.
        let cluster = start(Cni::CiliumNative, KubeProxy::None)?;
        let local = r#"{"spec": {"externalTrafficPolicy": "Local"}}"#;
        kubectl(&cluster, &["patch", "service", "node-port", "--namespace", NAMESPACE, "--patch", local])?;
        measure_addresses(&cluster, &prepare_targets(&cluster)?, &figures::CILIUM, effort, samples)?;
    }
    if needs(Stage::Crowd) {
        let cluster = start(Cni::default(), KubeProxy::default())?;
        for round in 0..effort.crowds {
            say(&format!("starting {CROWD} Pods at the same time, round {} of {}", round + 1, effort.crowds));
            measure_crowd(&cluster, samples)?;
        }
    }
    Ok(())
}

/// Starts a cluster, applies NPL's manifest as a user does, and creates the measured Pod.
fn start(cni: Cni, kube_proxy: KubeProxy) -> Result<RealCluster> {
    say(&format!("starting a cluster with the network {cni} and the kube-proxy mode {kube_proxy}"));
    let options = Options { cni, kube_proxy, ..Options::beside_this_program()? };
    let cluster = RealCluster::start(&options)?;
    set_up(&cluster)?;
    Ok(cluster)
}

fn set_up(cluster: &RealCluster) -> Result<()> {
    for file in ["deploy/npl.yaml", "npl-testkit/src/bin/npl-bench/cluster/shop.yaml"] {
        let manifest = tools::repository_file(file);
        kubectl(cluster, &["apply", "--filename", manifest.to_str().context("the path is not valid UTF-8")?])?;
    }
    kubectl(cluster, &["rollout", "status", "daemonset/npl-agent", "--namespace", "npl-system", timeout_option()])?;
    kubectl(cluster, &["wait", "--for=condition=Ready", "pod/echo", "--namespace", NAMESPACE, timeout_option()])
}

fn kubectl(cluster: &RealCluster, arguments: &[&str]) -> Result<()> {
    cluster.cluster().kubectl(arguments).map(drop)
}

/// Pins the processes of the measured Pod to the server's processor, and returns the Pod's addresses.
fn prepare_targets(cluster: &RealCluster) -> Result<Targets> {
    let pod = cluster.cluster().client().get(POD)?;
    let uid = pod.pointer("/metadata/uid").and_then(Value::as_str).context("the Pod has no UID")?;
    for process in cluster.nodes()[0].pod_processes(uid)? {
        load::stay_on_server_cpu(process)?;
    }
    targets(cluster)
}

fn targets(cluster: &RealCluster) -> Result<Targets> {
    let find = || {
        let pod = cluster.cluster().client().get(POD).ok()?;
        let own: IpAddr = pod.pointer("/status/podIP").and_then(Value::as_str)?.parse().ok()?;
        let annotation = annotation_of(&pod)?;
        let entries = Entry::parse(annotation).ok()?;
        Some((own, entries.iter().map(Entry::address).find(SocketAddr::is_ipv4)?))
    };
    let ((own, mapping), _) = poll::until("the Pod's annotation", LIMIT, find)?;
    let node = |index: usize| cluster.nodes().get(index).map(|node| IpAddr::from(node.number().v4()));
    let (same, other) = node(0).zip(node(1)).context("the cluster has fewer than two Nodes")?;
    ensure!(mapping.ip() == same, "the Pod must run on the Node {same}, but its annotation contains {mapping}");
    Ok(Targets {
        own: (own, POD_PORT).into(),
        mapping,
        same_node: (same, NODE_PORT).into(),
        other_node: (other, NODE_PORT).into(),
    })
}

fn measure_addresses(
    cluster: &RealCluster,
    targets: &Targets,
    comparisons: &ClusterFigures,
    effort: Effort,
    samples: &mut Samples,
) -> Result<()> {
    let Targets { own, mapping, same_node, other_node } = *targets;
    let ClusterFigures { own: to_own, same_node: to_same_node, other_node: to_other_node } = comparisons;
    let others = [(to_own.as_ref(), own), (Some(to_same_node), same_node), (to_other_node.as_ref(), other_node)];
    let others: Vec<_> = others.into_iter().filter_map(|(figures, address)| Some((figures?, address))).collect();
    let servers: Vec<SocketAddr> = iter::once(mapping).chain(others.iter().map(|(_, address)| *address)).collect();
    for round in 0..effort.rounds {
        ensure!(!interrupt::is_requested(), "interrupted");
        say(&format!("sending requests, round {} of {}", round + 1, effort.rounds));
        let measured = load::measure(cluster.client(), &servers, effort.requests, effort.connections)?;
        let (mapping, measured) = measured.split_first().context("the mapping was not measured")?;
        for ((figures, _), beside) in others.iter().zip(measured) {
            let Measured { requests, rate, connections, busy } = beside;
            samples.add(&figures.request, &mapping.requests, requests);
            samples.add(&figures.rate, &[mapping.rate], &[*rate]);
            samples.add(&figures.connection, &mapping.connections, connections);
            samples.add(&figures.busy, &[mapping.busy], &[*busy]);
        }
    }
    Ok(())
}

fn measure_crowd(cluster: &RealCluster, samples: &mut Samples) -> Result<()> {
    let scale = |count: usize| {
        let replicas = format!("--replicas={count}");
        kubectl(cluster, &["scale", "deployment/crowd", &replicas, "--namespace", NAMESPACE])
    };
    let client = cluster.cluster().client();
    let pods = watch_pods(client, NAMESPACE, CROWD_LABEL, CROWD, LIMIT, || scale(CROWD))?;
    ensure!(
        pods.values().filter(|seen| seen.margin().is_some()).count() == CROWD,
        "not all {CROWD} Pods were annotated before they became ready"
    );
    let millis = |pick: fn(&Seen) -> Option<Duration>| -> Vec<f64> {
        pods.values().filter_map(pick).map(|time| time.as_secs_f64() * 1e3).collect()
    };
    samples.add(&figures::ADDRESS, &millis(|seen| seen.addressed?.checked_duration_since(seen.created?)), &[]);
    samples.add(&figures::ANNOTATION, &millis(Seen::delay), &[]);
    samples.add(&figures::MARGIN, &millis(Seen::margin), &[]);
    scale(0)?;
    let path = pods_with_label(NAMESPACE, CROWD_LABEL);
    let gone = || client.get(&path).is_ok_and(|list| list["items"].as_array().is_some_and(Vec::is_empty));
    poll::until_gone("the deletion of the Deployment's Pods", LIMIT, gone)
}
