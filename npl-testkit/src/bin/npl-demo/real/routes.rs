// SPDX-License-Identifier: Apache-2.0
//! Enables the Service, waits for the annotations of its Pods, and sends requests to the node ports.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use npl_testkit::cluster::{Entry, MAPPING_ANNOTATION, annotation_of};
use npl_testkit::poll;
use npl_testkit::real_cluster::{RealCluster, client_addresses};
use npl_testkit::traffic;
use serde_json::{Value, json};

use super::{NAMESPACE, enable, show};
use crate::report::{Report, milliseconds};

/// The time limit for all annotations, far above the usual duration.
const LIMIT: Duration = Duration::from_secs(30);

/// The number of node ports of a Pod: TCP and UDP, IPv4 and IPv6.
const PORTS: usize = 4;

/// The annotation entries of each Pod.
pub(super) type Routes = BTreeMap<String, Vec<Entry>>;

/// Enables the Service and returns the annotation entries of its Pods.
pub(super) fn run(report: &mut Report, cluster: &RealCluster) -> Result<Routes> {
    report.step("Enable the Service: the agents allocate node ports and annotate the Pods")?;
    enable(report, cluster)?;
    let start = Instant::now();
    let complete = || {
        let annotations = annotations(cluster).ok()?;
        let entries = |value: Option<String>| Entry::parse(&value?).ok().filter(|entries| entries.len() == PORTS);
        annotations.into_iter().map(|(pod, value)| Some((pod, entries(value)?))).collect::<Option<Routes>>()
    };
    let (routes, _) = poll::until("the annotations of all Pods", LIMIT, complete)?;
    report.say(&format!("all Pods were annotated within {} ms", milliseconds(start.elapsed())))?;
    let key = MAPPING_ANNOTATION.replace('.', "\\.");
    let columns = format!("--output=custom-columns=POD:.metadata.name,ANNOTATION:.metadata.annotations.{key}");
    show(report, cluster, &["get", "pods", "--namespace", NAMESPACE, &columns])?;
    let nodes: Vec<IpAddr> = cluster.nodes().iter().flat_map(|node| node.number().addresses()).collect();
    let is_node = routes.values().flatten().all(|entry| nodes.contains(&entry.address().ip()));
    report.claim(
        "every annotation contains addresses of the cluster's Nodes",
        is_node,
        format!("{} Pods", routes.len()),
    )?;
    report.record("annotations", &routes)?;
    Ok(routes)
}

/// Sends a request from outside the cluster to every node port of every Pod.
pub(super) fn ask(report: &mut Report, cluster: &RealCluster, routes: &Routes) -> Result<()> {
    report.step("Send requests from a client outside the cluster to each node port")?;
    let (mut rows, mut data) = (Vec::new(), Vec::new());
    let (mut right_pods, mut right_clients) = (0, 0);
    for (pod, entry) in routes.iter().flat_map(|(pod, entries)| entries.iter().map(move |entry| (pod, entry))) {
        let (protocol, server) = (entry.protocol, entry.address());
        let answer = traffic::request(cluster.client(), protocol, server, "who are you?");
        let (by, saw) = match &answer {
            Ok(answer) => (answer.pod.clone(), answer.client.to_string()),
            Err(err) => (format!("no response: {err:#}"), String::new()),
        };
        right_pods += usize::from(by == *pod);
        right_clients += usize::from(answer.is_ok_and(|answer| client_addresses().contains(&answer.client.ip())));
        data.push(json!({"to": server, "protocol": protocol, "answeredBy": by, "clientSeen": saw}));
        rows.push(vec![format!("{server}/{protocol}"), by, saw]);
    }
    let asked = rows.len();
    report.record("answers", &data)?;
    report.table(&["REQUEST TO", "RESPONSE FROM", "CLIENT SEEN BY POD"], rows)?;
    let count = |right: usize| format!("{right} of {asked}");
    report.claim(
        "each response comes from the Pod to which the node port is mapped",
        right_pods == asked,
        count(right_pods),
    )?;
    report.claim("each Pod sees the client's address without source NAT", right_clients == asked, count(right_clients))
}

/// Returns the annotations of all Pods that are not terminating.
pub(super) fn annotations(cluster: &RealCluster) -> Result<BTreeMap<String, Option<String>>> {
    let list = cluster.cluster().client().get(&format!("/api/v1/namespaces/{NAMESPACE}/pods"))?;
    let pods = list["items"].as_array().context("the list of Pods has no items")?.iter();
    let annotation = |pod: &Value| {
        let name = pod.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default().to_owned();
        (name, annotation_of(pod).map(str::to_owned))
    };
    Ok(pods.filter(|pod| pod.pointer("/metadata/deletionTimestamp").is_none()).map(annotation).collect())
}
