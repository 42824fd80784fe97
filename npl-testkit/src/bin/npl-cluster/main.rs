// SPDX-License-Identifier: Apache-2.0
//! Starts, shows and removes a real multi-node Kubernetes cluster on this machine.

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

/// A real multi-node Kubernetes cluster on this machine.
#[derive(Debug, Parser)]
#[command(name = "npl-cluster", bin_name = "cargo xtask cluster")]
struct Arguments {
    /// The identifier of the cluster as shown by `status`; required if several clusters are running.
    #[arg(long, global = true, value_name = "ID")]
    cluster: Option<String>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a cluster and leave it running.
    Up(UpArguments),
    /// Remove the cluster, and the remaining objects of clusters whose owner was killed.
    Down {
        /// Remove all running clusters, including the clusters of other users.
        #[arg(long, conflicts_with = "cluster")]
        all: bool,
    },
    /// Show running clusters and how to access them.
    Status,
    /// Run kubectl with administrator rights.
    Kubectl {
        /// The arguments of kubectl.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run a command inside a Node or in the client's network namespace.
    Exec {
        /// `node-1`, `node-2`, … or `client`.
        machine: String,
        /// The command [default: a shell].
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Send a request to an echo server from the current network namespace and print the response.
    #[command(hide = true)]
    Ask {
        /// The protocol.
        #[arg(value_enum)]
        protocol: Protocol,
        /// The address and port of the server.
        server: SocketAddr,
    },
    /// Start a cluster, and keep it running until a signal arrives. `up` starts this command.
    #[command(hide = true)]
    Supervise(UpArguments),
    /// Run as the first process of a Node.
    #[command(hide = true)]
    NodeInit(InitArguments),
}

/// The configuration of a cluster.
#[derive(Clone, Debug, Args)]
struct UpArguments {
    /// The number of Nodes.
    #[arg(long, default_value_t = 2)]
    nodes: u8,

    /// The mode of kube-proxy, or `none` [default: `none` with Cilium, which replaces kube-proxy, otherwise `iptables`]
    #[arg(long, value_enum)]
    kube_proxy: Option<KubeProxy>,

    /// The Pod network.
    #[arg(long, value_enum, default_value_t)]
    cni: Cni,
}

impl UpArguments {
    /// Returns the mode of kube-proxy: the given one, or the default of the Pod network.
    fn kube_proxy(&self) -> KubeProxy {
        self.kube_proxy.or_else(|| self.cni.kube_proxy_modes().first().copied()).unwrap_or_default()
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(arguments) {
        Ok(code) => code,
        Err(_interrupted) if interrupt::is_requested() => {
            complain("interrupted; all parts of the cluster have been removed");
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
        Command::Down { all } => down::run(chosen, all)?,
        Command::Status => access::status(chosen)?,
        Command::Kubectl { arguments } => return access::kubectl(chosen, &arguments),
        Command::Exec { machine, command } => return access::exec(chosen, &machine, &command),
        Command::Ask { protocol, server } => {
            let answer = traffic::ask(protocol, server, "who?")?;
            say(&serde_json::to_string(&answer).context("format the response as JSON")?);
        }
        Command::Supervise(arguments) => supervise::run(&arguments)?,
        Command::NodeInit(arguments) => run_init(&arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

#[expect(clippy::print_stderr, reason = "the error message of a program")]
fn complain(message: &str) {
    eprintln!("npl-cluster: {message}");
}

fn say(line: &str) {
    // An error is ignored, because an error means that the reader has closed the pipe.
    drop(writeln!(io::stdout(), "{line}"));
}
