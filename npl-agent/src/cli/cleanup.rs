// SPDX-License-Identifier: Apache-2.0
//! `npl-agent cleanup`: removes everything that any agent has created in the kernel.

use anyhow::bail;

use super::{print, print_json};
use crate::{
    config::args::{OutputFormat, ViewArgs},
    datapath::{cleanup, preflight},
    process::error_chain::ErrorChain,
    process::lock::{self, LockError},
};

/// Removes NPL's pins, links, filters, qdiscs and nftables tables.
///
/// # Errors
///
/// If an agent is running, or something could not be removed.
pub async fn remove(args: &ViewArgs) -> anyhow::Result<()> {
    preflight::check_bpffs(&args.bpffs)?;
    // Held until the end: an agent that starts meanwhile would reuse what is half removed.
    let _lock = match lock::take() {
        Err(LockError::AlreadyRunning) => {
            bail!("clean up: an npl-agent runs on this Node and would create everything again: stop it first")
        }
        taken => taken?,
    };
    let (removed, errors) = cleanup::remove_everything(&args.bpffs).await;
    match args.output {
        OutputFormat::Json => print_json(&removed)?,
        OutputFormat::Table => {
            let pins = removed.pins.iter().map(|pin| format!("removed pin {}\n", pin.display()));
            let filters = removed.filters.iter().map(|name| format!("removed filters of {name}\n"));
            let qdiscs = removed.qdiscs.iter().map(|name| format!("removed qdisc clsact of {name}\n"));
            let tables = removed.tables.iter().map(|name| format!("removed nftables table {name}\n"));
            let mut text: String = pins.chain(filters).chain(qdiscs).chain(tables).collect();
            if text.is_empty() {
                text += "nothing to remove\n";
            }
            print(&text)?;
        }
    }
    if let Some(first) = errors.first() {
        bail!("clean up: {} steps failed; the first failure: {}", errors.len(), ErrorChain(first));
    }
    Ok(())
}
