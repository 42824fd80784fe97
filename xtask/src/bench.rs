// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask bench`: measures the figures of docs/performance.md in one run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use crate::demo::Parts;
use crate::setup::Component;
use crate::{build, picture, process, setup};

/// Arguments of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Print the result as Markdown, and draw its ratios into this SVG file. Give this option before the bench's
    /// arguments.
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
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
    bench.args(&options.arguments);
    match &options.picture {
        Some(file) => draw(&mut bench, file),
        None => process::become_program(&mut bench),
    }
}

/// Runs the bench, prints its result and draws the picture.
fn draw(bench: &mut Command, file: &Path) -> Result<()> {
    bench.args(["--output", "markdown"]).stderr(Stdio::inherit());
    process::show(bench);
    let output = bench.output().context("run the bench")?;
    process::check(bench, output.status)?;
    let result = String::from_utf8(output.stdout).context("read the result of the bench")?;
    print!("{result}");
    picture::write(file, &result)
}
