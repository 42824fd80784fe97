// SPDX-License-Identifier: Apache-2.0
//! `npl-agent load`: loads and pins the kernel programs with `CAP_PERFMON`, and exits, so that the agent itself can run
//! without this capability. The command opens no network connection, so no process with this capability reads remote
//! input.

use std::time::Duration;

use anyhow::bail;

use super::{print, report_error};
use crate::{
    config::load_args::LoadArgs,
    datapath::{Datapath, preflight},
    process::lock::{self, LockError},
};

/// The maximum time for which the command waits for another agent to end. If a Node joins another group of Nodes,
/// Kubernetes starts the Pod of one DaemonSet while the Pod of the other DaemonSet ends.
const PREVIOUS_AGENT: Duration = Duration::from_secs(10);

/// Loads and pins every program that an agent on this Node may need. Programs that are already pinned are not loaded
/// again. Without `CAP_PERFMON`, loads nothing.
///
/// # Errors
///
/// If `CAP_BPF`, `CAP_NET_ADMIN` or the BPF file system is missing, the kernel is older than the oldest supported
/// kernel, or an agent is running.
pub fn load(args: &LoadArgs) -> anyhow::Result<()> {
    if !preflight::rights().unwrap_or_default().perfmon {
        return print("skipped: this command is useful only with CAP_PERFMON; the agent loads the programs itself\n");
    }
    if args.mount_bpffs {
        preflight::mount_bpffs(&args.bpffs)?;
    }
    preflight::check(&args.bpffs)?;
    let _lock = match lock::take_within(&args.bpffs, PREVIOUS_AGENT) {
        Err(LockError::AlreadyRunning) => {
            bail!(
                "load: an npl-agent runs on this Node and has loaded its programs; restart the agent's Pod, so that \
                 the init container loads the programs before the agent starts"
            )
        }
        taken => taken?,
    };
    let mut datapath = Datapath::open_sized(&args.bpffs, args.max_flows)?;
    let (loaded, refused): (Vec<_>, Vec<_>) = datapath.hooks.load_all().into_iter().partition(Result::is_ok);
    // A program that cannot be loaded is only reported, because not every kernel supports every program. If the flags
    // of the agent require the program, the agent fails when it starts.
    refused.into_iter().filter_map(Result::err).for_each(|error| report_error(&error.into()));
    let barriers = if datapath.hooks.are_unmitigated() { "without" } else { "with" };
    print(&format!("loaded {} programs, {barriers} the kernel's barriers against speculation\n", loaded.len()))
}
