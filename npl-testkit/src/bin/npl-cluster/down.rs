// SPDX-License-Identifier: Apache-2.0
//! `down`: ends the owner processes of clusters, and removes the objects of clusters whose owner was killed.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use npl_testkit::{poll, run};

use crate::say;
use crate::state::State;

/// The time limit for an owner to remove its cluster, which usually takes seconds. After this time, the owner is killed
/// together with its descendants.
const GRACE: Duration = Duration::from_secs(40);

/// The time limit for the kernel to end a killed owner.
const KILL_LIMIT: Duration = Duration::from_secs(10);

/// Removes one cluster or all clusters, and the objects of clusters whose owner was killed.
pub(crate) fn run(chosen: Option<&str>, is_all: bool) -> Result<()> {
    let up: Vec<String> = State::all().into_iter().map(|(state, _)| state.id).collect();
    let ended = to_end(&up, chosen, is_all)?;
    for id in &ended {
        end(id).with_context(|| format!("end cluster {id}"))?;
    }
    run::sweep()?;
    if ended.is_empty() {
        say("no cluster is running");
    }
    for id in &ended {
        say(&format!("cluster {id} has been removed"));
    }
    Ok(())
}

/// Returns the clusters to remove, or an error if several clusters run and neither `--cluster` nor `--all` is given,
/// because some of them may belong to another user.
fn to_end(up: &[String], chosen: Option<&str>, is_all: bool) -> Result<Vec<String>> {
    let ids = || up.join(", ");
    match chosen {
        Some(id) if up.iter().any(|it| it == id) => Ok(vec![id.to_owned()]),
        Some(id) => bail!("cluster {id} is not running; running clusters: {}", ids()),
        None if up.len() > 1 && !is_all => {
            bail!("several clusters are running ({}): choose one with --cluster ID, or remove them with --all", ids())
        }
        None => Ok(up.to_vec()),
    }
}

fn end(id: &str) -> Result<()> {
    for (signal, limit) in [(Signal::SIGTERM, GRACE), (Signal::SIGKILL, KILL_LIMIT)] {
        let Some(owner) = run::owner(id) else { return Ok(()) };
        let pid = Pid::from_raw(i32::try_from(owner).context("process id out of range")?);
        match signal::kill(pid, signal) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(err) => return Err(err).with_context(|| format!("send {signal} to process {owner}")),
        }
        if poll::until_gone("the cluster's owner to exit", limit, || run::owner(id).is_none()).is_ok() {
            return Ok(());
        }
    }
    bail!("the cluster's owner did not exit after SIGKILL: see `cargo xtask cluster status`")
}

#[cfg(test)]
mod tests {
    use super::to_end;

    fn ended(up: &[&str], chosen: Option<&str>, is_all: bool) -> Result<Vec<String>, String> {
        let up: Vec<String> = up.iter().map(|id| (*id).to_owned()).collect();
        to_end(&up, chosen, is_all).map_err(|error| error.to_string())
    }

    #[test]
    fn one_of_several_clusters_has_to_be_named() {
        let refusal = ended(&["a", "b"], None, false).unwrap_err();
        assert!(refusal.contains("(a, b)") && refusal.contains("--all"), "{refusal}");
        assert_eq!(ended(&["a", "b"], Some("b"), false).unwrap(), ["b"]);
        assert_eq!(ended(&["a", "b"], None, true).unwrap(), ["a", "b"]);
    }

    #[test]
    fn the_only_cluster_needs_no_name() {
        assert_eq!(ended(&["a"], None, false).unwrap(), ["a"]);
        assert!(ended(&[], None, false).unwrap().is_empty());
        assert!(ended(&["a"], Some("c"), false).unwrap_err().contains("c is not running"));
    }
}
