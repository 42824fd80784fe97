// SPDX-License-Identifier: Apache-2.0
//! `npl-agent flows`: lists the entries of NPL's flow tables, with the Pod's name and the addresses of client, Node and
//! Pod, and with the packets and bytes that kernel conntrack has counted.

use std::{collections::BTreeMap, path::Path, time::Duration};

use serde::Serialize;
use serde_json::Value;

use super::{duration, facts::setting, note, print, table};
use crate::{
    config::args::{FlowsArgs, OutputFormat, ViewArgs},
    core::{
        doctor::Setting,
        model::{ConnectionTraffic, Frontend, Protocol, sources::SourceRange},
        view::{AgentView, NodePortView},
    },
    datapath::{Pins, Tables, kernel_clock, preflight, tables::FlowRecord},
    local,
    nft_guard::{ConnectionKey, connection_traffic},
};

/// The sysctl that makes kernel conntrack count packets and bytes. The sysctl does not exist if the kernel has no
/// conntrack, or has not loaded it.
const ACCOUNTING: &str = "net/netfilter/nf_conntrack_acct";

/// The packets and bytes of each connection of kernel conntrack.
type Traffic = BTreeMap<ConnectionKey, ConnectionTraffic>;

/// A row of the output of `npl-agent flows`: one flow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct FlowRow {
    protocol: &'static str,
    /// The client's address and port.
    client: String,
    /// The node address and node port that the client uses.
    node: String,
    /// The Pod's address and port.
    pod_address: String,
    /// The Pod's namespace. If no agent runs, the namespace and the name of the Pod are absent.
    namespace: Option<String>,
    pod: Option<String>,
    /// The state of the connection: `established`, `closing`, `closed` or `reset`.
    state: &'static str,
    /// Time since a packet last refreshed the conntrack entry. An entry is refreshed at most once per 256 jiffies (0.25
    /// to 2.6 s), so the last packet may have arrived later.
    idle_millis: u64,
    /// The packets and bytes of the client and of the Pod, as kernel conntrack has counted them. `None` if kernel
    /// conntrack has no counters for the flow: with `nf_conntrack_acct=0`, or if NPL redirects the flow's packets from
    /// the first one on.
    request_packets: Option<u64>,
    request_bytes: Option<u64>,
    reply_packets: Option<u64>,
    reply_bytes: Option<u64>,
}

/// The conditions that a flow must meet to be shown. A condition that is `None` admits every flow.
#[derive(Debug, Default)]
struct Filter<'a> {
    namespace: Option<&'a str>,
    pod: Option<&'a str>,
    client: Option<SourceRange>,
    node_port: Option<u16>,
    protocol: Option<Protocol>,
}

impl Filter<'_> {
    fn admits(&self, record: &FlowRecord, view: Option<&NodePortView>) -> bool {
        let namespace = view.and_then(|view| view.namespace.as_deref());
        let pod = view.and_then(|view| view.pod.as_deref());
        let client = record.client.ip();
        self.namespace.is_none_or(|wanted| namespace == Some(wanted))
            && self.pod.is_none_or(|start| pod.is_some_and(|pod| pod.starts_with(start)))
            && self.client.is_none_or(|range| range.contains(client))
            && self.node_port.is_none_or(|port| record.nat.port() == port)
            && self.protocol.is_none_or(|protocol| record.protocol == protocol)
    }
}

/// Prints the flows in NPL's flow tables. Flows whose handshake is not complete are not in these tables.
///
/// # Errors
///
/// If the maps cannot be read, or standard output cannot be written.
pub async fn show(args: &FlowsArgs) -> anyhow::Result<()> {
    let bpffs = &args.node.view.bpffs;
    preflight::check_bpffs(bpffs)?;
    let agent = match local::ask(&args.node.runtime_dir).await {
        Ok(agent) => Some(agent),
        Err(error) => {
            note(&format!("{error}; the flows are shown without Pod names"));
            None
        }
    };
    let (records, now) = (Tables::open(&Pins::new(bpffs))?.flows()?, kernel_clock());
    let filter = Filter {
        namespace: args.namespace.as_deref(),
        pod: args.pod.as_deref(),
        client: args.client,
        node_port: args.node_port,
        protocol: args.protocol,
    };
    let (traffic, remark) = counted();
    if let Some(remark) = remark {
        note(&remark);
    }
    let rows = rows(&records, agent.as_ref(), &traffic, &filter, now);
    match args.node.view.output {
        // Each flow is one line of JSON, so that `grep` and `jq` can process long output line by line.
        OutputFormat::Json => {
            let line = |row| serde_json::to_string(row).map(|line| line + "\n");
            print(&rows.iter().map(line).collect::<Result<String, _>>()?)
        }
        OutputFormat::Table | OutputFormat::Wide if rows.is_empty() => print("No flows.\n"),
        OutputFormat::Table | OutputFormat::Wide => print(&as_table(&rows)),
    }
}

/// Returns all flows as JSON, for the support archive.
pub(super) async fn document(view: &ViewArgs, runtime_dir: &Path) -> anyhow::Result<Value> {
    preflight::check_bpffs(&view.bpffs)?;
    let agent = local::ask(runtime_dir).await.ok();
    let records = Tables::open(&Pins::new(&view.bpffs))?.flows()?;
    let (traffic, _remark) = counted();
    Ok(serde_json::to_value(rows(&records, agent.as_ref(), &traffic, &Filter::default(), kernel_clock()))?)
}

/// Returns the packets and bytes that kernel conntrack has counted, and a remark if there are none.
fn counted() -> (Traffic, Option<String>) {
    if !matches!(setting(ACCOUNTING), Setting::Is(value) if value == "1") {
        let remark = "the flows are shown without packets and bytes: for new flows, set \
            net.netfilter.nf_conntrack_acct=1 on this Node";
        return (Traffic::new(), Some(remark.to_owned()));
    }
    match connection_traffic() {
        Ok(traffic) => (traffic, None),
        Err(error) => (
            Traffic::new(),
            Some(format!("read kernel conntrack: {error}; the flows are shown without packets and bytes")),
        ),
    }
}

/// Returns the flows that `filter` selects, with the names of their Pods. The most recently used flow comes first.
fn rows(
    records: &[FlowRecord],
    agent: Option<&AgentView>,
    traffic: &Traffic,
    filter: &Filter<'_>,
    now: Duration,
) -> Vec<FlowRow> {
    let views = agent.map(|agent| agent.node_ports.as_slice()).unwrap_or_default();
    let views: BTreeMap<Frontend, &NodePortView> = views.iter().map(|view| (view.frontend, view)).collect();
    let mut rows: Vec<FlowRow> = records
        .iter()
        .map(|record| (record, views.get(&record.frontend()).copied()))
        .filter(|(record, view)| filter.admits(record, *view))
        // Kernel conntrack sees a request after the translation, so its entry is for a connection to the Pod.
        .map(|(record, view)| (record, view, traffic.get(&(record.protocol, record.client, record.pod))))
        .map(|(record, view, traffic)| FlowRow {
            protocol: record.protocol.as_str(),
            client: record.client.to_string(),
            node: record.nat.to_string(),
            pod_address: record.pod.to_string(),
            namespace: view.and_then(|view| view.namespace.clone()),
            pod: view.and_then(|view| view.pod.clone()),
            state: record.state(),
            idle_millis: u64::try_from(now.saturating_sub(record.last_seen).as_millis()).unwrap_or(u64::MAX),
            request_packets: traffic.map(|it| it.request_packets),
            request_bytes: traffic.map(|it| it.request_bytes),
            reply_packets: traffic.map(|it| it.reply_packets),
            reply_bytes: traffic.map(|it| it.reply_bytes),
        })
        .collect();
    rows.sort_by(|one, other| (one.idle_millis, &one.client).cmp(&(other.idle_millis, &other.client)));
    rows
}

const COLUMNS: [&str; 11] = [
    "PROTOCOL",
    "CLIENT",
    "NODE",
    "POD ADDRESS",
    "POD",
    "STATE",
    "IDLE",
    "REQUESTS",
    "REQUEST BYTES",
    "REPLIES",
    "REPLY BYTES",
];

fn as_table(rows: &[FlowRow]) -> String {
    let cells = rows.iter().map(|row| {
        let pod = row.namespace.as_ref().zip(row.pod.as_ref());
        let pod = pod.map_or_else(|| "-".to_owned(), |(namespace, pod)| format!("{namespace}/{pod}"));
        let ends = [&row.client, &row.node, &row.pod_address].map(Clone::clone);
        let state = [pod, row.state.to_owned(), duration(row.idle_millis)];
        let counts = [row.request_packets, row.request_bytes, row.reply_packets, row.reply_bytes];
        let counts = counts.map(|count| count.map_or_else(|| "-".to_owned(), |count| count.to_string()));
        [vec![row.protocol.to_owned()], ends.to_vec(), state.to_vec(), counts.to_vec()].concat()
    });
    table(&COLUMNS, cells)
}

#[cfg(test)]
mod tests;
