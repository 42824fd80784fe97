// SPDX-License-Identifier: Apache-2.0
//! Reaps orphans, which become children of the first process of a PID namespace.

use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};

/// Blocks SIGCHLD, SIGTERM and SIGINT. Call this function before the first child can exit.
pub fn prepare() -> Result<()> {
    signals().thread_block().context("block signals")
}

/// Reaps children until SIGTERM or SIGINT arrives. When this process exits, the kernel kills all processes of the PID
/// namespace.
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
