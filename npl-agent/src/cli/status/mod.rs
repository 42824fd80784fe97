// SPDX-License-Identifier: Apache-2.0
//! `npl-agent status`: prints whether this Node serves its node ports, and if not, the cause. The exit code states
//! whether the Node is healthy.

mod network;
mod render;
mod sample;
mod view;

use std::{path::Path, process::ExitCode, time::Duration};

use serde_json::Value;
use tokio::time::{Instant, sleep};

use self::{
    network::NetworkView,
    sample::Sample,
    view::{Readings, Status},
};
use super::{print, print_json, report_error};
use crate::{
    config::args::{OutputFormat, StatusArgs, ViewArgs},
    core::{model::Family, verdict::HealthVerdict},
    datapath::{Pins, Tables, inspect::Inspection, preflight},
    local, netlink, nft_guard,
    process::{error_chain::ErrorChain, lock},
};

/// The time between two readings of the state with `--wait`.
const PAUSE: Duration = Duration::from_millis(500);

/// Prints the state of the Node. The exit code is 0 if the Node is healthy, 1 if traffic is at risk, and 2 if the
/// command cannot determine the state.
///
/// # Errors
///
/// If standard output cannot be written.
pub async fn show(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let deadline = Instant::now() + args.wait.unwrap_or_default();
    let status = loop {
        let is_last = Instant::now() >= deadline;
        match read(&args.node.view, &args.node.runtime_dir, args.interval).await {
            Ok(status) if is_last || status.verdict == HealthVerdict::Healthy => break status,
            Err(error) if is_last => {
                report_error(&error);
                return Ok(ExitCode::from(HealthVerdict::CannotTell.exit_code()));
            }
            Ok(_) | Err(_) => sleep(PAUSE).await,
        }
    };
    let output = args.node.view.output;
    match output {
        OutputFormat::Json => print_json(&status)?,
        OutputFormat::Table | OutputFormat::Wide => {
            print(&render::as_text(&status, output == OutputFormat::Wide))?;
        }
    }
    Ok(ExitCode::from(status.verdict.exit_code()))
}

/// Returns the output of `npl-agent status` as JSON, for the support archive.
pub(super) async fn document(view: &ViewArgs, runtime_dir: &Path, interval: Duration) -> anyhow::Result<Value> {
    Ok(serde_json::to_value(read(view, runtime_dir, interval).await?)?)
}

async fn read(view: &ViewArgs, runtime_dir: &Path, interval: Duration) -> anyhow::Result<Status> {
    let bpffs = &view.bpffs;
    let is_agent_running = lock::is_taken(bpffs);
    preflight::check_bpffs(bpffs)?;
    let pins = Pins::new(bpffs);
    let tables = if pins.has_all_maps() { Some(Tables::open(&pins)?) } else { None };
    let sample = match &tables {
        Some(tables) if !interval.is_zero() => Some(Sample::take(tables, interval).await?),
        Some(_) | None => None,
    };
    let agent = local::ask(runtime_dir).await.map_err(|error| ErrorChain(&error).to_string());
    let (inspection, devices) = (Inspection::read(bpffs)?, netlink::interfaces().await?);
    let flow_tables = match &tables {
        Some(tables) => Some([tables.flow_tables(Family::V4)?, tables.flow_tables(Family::V6)?]),
        None => None,
    };
    let network = NetworkView::read(bpffs, &inspection, &devices).await;
    Ok(Status::new(Readings {
        inspection: &inspection,
        flow_tables,
        network,
        agent_running: is_agent_running,
        agent: agent.as_ref().map_err(String::as_str),
        devices: &devices,
        held: nft_guard::read_state(),
        sample,
    }))
}
