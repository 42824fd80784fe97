// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask build`: the agent as one static binary, and the cargo invocation that it shares with all tests.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::{build_ebpf, paths, process};

/// Arguments of `cargo xtask build`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {}

/// Builds the agent.
pub(crate) fn run(_options: &Options) -> Result<()> {
    build_ebpf::build()?;
    build_agent(&[]).map(drop)
}

/// Builds the agent around the kernel object that is there, and beside it what else cargo is told to; the agent's path.
pub(crate) fn build_agent(beside: &[&str]) -> Result<PathBuf> {
    process::say("agent: compiling it as one static binary with the kernel programs embedded");
    process::run(cargo("build").args(["--package", "npl-agent", "--bin", "npl-agent"]).args(beside))?;
    let release = paths::target_dir().join("release");
    let (built, agent) = (built_folder().join("npl-agent"), release.join("npl-agent"));
    fs::create_dir_all(&release).with_context(|| format!("create {}", release.display()))?;
    // A copy beside it and a rename: an agent that runs from there keeps its own file.
    let new = release.join("npl-agent.new");
    fs::copy(&built, &new).with_context(|| format!("copy {}", built.display()))?;
    fs::rename(&new, &agent).with_context(|| format!("put {} in place", agent.display()))?;
    let size = fs::metadata(&agent).map_or(0, |data| data.len());
    process::say(&format!("{}: {} kB", paths::shown(&agent), size / 1000));
    Ok(agent)
}

/// Where binaries made by [`cargo`] lie.
pub(crate) fn built_folder() -> PathBuf {
    paths::target_dir().join(paths::agent_target()).join("release")
}

/// Cargo without what it told this program about itself: build scripts of others would take that for theirs, and with a
/// developer's own `cargo` in between, all that stands on them would be compiled by turns.
pub(crate) fn plain_cargo() -> Command {
    let mut command = Command::new(paths::cargo());
    let is_about_us = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _value) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_about_us)) {
        command.env_remove(name);
    }
    command
}

/// The one way in which the agent and all tests are compiled: same profile, target and flags, so that dependencies are
/// compiled once. Static, so that a binary runs in an empty container and under a foreign kernel's initramfs. The
/// target is named, although it is this machine's, to keep the flags away from build scripts and procedural macros.
pub(crate) fn cargo(subcommand: &str) -> Command {
    let mut command = plain_cargo();
    command.arg(subcommand).args(["--release", "--target", &paths::agent_target()]);
    command.env("RUSTFLAGS", "-C target-feature=+crt-static").env_remove("CARGO_ENCODED_RUSTFLAGS");
    command.env("NPL_BPF_OBJECT", paths::bpf_object()).current_dir(paths::root());
    command
}
