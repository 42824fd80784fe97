// SPDX-License-Identifier: Apache-2.0
//! `npl-agent mappings`: the mappings of the datapath and their traffic counters.

use serde::Serialize;

use super::{print, print_json, table};
use crate::{
    config::args::{OutputFormat, ViewArgs},
    datapath::{inspect::Inspection, tables::MappingRecord},
};

/// One mapping of the output. Ports are in host byte order; counters start when the mapping is created.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct MappingRow {
    node_port: u16,
    protocol: &'static str,
    family: &'static str,
    pod_ip: String,
    pod_port: u16,
    /// Whether only the allowed sources may use the mapping.
    restricted: bool,
    /// Source ranges in CIDR notation; empty if the mapping is not restricted, or if no source is allowed.
    allowed_sources: Vec<String>,
    request_packets: u64,
    request_bytes: u64,
    reply_packets: u64,
    reply_bytes: u64,
    new_flows: u64,
    established_flows: u64,
}

impl From<&MappingRecord> for MappingRow {
    fn from(record: &MappingRecord) -> Self {
        let MappingRecord { frontend, backend, sources, stats } = record;
        Self {
            node_port: frontend.node_port.0,
            protocol: frontend.protocol.as_str(),
            family: frontend.family.as_str(),
            pod_ip: backend.pod_ip.to_string(),
            pod_port: backend.pod_port.0,
            restricted: sources.is_restricted(),
            allowed_sources: sources.ranges().map(|range| range.to_string()).collect(),
            request_packets: stats.request_packets,
            request_bytes: stats.request_bytes,
            reply_packets: stats.reply_packets,
            reply_bytes: stats.reply_bytes,
            new_flows: stats.new_flows,
            established_flows: stats.established_flows,
        }
    }
}

/// Prints every mapping of the datapath's maps.
///
/// # Errors
///
/// If the maps cannot be read, or standard output cannot be written.
pub fn show(args: &ViewArgs) -> anyhow::Result<()> {
    let rows: Vec<MappingRow> = Inspection::read(&args.bpffs)?.mappings.iter().map(MappingRow::from).collect();
    match args.output {
        OutputFormat::Json => print_json(&rows),
        OutputFormat::Table if rows.is_empty() => print("No mappings.\n"),
        OutputFormat::Table => print(&as_table(&rows)),
    }
}

fn as_table(rows: &[MappingRow]) -> String {
    let header =
        ["NODE PORT", "PROTOCOL", "FAMILY", "POD", "SOURCES", "REQUESTS", "REPLIES", "BYTES IN", "BYTES OUT", "FLOWS"];
    let cells = rows.iter().map(|row| {
        vec![
            row.node_port.to_string(),
            row.protocol.to_owned(),
            row.family.to_owned(),
            format!("{}:{}", row.pod_ip, row.pod_port),
            sources(row),
            row.request_packets.to_string(),
            row.reply_packets.to_string(),
            row.request_bytes.to_string(),
            row.reply_bytes.to_string(),
            row.established_flows.to_string(),
        ]
    });
    table(&header, cells)
}

/// The allowed sources of a mapping. A long list is cut after its first range, so that the table stays readable.
fn sources(row: &MappingRow) -> String {
    if !row.restricted {
        return "any".to_owned();
    }
    match row.allowed_sources.as_slice() {
        [] => "none".to_owned(),
        [one] => one.clone(),
        [one, others @ ..] => format!("{one} and {} more", others.len()),
    }
}
