// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask check`: all checks that need no root. One run reports every failure.

use std::process::Command;

use anyhow::{Result, bail};

use crate::{build, build_ebpf, commits, paths, process, setup, tidy};

/// Arguments of `cargo xtask check`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {}

/// A check that passes or fails as a whole.
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) run: fn() -> Result<()>,
}

/// The static checks, cheap ones first.
pub(crate) const STATIC: [Check; 7] = [
    Check { name: "tidy", run: || tidy::run(&tidy::Options {}) },
    Check { name: "commit subjects", run: commits::check },
    Check { name: "formatting", run: formatting },
    Check { name: "lints of the kernel programs", run: build_ebpf::lint },
    Check { name: "lints", run: lints },
    Check { name: "documentation", run: documentation },
    Check { name: "licenses and sources of dependencies", run: dependencies },
];

/// Crates other than xtask whose unit tests need neither root nor kernel programs.
pub(crate) const UNPRIVILEGED: [&str; 6] =
    ["--package", "npl-common", "--package", "npl-agent", "--package", "npl-feed"];

/// Runs every check, also after a failure.
pub(crate) fn run(_options: &Options) -> Result<()> {
    let mut failed = Vec::new();
    let last = [
        // This check is not in `STATIC`, whose checks `cargo xtask test` runs too, because the build of the agent there
        // already checks the budget.
        Check { name: "budget of the kernel programs", run: || build_ebpf::build().map(drop) },
        Check { name: "tests", run: tests },
    ];
    for Check { name, run } in STATIC.into_iter().chain(last) {
        process::say(name);
        if let Err(error) = run() {
            process::detail(&format!("{error:#}"));
            failed.push(name);
        }
    }
    match failed.as_slice() {
        [] => Ok(()),
        names => bail!("failed: {}", names.join(", ")),
    }
}

fn formatting() -> Result<()> {
    process::run(&mut cargo(&["fmt", "--all", "--check"]))
}

fn lints() -> Result<()> {
    process::run(&mut cargo(&[
        "clippy",
        "--workspace",
        "--exclude",
        "npl-ebpf",
        "--all-targets",
        "--all-features",
        "--",
        "-D",
        "warnings",
    ]))
}

fn documentation() -> Result<()> {
    let mut command = cargo(&["doc", "--workspace", "--no-deps", "--document-private-items"]);
    process::run(command.env("RUSTDOCFLAGS", "-D warnings"))
}

/// Compares the dependencies with `deny.toml`. The check of advisories is left out, because its result changes without
/// a change of this repository.
fn dependencies() -> Result<()> {
    let mut command = Command::new(setup::cargo_deny()?);
    command.args(["--locked", "check", "--hide-inclusion-graph", "licenses", "bans", "sources"]);
    process::run(command.current_dir(paths::root()))
}

fn tests() -> Result<()> {
    process::run(&mut own_tests())?;
    process::run(build::cargo("test").args(UNPRIVILEGED).args(["--lib", "--bins"]))
}

/// The unit tests of xtask, built with the profile of xtask.
pub(crate) fn own_tests() -> Command {
    cargo(&["test", "--package", "xtask"])
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = build::plain_cargo();
    command.args(arguments).current_dir(paths::root());
    command
}
