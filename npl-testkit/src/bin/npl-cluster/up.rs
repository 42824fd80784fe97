// SPDX-License-Identifier: Apache-2.0
//! `up`: starts the owner of a cluster and waits until the owner reports that the cluster is ready.

use std::env;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use npl_testkit::{interrupt, poll};

use crate::state::State;
use crate::{UpArguments, access, say};

/// The time limit for the start of the cluster, longer than every single wait of the owner.
const LIMIT: Duration = Duration::from_mins(10);

/// The time limit for the owner to remove the cluster after SIGTERM.
const END_LIMIT: Duration = Duration::from_mins(1);

/// Starts a cluster and prints how to access it.
pub(crate) fn run(arguments: &UpArguments) -> Result<()> {
    interrupt::watch()?;
    let started = Instant::now();
    let UpArguments { nodes, cni, .. } = arguments;
    let kube_proxy = arguments.kube_proxy();
    let mut owner = Command::new(env::current_exe().context("find the path of this program")?)
        .args(["supervise", "--nodes", &nodes.to_string()])
        .args(["--kube-proxy", &kube_proxy.to_string(), "--cni", &cni.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("start the cluster's owner")?;
    let id = wait_for_identifier(&mut owner)?;
    say(&format!("cluster {id} is ready after {:.1} s", started.elapsed().as_secs_f32()));
    access::look_around(&State::find(Some(&id))?)
}

/// Reads the line with the identifier that an owner prints. If there is no line, the owner has printed an error to
/// standard error.
fn wait_for_identifier(owner: &mut Child) -> Result<String> {
    let stdout = owner.stdout.take().context("open the output of the cluster's owner")?;
    let (sender, line) = mpsc::channel();
    thread::spawn(move || {
        let mut text = String::new();
        let read = BufReader::new(stdout).read_line(&mut text);
        // Sending fails only if the receiver was dropped after a timeout, so the error is ignored.
        drop(sender.send(read.map(|_length| text)));
    });
    let waited = poll::until("the readiness of the cluster", LIMIT, || line.try_recv().ok());
    let text = match waited {
        Ok((text, _)) => text.context("read the output of the cluster's owner")?,
        Err(late) => {
            end(owner)?;
            return Err(late);
        }
    };
    if text.is_empty() {
        let status = owner.wait().context("wait for the cluster's owner")?;
        bail!("starting the cluster failed ({status}): the error is printed above, and all parts have been removed");
    }
    Ok(text.trim().to_owned())
}

fn end(owner: &mut Child) -> Result<()> {
    let pid = i32::try_from(owner.id()).context("process id out of range")?;
    signal::kill(Pid::from_raw(pid), Signal::SIGTERM).context("send SIGTERM to the cluster's owner")?;
    poll::until_gone("the cluster's owner to exit", END_LIMIT, || owner.try_wait().is_ok_and(|it| it.is_some()))
}
