// SPDX-License-Identifier: Apache-2.0
//! `npl-agent load`: loads the programs with `CAP_PERFMON`, which the agent does not have, and exits. It reads nothing
//! from the network or the API server, so that no input reaches this capability.

use anyhow::bail;

use super::{complain, print};
use crate::{
    config::args::LoadArgs,
    datapath::{Datapath, preflight},
    process::lock::{self, LockError},
};

/// Loads and pins every program that an agent on this Node may use; pinned programs are kept.
///
/// # Errors
///
/// As the agent: a missing capability or file system, or a kernel that is too old; and if an agent is running.
pub fn load(args: &LoadArgs) -> anyhow::Result<()> {
    if !preflight::rights().unwrap_or_default().perfmon {
        return print("nothing to do: without CAP_PERFMON, the agent loads the same programs itself\n");
    }
    let _lock = match lock::take() {
        Err(LockError::AlreadyRunning) => {
            bail!(
                "load: an npl-agent runs on this Node and has loaded its programs: restart its Pod, whose init \
                 container loads them"
            )
        }
        taken => taken?,
    };
    let mut datapath = Datapath::open(&args.bpffs)?;
    let (loaded, refused): (Vec<_>, Vec<_>) = datapath.hooks.load_all().into_iter().partition(Result::is_ok);
    // Not every kernel supports every program. The agent reports one that it needs.
    refused.into_iter().filter_map(Result::err).for_each(|error| complain(&error.into()));
    let barriers = if datapath.hooks.are_unmitigated() { "without" } else { "with" };
    print(&format!("{} programs loaded {barriers} the kernel's barriers against speculation\n", loaded.len()))
}
