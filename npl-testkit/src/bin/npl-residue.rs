// SPDX-License-Identifier: Apache-2.0
//! Lists the objects on this machine that test runs may have created, or compares them with an earlier list.

use std::fs;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser;
use npl_testkit::residue::Residue;

/// Lists the objects that test runs may have created: network namespaces, devices, cgroups, mounts, pins, BPF
/// objects, qdiscs and processes.
#[derive(Debug, Parser)]
struct Arguments {
    /// Fail if objects exist that this earlier list does not contain. The kernel gets up to a minute to free objects.
    #[arg(long, value_name = "FILE")]
    nothing_beyond: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    if let Some(file) = &arguments.nothing_beyond {
        let before = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
        return Residue::from_lines(&before).assert_nothing_new();
    }
    let mut output = io::stdout().lock();
    Residue::look()?.lines().try_for_each(|line| writeln!(output, "{line}")).context("write the list")
}

#[expect(clippy::print_stderr, reason = "the error message of a program")]
fn complain(message: &str) {
    eprintln!("npl-residue: {message}");
}
