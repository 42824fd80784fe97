// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask bench`: the comparisons of the performance page, side by side in one run.

use std::process::Command;

use anyhow::Result;

use crate::demo::Preparation;
use crate::setup::Extent;
use crate::{build, paths, process};

/// Arguments of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Passed on to the bench: `--quick`, `--only NAME`, `--output table|json`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Builds what it measures and the bench, and runs it.
pub(crate) fn run(options: &Options) -> Result<()> {
    let parts = Preparation::begin(Extent::ControlPlane)?.finish()?;
    process::say("bench: compiling it");
    process::run(build::cargo("build").args([
        "--package",
        "npl-testkit",
        "--features",
        "bench",
        "--bin",
        "npl-bench",
    ]))?;
    let generator = paths::bpf_object().with_file_name("npl-traffic.bpf.o");
    let mut bench = Command::new(build::built_folder().join("npl-bench"));
    parts.pass_to(&mut bench);
    process::become_program(bench.env("NPL_TRAFFIC_OBJECT", generator).args(&options.arguments))
}
