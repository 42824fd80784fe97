// SPDX-License-Identifier: Apache-2.0
//! `npl-agent cleanup`: removes NPL's kernel state of every ABI version from the Node.

use anyhow::{Context as _, bail};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use super::{note, print, print_json, table};
use crate::{
    config::args::{CleanupArgs, OutputFormat, ViewArgs},
    core::cleanup::{Removal, RemovalTarget},
    datapath::{
        Pins,
        cleanup::{self, CleanupError},
        preflight,
    },
    process::error_chain::ErrorChain,
    process::lock::{self, LockError},
};

/// The JSON output.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report<'a> {
    /// Whether the command only lists `removals` (`--dry-run`), and removes nothing.
    dry_run: bool,
    /// The objects that were removed, or that a cleanup would remove, in the order of the removal.
    removals: &'a [Removal],
}

/// Removes all kernel state of NPL. With `--dry-run`, only prints the objects that a cleanup would remove. Then, with
/// `--stay`, waits for SIGTERM or SIGINT.
///
/// # Errors
///
/// If a signal handler cannot be installed, or if [`remove`] or [`show_plan`] fails.
pub async fn remove_and_stay(args: &CleanupArgs) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    if args.dry_run {
        show_plan(&args.view).await?;
    } else {
        remove(&args.view).await?;
    }
    if args.stay {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
    Ok(())
}

/// Prints each object that the cleanup would remove. Takes no lock, because taking the lock creates a directory; an
/// agent may therefore run, and may change its state during this command.
///
/// # Errors
///
/// If a part of NPL's kernel state could not be read.
async fn show_plan(args: &ViewArgs) -> anyhow::Result<()> {
    preflight::check_bpffs(&args.bpffs)?;
    let (planned, errors) = cleanup::plan(&args.bpffs).await;
    report(args.output, &planned, true)?;
    if lock::is_taken(&args.bpffs) {
        note("an npl-agent runs on this Node: cleanup without --dry-run refuses to remove its state; stop it first");
    }
    fail_on(&errors, "parts of the kernel state could not be read, so the list is incomplete")
}

/// Removes NPL's pinned maps, programs and links, TC filters, clsact qdiscs and nftables table. Prints each removed
/// object.
///
/// # Errors
///
/// If an agent is running, or if a part of NPL's kernel state could not be removed.
async fn remove(args: &ViewArgs) -> anyhow::Result<()> {
    preflight::check_bpffs(&args.bpffs)?;
    // Taking the lock creates NPL's directory if the directory does not exist. The command then removes the directory
    // again, but does not report the directory as a removed object.
    let root = Pins::new(&args.bpffs).root().to_owned();
    let existed = root.exists();
    // The lock is held until the end of the cleanup. Without the lock, an agent that starts during the cleanup would
    // adopt maps that the cleanup then removes.
    let _lock = match lock::take(&args.bpffs) {
        Err(LockError::AlreadyRunning) => {
            bail!("clean up: an npl-agent runs on this Node and would recreate its kernel state; stop it first")
        }
        taken => taken?,
    };
    let (mut removed, errors) = cleanup::remove_everything(&args.bpffs).await;
    removed.retain(|removal| existed || removal.target != RemovalTarget::Directory(root.clone()));
    report(args.output, &removed, false)?;
    fail_on(&errors, "steps failed, so a part of NPL's kernel state remains")
}

fn report(output: OutputFormat, removals: &[Removal], dry_run: bool) -> anyhow::Result<()> {
    match output {
        OutputFormat::Json => print_json(&Report { dry_run, removals }),
        OutputFormat::Table | OutputFormat::Wide => print(&as_table(removals, dry_run)),
    }
}

fn as_table(removals: &[Removal], dry_run: bool) -> String {
    if removals.is_empty() {
        return "nothing to remove\n".to_owned();
    }
    let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
    let rows = removals.iter().map(|removal| {
        vec![removal.kind.as_str().to_owned(), text(&removal.device), text(&removal.hook), removal.name.clone()]
    });
    table(&[if dry_run { "WOULD REMOVE" } else { "REMOVED" }, "DEVICE", "HOOK", "NAME"], rows)
}

fn fail_on(errors: &[CleanupError], outcome: &str) -> anyhow::Result<()> {
    if let Some(first) = errors.first() {
        bail!("clean up: {} {outcome}; first error: {}", errors.len(), ErrorChain(first));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::core::cleanup::RemovalKind;

    #[test]
    fn the_table_of_a_dry_run_differs_from_that_of_a_cleanup_in_its_header_only() {
        let removal = Removal {
            kind: RemovalKind::TcLink,
            device: Some("eth0".to_owned()),
            hook: Some("ingress".to_owned()),
            name: "/b/npl/v2/links/2_in".to_owned(),
            target: RemovalTarget::Pin(PathBuf::from("/b/npl/v2/links/2_in")),
        };
        let [planned, removed] = [true, false].map(|dry_run| as_table(std::slice::from_ref(&removal), dry_run));
        let (header, row) = planned.split_once('\n').unwrap();
        assert_eq!(header.split_whitespace().collect::<Vec<_>>(), ["WOULD", "REMOVE", "DEVICE", "HOOK", "NAME"]);
        let cells = ["tc-link", "eth0", "ingress", "/b/npl/v2/links/2_in"];
        assert_eq!(row.split_whitespace().collect::<Vec<_>>(), cells);
        assert!(removed.starts_with("REMOVED"), "{removed}");
        assert_eq!(as_table(&[], true), as_table(&[], false));
    }
}
