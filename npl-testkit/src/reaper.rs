// SPDX-License-Identifier: Apache-2.0
//! What a first process of a process namespace has to do: orphans become its children.

use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};

/// Takes SIGCHLD and SIGTERM over; to be called before the first child may end.
pub fn prepare() -> Result<()> {
    signals().thread_block().context("take signals over")
}

/// Lets the dead rest until SIGTERM comes; with this process, the kernel ends all others of its namespace.
pub fn run() -> Result<()> {
    let signals = signals();
    loop {
        let signal = signals.wait().context("wait for a signal")?;
        while matches!(waitpid(None, Some(WaitPidFlag::WNOHANG)), Ok(status) if status != WaitStatus::StillAlive) {}
        if signal == Signal::SIGTERM || signal == Signal::SIGINT {
            return Ok(());
        }
    }
}

fn signals() -> SigSet {
    [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT].into_iter().collect()
}
