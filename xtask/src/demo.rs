// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask demo`: the main job on one machine, told as a short story.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};

use crate::setup::{self, ControlPlane, Need};
use crate::{build, build_ebpf, process};

/// Arguments of `cargo xtask demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Passed on to the demo: `--keep`, `--output table|json`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// What the demo and the agent's tests run.
#[derive(Debug)]
pub(crate) struct Parts {
    agent: PathBuf,
    control_plane: PathBuf,
}

/// Parts in the making: the API server, which takes longest, is begun before anything else.
#[derive(Debug)]
pub(crate) struct Preparation {
    control_plane: ControlPlane,
}

impl Preparation {
    /// Begins, if this machine can do it at all.
    pub(crate) fn begin() -> Result<Self> {
        if !setup::is_root() {
            bail!("network namespaces and kernel programs need root: run it with `sudo --preserve-env=PATH,HOME`");
        }
        setup::require_kubectl()?;
        Ok(Self { control_plane: ControlPlane::start() })
    }

    /// Builds everything else, and waits for the API server.
    pub(crate) fn finish(self) -> Result<Parts> {
        setup::ensure(&[Need::TestNetwork])?;
        build_ebpf::build()?;
        let agent = build::build_agent()?;
        Ok(Parts { agent, control_plane: self.control_plane.finish()? })
    }
}

impl Parts {
    /// Tells a program of npl-testkit where the parts are.
    pub(crate) fn pass_to(&self, command: &mut Command) {
        command.env("NPL_AGENT", &self.agent).env("NPL_CONTROL_PLANE_DIR", &self.control_plane);
    }
}

/// Builds what is missing and tells the story.
pub(crate) fn run(options: &Options) -> Result<()> {
    let parts = Preparation::begin()?.finish()?;
    process::say("demo: compiling it");
    // With the agent named beside it, both use dependencies with the same features, which are compiled once.
    process::run(build::cargo("build").args([
        "--package",
        "npl-agent",
        "--package",
        "npl-testkit",
        "--bin",
        "npl-demo",
    ]))?;
    process::become_program(&mut command(&parts, &options.arguments))
}

/// The demo as npl-testkit built it.
pub(crate) fn command(parts: &Parts, arguments: &[String]) -> Command {
    let mut command = Command::new(build::built_folder().join("npl-demo"));
    parts.pass_to(&mut command);
    command.args(arguments);
    command
}
