// SPDX-License-Identifier: Apache-2.0
//! Enables the Service and waits for the annotations of its Pods.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use npl_testkit::cluster::{ENABLED_ANNOTATION, Entry};
use npl_testkit::echo::Protocol;
use serde_json::json;

use crate::environment::{Environment, NAMESPACE, PODS, SERVICE, TCP_PORT, UDP_PORT};
use crate::report::{Report, milliseconds};

/// The time limit for an annotation, which usually takes milliseconds.
const LIMIT: Duration = Duration::from_mins(1);

/// The annotation entries of each Pod.
pub(crate) type Routes = BTreeMap<String, Vec<Entry>>;

/// Enables the Service and returns the annotation entries of its Pods.
pub(crate) fn run(report: &mut Report, env: &mut Environment) -> Result<Routes> {
    report.step("Enable the Service: the agent allocates node ports and annotates the Pods")?;
    let enable = format!("{ENABLED_ANNOTATION}=true");
    report.say(&format!("$ kubectl --namespace {NAMESPACE} annotate service {SERVICE} {enable}"))?;
    env.cluster.kubectl(&["--namespace", NAMESPACE, "annotate", "service", SERVICE, &enable])?;
    let start = env.enabled.wait_for(SERVICE, LIMIT, |value| value == Some("true"))?.at;
    let (mut routes, mut rows, mut data) = (Routes::new(), Vec::new(), Vec::new());
    for pod in PODS {
        let (entries, at) = wait_for_route(env, pod)?;
        let delay = at.saturating_duration_since(start);
        for entry in &entries {
            let from = format!("{}/{}", entry.address(), entry.protocol);
            rows.push(vec![pod.to_owned(), milliseconds(delay), from, entry.pod_port.to_string()]);
        }
        data.push(json!({"pod": pod, "milliseconds": delay.as_secs_f64() * 1000.0, "annotation": entries}));
        routes.insert(pod.to_owned(), entries);
    }
    report.record("annotations", &data)?;
    report.table(&["POD", "ANNOTATED AFTER (MS)", "NODE PORT", "POD PORT"], rows)?;
    check(report, env, &routes)?;
    show_mappings(report, env)?;
    Ok(routes)
}

/// Waits until a Pod's annotation has an entry for TCP and one for UDP. Returns the entries, and the time at which the
/// watch first delivered the annotation with both entries.
pub(crate) fn wait_for_route(env: &Environment, pod: &str) -> Result<(Vec<Entry>, std::time::Instant)> {
    let is_complete = |value: Option<&str>| {
        value.and_then(|value| Entry::parse(value).ok()).is_some_and(|entries| entries.len() == 2)
    };
    let seen = env.mappings.wait_for(pod, LIMIT, is_complete)?;
    let entries = Entry::parse(&seen.value.unwrap_or_default())?;
    for (protocol, port) in [(Protocol::Tcp, TCP_PORT), (Protocol::Udp, UDP_PORT)] {
        let is_there = entries.iter().any(|entry| (entry.protocol, entry.pod_port) == (protocol, port));
        ensure!(is_there, "the annotation of {pod} has no entry for {protocol} port {port}: {entries:?}");
    }
    Ok((entries, seen.at))
}

/// Returns the entry of a Pod for a protocol.
pub(crate) fn entry<'a>(routes: &'a Routes, pod: &str, protocol: Protocol) -> Result<&'a Entry> {
    let entries = routes.get(pod).with_context(|| format!("{pod} has no annotation"))?;
    entries
        .iter()
        .find(|entry| entry.protocol == protocol)
        .with_context(|| format!("the annotation of {pod} has no {protocol} entry"))
}

fn check(report: &mut Report, env: &Environment, routes: &Routes) -> Result<()> {
    let mut ports: Vec<_> = routes.values().flatten().map(|entry| (entry.node_port, entry.protocol)).collect();
    let all = ports.len();
    ports.sort_unstable();
    ports.dedup();
    report.claim("every port of every Pod has a distinct node port", ports.len() == all, format!("{all} ports"))?;
    let is_node = routes.values().flatten().all(|entry| entry.node_ip == env.node_ip());
    report.claim("every annotation contains the address of the Pod's Node", is_node, env.node_ip().to_string())
}

fn show_mappings(report: &mut Report, env: &Environment) -> Result<()> {
    report.say("$ npl-agent mappings")?;
    report.quote(&env.node_command().command(&["mappings"])?)?;
    let mappings = env.node_command().command_json("mappings")?;
    let count = mappings.as_array().map_or(0, Vec::len);
    report.claim("the kernel has one mapping per Pod port", count == 2 * PODS.len(), format!("{count} mappings"))?;
    report.record("mappings", &mappings)
}
