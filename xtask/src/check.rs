// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask check`: all checks that need no root privileges. One run reports every failure.

use std::process::Command;

use anyhow::{Result, bail};

use crate::{build, build_ebpf, commits, features, paths, process, setup, tidy};

/// Arguments of `cargo xtask check`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {}

/// A check that passes or fails as a whole.
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) run: fn() -> Result<()>,
}

/// The checks that run no tests, the fastest ones first.
pub(crate) const STATIC: [Check; 5] = [
    Check { name: "tidy", run: || tidy::run(&tidy::Options {}) },
    Check { name: "commit subjects", run: commits::check },
    Check { name: "features of dependencies", run: features::check },
    Check { name: "formatting", run: formatting },
    Check { name: "licenses and sources of dependencies", run: dependencies },
];

/// The checks that compile, in the order in which two processors are best used: the compiler of the kernel programs uses
/// only one processor. The kernel programs and the other crates have different target directories, so cargo compiles
/// both at the same time.
pub(crate) const COMPILING: [Check; 5] = [
    Check { name: "lints of the kernel programs", run: build_ebpf::lint },
    Check { name: "lints", run: lints },
    Check { name: "build and budget of the kernel programs", run: || build_ebpf::build().map(drop) },
    Check { name: "trace build of the kernel programs", run: || build_ebpf::build_trace().map(drop) },
    Check { name: "documentation", run: documentation },
];

/// The crates, except xtask, whose unit tests need neither root nor kernel programs.
pub(crate) const UNPRIVILEGED: [&str; 8] =
    ["--package", "npl-common", "--package", "npl-agent", "--package", "npl-echo", "--package", "npl-feed"];

/// The manifest of the fuzz targets, which are a workspace of their own.
const FUZZ_MANIFEST: &str = "fuzz/Cargo.toml";

/// Runs every check, even if a check has failed.
pub(crate) fn run(_options: &Options) -> Result<()> {
    let mut failed = Vec::new();
    let tests = Check { name: "tests", run: tests };
    for Check { name, run } in STATIC.into_iter().chain(COMPILING).chain([tests]) {
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
    process::run(&mut cargo(&["fmt", "--all", "--check"]))?;
    process::run(&mut cargo(&["fmt", "--manifest-path", FUZZ_MANIFEST, "--check"]))
}

fn lints() -> Result<()> {
    let mut command = without_kernel_programs("clippy");
    command.args(["--workspace", "--exclude", "npl-ebpf", "--all-targets", "--all-features"]);
    process::run(command.args(["--", "-D", "warnings"]))
}

fn documentation() -> Result<()> {
    let mut command = without_kernel_programs("doc");
    command.args(["--workspace", "--no-deps", "--document-private-items"]);
    process::run(command.env("RUSTDOCFLAGS", "-D warnings"))
}

/// Returns a cargo command with the profile of the agent and the tests, so that build scripts and procedural macros are
/// compiled once for all of them. The kernel programs, which the agent embeds, may not be built yet.
fn without_kernel_programs(subcommand: &str) -> Command {
    let mut command = build::cargo(subcommand);
    command.env_remove("NPL_BPF_OBJECT");
    command
}

/// Compares the dependencies with `deny.toml`. The check of advisories is left out, because its result changes without
/// a change of this repository.
fn dependencies() -> Result<()> {
    let cargo_deny = setup::cargo_deny()?;
    // Each of the two workspaces has only some of the licenses and exceptions of `deny.toml`.
    let unused = ["--allow", "license-exception-not-encountered", "--allow", "license-not-encountered"];
    for (manifest, allowed) in [("Cargo.toml", &unused[..2]), (FUZZ_MANIFEST, &unused)] {
        let mut command = Command::new(&cargo_deny);
        command.args(["--locked", "--manifest-path", manifest, "--config", "deny.toml", "check"]).args(allowed);
        command.args(["--hide-inclusion-graph", "licenses", "bans", "sources"]);
        process::run(command.current_dir(paths::root()))?;
    }
    Ok(())
}

fn tests() -> Result<()> {
    process::run(&mut own_tests())?;
    process::run(build::cargo_test(&UNPRIVILEGED).args(["--lib", "--bins"]))
}

/// Returns the command for the unit tests of xtask, with the same cargo profile as xtask itself.
pub(crate) fn own_tests() -> Command {
    cargo(&["test", "--package", "xtask"])
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = build::plain_cargo();
    command.args(arguments).current_dir(paths::root());
    command
}
