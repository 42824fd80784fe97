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

impl Parts {
    /// Builds everything; the API server beside our own, which is the shorter work.
    pub(crate) fn make() -> Result<Self> {
        if !setup::is_root() {
            bail!("network namespaces and kernel programs need root: run it with `sudo --preserve-env=PATH,HOME`");
        }
        setup::require_kubectl()?;
        let control_plane = ControlPlane::start();
        setup::ensure(&[Need::TestNetwork])?;
        build_ebpf::build()?;
        let agent = build::build_agent()?;
        Ok(Self { agent, control_plane: control_plane.finish()? })
    }

    /// Tells a program of npl-testkit where the parts are.
    pub(crate) fn pass_to(&self, command: &mut Command) {
        command.env("NPL_AGENT", &self.agent).env("NPL_CONTROL_PLANE_DIR", &self.control_plane);
    }
}

/// Builds what is missing and tells the story.
pub(crate) fn run(options: &Options) -> Result<()> {
    // Where the story's output is data, what we do ourselves does not belong in it.
    let parts = Parts::make()?;
    process::say("demo: compiling it");
    process::run(build::cargo("build").args(["--package", "npl-testkit", "--bin", "npl-demo"]))?;
    process::run(&mut command(&parts, &options.arguments))
}

/// The demo as npl-testkit built it.
pub(crate) fn command(parts: &Parts, arguments: &[String]) -> Command {
    let mut command = Command::new(build::built_folder().join("npl-demo"));
    parts.pass_to(&mut command);
    command.args(arguments);
    command
}
