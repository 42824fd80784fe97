// SPDX-License-Identifier: Apache-2.0
//! `npl-agent cleanup`: removes all kernel state of NPL from the Node, of every ABI version.

use anyhow::{Context as _, bail};
use tokio::signal::unix::{SignalKind, signal};

use super::{print, print_json};
use crate::{
    config::args::{CleanupArgs, OutputFormat, ViewArgs},
    datapath::{cleanup, preflight},
    process::error_chain::ErrorChain,
    process::lock::{self, LockError},
};

/// Removes all kernel state of NPL, and then, with `--stay`, waits for SIGTERM or SIGINT.
///
/// # Errors
///
/// If [`remove`] fails.
pub async fn remove_and_stay(args: &CleanupArgs) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    remove(&args.view).await?;
    if args.stay {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
    Ok(())
}

/// Removes NPL's pinned maps, programs and links, TC filters, clsact qdiscs and nftables table. Prints each removed
/// object.
///
/// # Errors
///
/// If an agent is running, or if a part of NPL's kernel state could not be removed.
async fn remove(args: &ViewArgs) -> anyhow::Result<()> {
    preflight::check_bpffs(&args.bpffs)?;
    // The lock is held until the end of the cleanup. Without the lock, an agent that starts during the cleanup would
    // adopt maps that the cleanup then removes.
    let _lock = match lock::take(&args.bpffs) {
        Err(LockError::AlreadyRunning) => {
            bail!("clean up: an npl-agent runs on this Node and would recreate its kernel state; stop it first")
        }
        taken => taken?,
    };
    let (removed, errors) = cleanup::remove_everything(&args.bpffs).await;
    match args.output {
        OutputFormat::Json => print_json(&removed)?,
        OutputFormat::Table | OutputFormat::Wide => {
            let pins = removed.pins.iter().map(|pin| format!("removed pin {}\n", pin.display()));
            let filters = removed.filters.iter().map(|name| format!("removed TC filters from {name}\n"));
            let qdiscs = removed.qdiscs.iter().map(|name| format!("removed qdisc clsact from {name}\n"));
            let tables = removed.tables.iter().map(|name| format!("removed nftables table {name}\n"));
            let mut text: String = pins.chain(filters).chain(qdiscs).chain(tables).collect();
            if text.is_empty() {
                text += "nothing to remove\n";
            }
            print(&text)?;
        }
    }
    if let Some(first) = errors.first() {
        bail!("clean up: {} steps failed and their state remains; first error: {}", errors.len(), ErrorChain(first));
    }
    Ok(())
}
