// SPDX-License-Identifier: Apache-2.0
//! `down`: ends the owner processes of clusters, and removes the objects of clusters whose owner was killed.

use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use npl_testkit::{poll, run};

use crate::say;
use crate::state::State;

/// Time limit for an owner to remove its cluster, which takes seconds. After this time,
/// the owner is killed together with its descendants.
const GRACE: Duration = Duration::from_secs(40);

/// The time limit for the kernel to end a killed owner.
const KILL_LIMIT: Duration = Duration::from_secs(10);

/// Removes one cluster, or all.
pub(crate) fn run(chosen: Option<&str>) -> Result<()> {
    let up: Vec<String> = State::all().into_iter().map(|(state, _)| state.id).collect();
    for id in up.iter().filter(|id| chosen.is_none_or(|chosen| chosen == id.as_str())) {
        end(id).with_context(|| format!("end cluster {id}"))?;
    }
    // Also removes the objects of owners that were killed.
    run::sweep()?;
    match chosen {
        Some(id) => say(&format!("cluster {id} has been removed")),
        None if up.is_empty() => say("no cluster is running"),
        None => up.iter().for_each(|id| say(&format!("cluster {id} has been removed"))),
    }
    Ok(())
}

fn end(id: &str) -> Result<()> {
    for (signal, limit) in [(Signal::SIGTERM, GRACE), (Signal::SIGKILL, KILL_LIMIT)] {
        let Some(owner) = run::owner(id) else { return Ok(()) };
        let pid = Pid::from_raw(i32::try_from(owner).context("process id out of range")?);
        match signal::kill(pid, signal) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(err) => return Err(err).with_context(|| format!("send {signal} to process {owner}")),
        }
        if poll::until_gone("its owner to exit", limit, || run::owner(id).is_none()).is_ok() {
            return Ok(());
        }
    }
    anyhow::bail!("the cluster's owner does not exit: see `npl-cluster status`")
}
