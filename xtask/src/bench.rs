// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask bench`: the comparisons of the performance page, side by side in one run.

use std::process::Command;

use anyhow::{Result, bail};

use crate::setup::{self, Need};
use crate::{build, build_ebpf, paths, process};

/// Arguments of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Passed on to the bench: `--quick`, `--only NAME`, `--output table|json`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Builds the kernel programs and the bench, and runs it.
pub(crate) fn run(options: &Options) -> Result<()> {
    if !setup::is_root() {
        bail!("network namespaces and kernel programs need root: run it with `sudo --preserve-env=PATH,HOME`");
    }
    setup::ensure(&[Need::TestNetwork])?;
    build_ebpf::build()?;
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
    process::become_program(bench.env("NPL_TRAFFIC_OBJECT", generator).args(&options.arguments))
}
