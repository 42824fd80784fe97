// SPDX-License-Identifier: Apache-2.0
//! `npl-agent mappings`: lists the node ports of this Node with their Pods, Services, states and traffic.

pub(in crate::cli) mod rows;

use std::{io::IsTerminal as _, path::Path};

use serde_json::Value;
use tokio::time::{Instant, sleep};

use self::rows::{MappingRow, rates, rows};
use super::{note, print, print_json, table};
use crate::{
    config::args::{MappingsArgs, OutputFormat, ViewArgs},
    core::view::AgentView,
    datapath::inspect::Inspection,
    local,
};

/// The escape sequence that moves the cursor to the top left and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Prints the node ports of this Node once. With `--watch`, prints the node ports again at each interval.
///
/// # Errors
///
/// If the maps cannot be read, or standard output cannot be written.
pub async fn show(args: &MappingsArgs) -> anyhow::Result<()> {
    let mut former = None;
    let mut is_noted = false;
    loop {
        let agent = match local::ask(&args.node.runtime_dir).await {
            Ok(agent) => Some(agent),
            Err(error) => {
                if !std::mem::replace(&mut is_noted, true) {
                    note(&format!("{error}; only the kernel's mappings are shown, without Pods, Services and states"));
                }
                None
            }
        };
        let inspection = Inspection::read(&args.node.view.bpffs)?;
        let read_at = Instant::now();
        let rates = former.as_ref().map(|(at, former): &(Instant, Inspection)| {
            rates(&former.mappings, &inspection.mappings, read_at.duration_since(*at))
        });
        let shown = rows(&inspection.mappings, agent.as_ref(), &filter(args), rates.as_ref());
        print_rows(args, &shown, agent.as_ref())?;
        let Some(interval) = args.watch else { return Ok(()) };
        former = Some((read_at, inspection));
        sleep(interval).await;
    }
}

/// Returns all node ports as JSON, for the support archive.
pub(super) async fn document(view: &ViewArgs, runtime_dir: &Path) -> anyhow::Result<Value> {
    let agent = local::ask(runtime_dir).await.ok();
    let all = rows::Filter { all: true, ..rows::Filter::default() };
    let rows = rows(&Inspection::read(&view.bpffs)?.mappings, agent.as_ref(), &all, None);
    Ok(serde_json::to_value(rows)?)
}

fn filter(args: &MappingsArgs) -> rows::Filter<'_> {
    rows::Filter {
        namespace: args.namespace.as_deref(),
        pod: args.pod.as_deref(),
        service: args.service.as_deref(),
        node_port: args.node_port,
        states: &args.state,
        all: args.all,
    }
}

fn print_rows(args: &MappingsArgs, rows: &[MappingRow], agent: Option<&AgentView>) -> anyhow::Result<()> {
    let is_screen = args.watch.is_some() && std::io::stdout().is_terminal();
    let text = match args.node.view.output {
        // With `--watch`, the rows of one reading are one line of JSON, so that a program can parse the output line by
        // line.
        OutputFormat::Json if args.watch.is_some() => serde_json::to_string(rows)? + "\n",
        OutputFormat::Json => return print_json(&rows),
        OutputFormat::Table | OutputFormat::Wide if rows.is_empty() => "No mappings.\n".to_owned(),
        OutputFormat::Table => as_table(rows, agent.is_some(), args.watch.is_some(), false),
        OutputFormat::Wide => as_table(rows, agent.is_some(), args.watch.is_some(), true),
    };
    print(&if is_screen { format!("{CLEAR}{text}") } else { text })
}

type Column = (&'static str, fn(&MappingRow) -> String);

const KEY: [Column; 2] = [("NODE PORT", |row| row.node_port.to_string()), ("PROTOCOL", |row| row.protocol.to_owned())];
const NAMES: [Column; 4] = [
    ("POD", |row| named(row.namespace.as_deref(), row.pod.as_deref())),
    ("SERVICES", |row| if row.services.is_empty() { NONE.to_owned() } else { row.services.join(",") }),
    ("STATE", |row| row.state.map_or(NONE, |state| state.as_str()).to_owned()),
    ("AGE", |row| rows::age(row)),
];
const TARGET: [Column; 1] = [("POD ADDRESS", rows::target)];
const TRAFFIC: [Column; 3] = [
    ("REQUESTS", |row| row.request_packets.to_string()),
    ("REPLIES", |row| row.reply_packets.to_string()),
    ("FLOWS", |row| row.established_flows.to_string()),
];
const RATES: [Column; 2] = [
    ("REQUESTS/S", |row| per_second(row.request_packets_per_second)),
    ("REPLIES/S", |row| per_second(row.reply_packets_per_second)),
];
const DETAILS: [Column; 6] = [
    ("FAMILY", |row| row.family.to_owned()),
    ("SOURCES", rows::sources),
    ("BYTES IN", |row| row.request_bytes.to_string()),
    ("BYTES OUT", |row| row.reply_bytes.to_string()),
    ("NEW FLOWS", |row| row.new_flows.to_string()),
    ("ENDS IN", |row| row.ends_in_millis.map_or_else(|| NONE.to_owned(), rows::duration)),
];
/// The text that a column shows if the row has no value for this column.
const NONE: &str = "-";

fn as_table(rows: &[MappingRow], has_names: bool, has_rates: bool, is_wide: bool) -> String {
    let mut columns: Vec<Column> = KEY.to_vec();
    columns.extend(has_names.then_some(NAMES).into_iter().flatten());
    columns.extend(TARGET);
    columns.extend(TRAFFIC);
    columns.extend(has_rates.then_some(RATES).into_iter().flatten());
    columns.extend(is_wide.then_some(DETAILS).into_iter().flatten());
    let header: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    table(&header, rows.iter().map(|row| columns.iter().map(|(_, cell)| cell(row)).collect()))
}

fn named(namespace: Option<&str>, name: Option<&str>) -> String {
    namespace.zip(name).map_or_else(|| NONE.to_owned(), |(namespace, name)| format!("{namespace}/{name}"))
}

fn per_second(rate: Option<f64>) -> String {
    rate.map_or_else(|| NONE.to_owned(), |rate| format!("{rate:.0}"))
}
