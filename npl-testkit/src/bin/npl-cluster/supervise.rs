// SPDX-License-Identifier: Apache-2.0
//! The owner process of a cluster: all processes of the cluster are descendants of the owner and end with the owner.

use std::env;
use std::fs::File;
use std::io::{self, Write as _};

use anyhow::{Context, Result};
use nix::unistd::{dup2_stderr, setsid};
use npl_testkit::interrupt;
use npl_testkit::real_cluster::{Options, RealCluster};
use npl_testkit::run::Run;

use crate::UpArguments;
use crate::state::{Ready, State};

/// The log file in the run's directory, which receives standard error once the cluster is up.
pub(crate) const LOG: &str = "supervisor.log";

/// Starts the cluster, prints its identifier to standard output, and keeps the cluster running until a signal arrives.
pub(crate) fn run(arguments: &UpArguments) -> Result<()> {
    // In its own session, this process gets no signal from a Ctrl-C at the terminal. `up` gets the signal, and then
    // sends SIGTERM to this process.
    setsid().context("leave the terminal's session")?;
    interrupt::watch()?;
    let run = Run::start()?;
    let directory = run.directory().to_owned();
    let UpArguments { nodes, cni, .. } = arguments;
    let kube_proxy = arguments.kube_proxy();
    let made_of = format!("{nodes} Nodes, CNI {cni}, kube-proxy {kube_proxy}");
    let mut state = State { id: run.id().to_owned(), made_of, ready: None };
    state.write(&directory)?;
    let init_program = env::current_exe().context("find the path of this program")?;
    let options = Options { nodes: *nodes, kube_proxy, cni: *cni, init_program };
    let cluster = RealCluster::start_in(run, &options)?;
    state.ready = Some(Ready::of(&cluster));
    state.write(&directory)?;
    let log = File::create(directory.join(LOG)).context("create the log")?;
    dup2_stderr(&log).context("redirect standard error to the log")?;
    writeln!(io::stdout(), "{}", state.id).context("report that the cluster is up")?;
    interrupt::wait();
    Ok(())
}
