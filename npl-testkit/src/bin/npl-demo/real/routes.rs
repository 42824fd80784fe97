// SPDX-License-Identifier: Apache-2.0
//! The Service is annotated, each Pod says where it is reached, and a client asks there.

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

/// Far more than agents need, also on a loaded machine.
const LIMIT: Duration = Duration::from_secs(30);

/// Node ports of a Pod: TCP and UDP, IPv4 and IPv6.
const PORTS: usize = 4;

/// How each Pod is reached, as its annotation says.
pub(super) type Routes = BTreeMap<String, Vec<Entry>>;

/// Enables the Service; returns how its Pods are reached.
pub(super) fn tell(report: &mut Report, cluster: &RealCluster) -> Result<Routes> {
    report.chapter("The Service is annotated, and so is each of its Pods")?;
    enable(report, cluster)?;
    let start = Instant::now();
    let complete = || {
        let annotations = annotations(cluster).ok()?;
        let entries = |value: Option<String>| Entry::parse(&value?).ok().filter(|entries| entries.len() == PORTS);
        annotations.into_iter().map(|(pod, value)| Some((pod, entries(value)?))).collect::<Option<Routes>>()
    };
    let (routes, _) = poll::until("the annotations of all Pods", LIMIT, complete)?;
    report.say(&format!("every Pod is annotated after {} ms", milliseconds(start.elapsed())))?;
    let key = MAPPING_ANNOTATION.replace('.', "\\.");
    let columns = format!("--output=custom-columns=POD:.metadata.name,ANNOTATION:.metadata.annotations.{key}");
    show(report, cluster, &["get", "pods", "--namespace", NAMESPACE, &columns])?;
    let nodes: Vec<IpAddr> = cluster.nodes().iter().flat_map(|node| node.number().addresses()).collect();
    let is_node = routes.values().flatten().all(|entry| nodes.contains(&entry.address().ip()));
    report.claim(
        "every port of every Pod has a node port of its own Node",
        is_node,
        format!("{} Pods", routes.len()),
    )?;
    report.record("annotations", &routes)?;
    Ok(routes)
}

/// Asks every Pod at every one of its node ports, from outside.
pub(super) fn ask(report: &mut Report, cluster: &RealCluster, routes: &Routes) -> Result<()> {
    report.chapter("A client outside of the cluster asks at the Nodes' addresses")?;
    let (mut rows, mut data) = (Vec::new(), Vec::new());
    let (mut right_pods, mut right_clients) = (0, 0);
    for (pod, entry) in routes.iter().flat_map(|(pod, entries)| entries.iter().map(move |entry| (pod, entry))) {
        let (protocol, server) = (entry.protocol, entry.address());
        let answer = traffic::request(cluster.client(), protocol, server, "who are you?");
        let (by, saw) = match &answer {
            Ok(answer) => (answer.pod.clone(), answer.client.to_string()),
            Err(err) => (format!("nobody: {err:#}"), String::new()),
        };
        right_pods += usize::from(by == *pod);
        right_clients += usize::from(answer.is_ok_and(|answer| client_addresses().contains(&answer.client.ip())));
        data.push(json!({"to": server, "protocol": protocol, "answeredBy": by, "clientSeen": saw}));
        rows.push(vec![format!("{server}/{protocol}"), by, saw]);
    }
    let asked = rows.len();
    report.record("answers", &data)?;
    report.table(&["ASKED", "ANSWERED BY", "POD SAW CLIENT"], rows)?;
    let count = |right: usize| format!("{right} of {asked}");
    report.claim(
        "each request is answered by the Pod that its node port belongs to",
        right_pods == asked,
        count(right_pods),
    )?;
    report.claim("each Pod sees the client's own address", right_clients == asked, count(right_clients))
}

/// The annotation of each Pod that is not on its way out.
pub(super) fn annotations(cluster: &RealCluster) -> Result<BTreeMap<String, Option<String>>> {
    let list = cluster.cluster().client().get(&format!("/api/v1/namespaces/{NAMESPACE}/pods"))?;
    let pods = list["items"].as_array().context("a list of Pods has items")?.iter();
    let annotation = |pod: &Value| {
        let name = pod.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default().to_owned();
        (name, annotation_of(pod).map(str::to_owned))
    };
    Ok(pods.filter(|pod| pod.pointer("/metadata/deletionTimestamp").is_none()).map(annotation).collect())
}
