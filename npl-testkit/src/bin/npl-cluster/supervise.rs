// SPDX-License-Identifier: Apache-2.0
//! The owner of a cluster: everything in it is its child, and goes when it goes, whichever way that is.

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

/// The file in the run's folder with what the owner says once nobody listens.
pub(crate) const LOG: &str = "supervisor.log";

/// Starts the cluster, tells its identifier on standard output, and keeps it until a signal comes.
pub(crate) fn run(arguments: &UpArguments) -> Result<()> {
    // A Ctrl-C at the terminal is for `up`, which hands it on.
    setsid().context("leave the terminal's session")?;
    interrupt::watch()?;
    let run = Run::start()?;
    let directory = run.directory().to_owned();
    let UpArguments { nodes, kube_proxy, cni } = arguments;
    let made_of = format!("{nodes} Nodes, CNI {cni}, kube-proxy {kube_proxy}");
    let mut state = State { id: run.id().to_owned(), made_of, ready: None };
    state.write(&directory)?;
    let init_program = env::current_exe().context("find this program")?;
    let options = Options { nodes: *nodes, kube_proxy: *kube_proxy, cni: *cni, init_program };
    let cluster = RealCluster::start_in(run, &options)?;
    state.ready = Some(Ready::of(&cluster));
    state.write(&directory)?;
    let log = File::create(directory.join(LOG)).context("create the log")?;
    dup2_stderr(&log).context("write to the log from now on")?;
    writeln!(io::stdout(), "{}", state.id).context("tell that the cluster is up")?;
    interrupt::wait();
    Ok(())
}
