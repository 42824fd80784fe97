// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask bench`: measures the figures of docs/performance.md in one run.

use std::process::Command;

use anyhow::Result;

use crate::demo::Parts;
use crate::setup::Component;
use crate::{build, process};

/// Arguments of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Arguments of the bench: `--quick`, `--only NAME`, `--output table|json`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Builds the agent and the bench, and runs the bench.
pub(crate) fn run(options: &Options) -> Result<()> {
    let is_of_cluster = options.arguments.iter().any(|argument| argument.contains("cluster"));
    let extent = is_of_cluster.then_some(Component::Nodes).into_iter().collect();
    let parts = Parts::make_for(&["--features", "npl-testkit/bench", "--bin", "npl-bench"], extent)?;
    let mut bench = Command::new(build::built_folder().join("npl-bench"));
    parts.pass_to(&mut bench);
    process::become_program(bench.args(&options.arguments))
}
