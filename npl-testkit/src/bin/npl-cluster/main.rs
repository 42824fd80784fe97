// SPDX-License-Identifier: Apache-2.0
//! A real Kubernetes of several Nodes on this machine: up, down, and what is between.

mod access;
mod down;
mod state;
mod supervise;
mod up;

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Args, Parser, Subcommand};
use npl_testkit::echo::Protocol;
use npl_testkit::interrupt;
use npl_testkit::real_cluster::{Cni, InitArguments, KubeProxy, run_init};
use npl_testkit::traffic;

/// A real Kubernetes of several Nodes on this machine.
#[derive(Debug, Parser)]
#[command(name = "npl-cluster", bin_name = "cargo xtask cluster")]
struct Arguments {
    /// Which cluster, where several are up: its identifier, as `status` shows it.
    #[arg(long, global = true, value_name = "ID")]
    cluster: Option<String>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a cluster and leave it running.
    Up(UpArguments),
    /// Remove a cluster, or all that are up, and what killed ones have left.
    Down,
    /// Show which clusters are up, and how to look around in them.
    Status,
    /// Run kubectl as an administrator of the cluster.
    Kubectl {
        /// What kubectl is told.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run a command inside a Node, or in the client's network.
    Exec {
        /// `node-1`, `node-2` … or `client`.
        machine: String,
        /// The command; a shell without one.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Ask an echo server something, from wherever this runs, and print its answer.
    #[command(hide = true)]
    Ask {
        /// How.
        #[arg(value_enum)]
        protocol: Protocol,
        /// Where.
        server: SocketAddr,
    },
    /// Own a cluster until told to stop: what `up` leaves running.
    #[command(hide = true)]
    Supervise(UpArguments),
    /// Be the first process of a Node.
    #[command(hide = true)]
    NodeInit(InitArguments),
}

/// What a cluster is made of.
#[derive(Clone, Debug, Args)]
struct UpArguments {
    /// How many Nodes.
    #[arg(long, default_value_t = 2)]
    nodes: u8,

    /// What Services are made of.
    #[arg(long, value_enum, default_value_t)]
    kube_proxy: KubeProxy,

    /// How Pods are connected.
    #[arg(long, value_enum, default_value_t)]
    cni: Cni,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(arguments) {
        Ok(code) => code,
        Err(_interrupted) if interrupt::is_requested() => {
            complain("interrupted; everything is removed");
            ExitCode::from(interrupt::EXIT_CODE)
        }
        Err(err) => {
            complain(&format!("{err:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<ExitCode> {
    let Arguments { cluster, command } = arguments;
    let chosen = cluster.as_deref();
    match command {
        Command::Up(arguments) => up::run(&arguments)?,
        Command::Down => down::run(chosen)?,
        Command::Status => access::status(chosen)?,
        Command::Kubectl { arguments } => return access::kubectl(chosen, &arguments),
        Command::Exec { machine, command } => return access::exec(chosen, &machine, &command),
        Command::Ask { protocol, server } => {
            let answer = traffic::ask(protocol, server, "who?")?;
            say(&serde_json::to_string(&answer).context("write the answer as JSON")?);
        }
        Command::Supervise(arguments) => supervise::run(&arguments)?,
        Command::NodeInit(arguments) => run_init(&arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

#[expect(clippy::print_stderr, reason = "the last words of a program")]
fn complain(message: &str) {
    eprintln!("npl-cluster: {message}");
}

fn say(line: &str) {
    // A reader that has gone away has read enough.
    drop(writeln!(io::stdout(), "{line}"));
}
