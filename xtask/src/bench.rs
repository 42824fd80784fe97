// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask bench`: measures the figures of docs/performance.md in one run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use crate::demo::Parts;
use crate::setup::{Component, Extent};
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
    let parts =
        Parts::make_for(&["--features", "npl-testkit/bench", "--bin", "npl-bench"], extent(&options.arguments))?;
    let mut bench = Command::new(build::built_folder().join("npl-bench"));
    parts.pass_to(&mut bench);
    if names(&options.arguments, "feed") {
        bench.env("NPL_BALANCERS_DIR", setup::balancers()?);
    }
    bench.args(&options.arguments);
    match &options.picture {
        Some(file) => draw(&mut bench, file),
        None => process::become_program(&mut bench),
    }
}

/// Returns the components of Kubernetes that the figures in the bench's arguments need. Figures of a real cluster have
/// names such as `cluster/iptables/…`, and `--only` selects figures by a part of the name.
fn extent(arguments: &[String]) -> Extent {
    if !names(arguments, "cluster") {
        return Extent::new();
    }
    let others = ["cluster/iptables", "cluster/nftables", "cluster/created", "cluster/address", "cluster/annotation"];
    let has_cilium = !others.into_iter().any(|text| names(arguments, text));
    Component::of_networks(&[if has_cilium { "cilium" } else { "bridge" }.to_owned()])
}

/// Whether an argument of the bench contains a text.
fn names(arguments: &[String], text: &str) -> bool {
    arguments.iter().any(|argument| argument.contains(text))
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

#[cfg(test)]
mod tests {
    use super::{Component, extent};

    #[test]
    fn only_the_components_of_the_chosen_figures_are_built() {
        use Component::{Cilium, Clang, Nodes};
        for (arguments, components) in [
            (&[][..], &[][..]),
            (&["--quick", "--only", "replies"], &[]),
            (&["--only", "cluster/iptables/request"], &[Nodes]),
            (&["--only", "cluster/created-to-address"], &[Nodes]),
            (&["--only", "cluster"], &[Nodes, Cilium, Clang]),
            (&["--only=cluster/cilium"], &[Nodes, Cilium, Clang]),
        ] {
            let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
            assert!(extent(&arguments).iter().eq(components), "{arguments:?}");
        }
    }
}
