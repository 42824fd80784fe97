// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask docs`: writes docs/reference/ and the picture of docs/performance.md. Tests of the agent and the feed
//! compare the pages with the code. This command runs these tests in a mode in which they write the pages instead.

use anyhow::Result;

use crate::{build, build_ebpf, chart, picture, process};

/// Arguments of `cargo xtask docs`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {}

/// Renders the pages of docs/reference/, and the picture of docs/performance.md.
pub(crate) fn run(_options: &Options) -> Result<()> {
    chart::write_values_page()?;
    picture::write_of_page()?;
    // The kernel object is built first, because a test compares the object's maps with the maps in the reference.
    build_ebpf::build()?;
    process::say("reference: rendering docs/reference/ from the code");
    let mut command = build::cargo_test(&["--package", "npl-agent", "--package", "npl-feed"]);
    process::run(command.args(["--lib", "reference"]).env("UPDATE_EXPECT", "1"))
}
