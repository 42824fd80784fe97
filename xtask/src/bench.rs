// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask bench`: repeats the measurements of docs/performance.md in one run.

use std::process::Command;

use anyhow::Result;

use crate::demo::Parts;
use crate::setup::Component;
use crate::{build, process, setup};

/// Arguments of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Arguments of the bench: `--quick`, `--only NAME`, `--output table|json`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Builds the agent and the bench, and runs the bench.
pub(crate) fn run(options: &Options) -> Result<()> {
    let names = |text: &str| options.arguments.iter().any(|argument| argument.contains(text));
    let extent = names("cluster").then_some(Component::Nodes).into_iter().collect();
    let parts = Parts::make_for(&["--features", "npl-testkit/bench", "--bin", "npl-bench"], extent)?;
    let mut bench = Command::new(build::built_folder().join("npl-bench"));
    parts.pass_to(&mut bench);
    if names("feed") {
        bench.env("NPL_BALANCERS_DIR", setup::balancers()?);
    }
    process::become_program(bench.args(&options.arguments))
}
