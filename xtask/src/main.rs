// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask`: all tasks of a developer, one module per command.
//!
//! On a fresh machine, xtask is compiled before all other crates of the workspace. For this reason, xtask depends on
//! few crates, and on no other crate of the workspace. Where xtask needs code of the workspace, xtask runs the
//! workspace's programs.

#![expect(clippy::print_stdout, reason = "results go to standard output")]
#![expect(clippy::print_stderr, reason = "progress and errors go to standard error")]

mod arch;
mod bench;
mod budget;
mod build;
mod build_ebpf;
mod bytecode;
mod cache;
mod chart;
mod check;
mod cluster;
mod commits;
mod cross;
mod demo;
mod docs;
mod ebpf;
mod emulation;
mod features;
mod files;
mod fuzz;
mod image;
mod kernel_object;
mod leftovers;
mod paths;
mod picture;
mod process;
mod setup;
mod tally;
mod test;
mod test_binary;
mod tidy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Builds, tests, demonstrates and measures NPL.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Install the programs and packages that builds and tests need, unless they are installed.
    Setup(setup::Options),
    /// Build the kernel programs into target/bpf/.
    BuildEbpf(build_ebpf::Options),
    /// Build the agent, with the kernel programs embedded, as one static binary: target/release/npl-agent.
    Build(build::Options),
    /// Show on one machine how a client reaches Pods through node ports: network namespaces stand for Node, Pods and
    /// client; the API server is real.
    Demo(demo::Options),
    /// Run a real Kubernetes cluster of several Nodes on this machine: up, down, status, kubectl, exec.
    Cluster(cluster::Options),
    /// Install what is missing on this machine, and run the checks and the default tests.
    Test(test::Options),
    /// Run the fuzz targets on their stored inputs and on further inputs.
    Fuzz(fuzz::Options),
    /// Run the checks that need no root: tidy, commit subjects, dependencies, formatting, lints, documentation, limits
    /// of the kernel programs, unit tests.
    Check(check::Options),
    /// Render the manifests of deploy/, and the page of the chart's values, from the Helm chart.
    Chart(chart::Options),
    /// Render docs/reference/ from the code, and the picture of docs/performance.md from the result there.
    Docs(docs::Options),
    /// Check the repository's own rules: names, layers, documents, licenses.
    Tidy(tidy::Options),
    /// Pack the images of the agent, of the feed and for tests as OCI archives: target/npl-agent.oci.tar and others.
    Image(image::Options),
    /// Measure NPL, compared with plain routing, iptables and nftables.
    Bench(bench::Options),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Setup(options) => setup::run(&options),
        Command::BuildEbpf(options) => build_ebpf::run(&options),
        Command::Build(options) => build::run(&options),
        Command::Demo(options) => demo::run(&options),
        Command::Cluster(options) => cluster::run(&options),
        Command::Test(options) => test::run(&options),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::Check(options) => check::run(&options),
        Command::Chart(options) => chart::run(&options),
        Command::Docs(options) => docs::run(&options),
        Command::Tidy(options) => tidy::run(&options),
        Command::Image(options) => image::run(&options),
        Command::Bench(options) => bench::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
