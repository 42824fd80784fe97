// SPDX-License-Identifier: Apache-2.0
//! `kubectl npl mappings`: lists the published node ports of the cluster, from the Pods' annotations.

use std::process::ExitCode;

use serde::Serialize;

use super::{Kubectl, cluster};
use crate::{
    cli::{print, print_json, table},
    config::{args::OutputFormat, kubectl_args::ClusterMappingsArgs},
    core::{check::Cluster, ports::select::requests_entry, publish::annotation},
};

/// A published node port.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Row {
    namespace: String,
    pod: String,
    node: String,
    node_ip: Option<String>,
    node_port: u16,
    protocol: &'static str,
    family: &'static str,
    pod_port: u16,
    services: Vec<String>,
}

/// Prints the published node ports of the cluster.
pub(super) fn show(kubectl: Kubectl<'_>, args: &ClusterMappingsArgs) -> anyhow::Result<ExitCode> {
    let cluster = cluster::read(kubectl, args.namespace.as_deref())?;
    let rows = rows(&cluster, args.node.as_deref());
    match args.output {
        OutputFormat::Json => print_json(&rows)?,
        OutputFormat::Table | OutputFormat::Wide if rows.is_empty() => print("No published node ports.\n")?,
        OutputFormat::Table | OutputFormat::Wide => print(&as_table(&rows))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Lists the published node ports of all Nodes, or of one Node.
pub(super) fn rows(cluster: &Cluster, node: Option<&str>) -> Vec<Row> {
    let mut rows = Vec::new();
    for (pod, pod_node) in &cluster.pods {
        let Some(pod_node) = pod_node.as_deref().filter(|name| node.is_none_or(|wanted| *name == wanted)) else {
            continue;
        };
        for entry in pod.annotation.as_deref().map(annotation::published).unwrap_or_default() {
            let requesting = cluster.services.iter().filter(|service| requests_entry(service, pod, &entry.seen));
            rows.push(Row {
                namespace: pod.key.namespace.to_string(),
                pod: pod.key.name.to_string(),
                node: pod_node.to_owned(),
                node_ip: entry.node_ip.map(|ip| ip.to_string()),
                node_port: entry.seen.node_port.0,
                protocol: entry.seen.protocol.as_str(),
                family: entry.seen.family.as_str(),
                pod_port: entry.seen.pod_port.0,
                services: requesting.map(|service| service.key.name.to_string()).collect(),
            });
        }
    }
    rows.sort_unstable();
    rows
}

fn as_table(rows: &[Row]) -> String {
    let cells = rows.iter().map(|row| {
        let address = match &row.node_ip {
            Some(ip) if ip.contains(':') => format!("[{ip}]:{}", row.node_port),
            Some(ip) => format!("{ip}:{}", row.node_port),
            None => format!("-:{}", row.node_port),
        };
        let services = if row.services.is_empty() { "-".to_owned() } else { row.services.join(",") };
        let pod = format!("{}/{}", row.namespace, row.pod);
        vec![pod, row.node.clone(), address, row.protocol.to_owned(), row.pod_port.to_string(), services]
    });
    table(&["POD", "NODE", "NODE ADDRESS", "PROTOCOL", "POD PORT", "SERVICES"], cells)
}
