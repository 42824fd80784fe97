// SPDX-License-Identifier: Apache-2.0
//! Handles Ctrl-C as an orderly shutdown: every wait returns an error, so that the teardown code in `Drop`
//! implementations runs.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, Signal};

/// The interval at which [`wait`] and [`wait_at_most`] check for a signal.
const LOOK: Duration = Duration::from_millis(100);

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// The exit code that shells report for an interrupted program.
pub const EXIT_CODE: u8 = 130;

/// Handles SIGINT, SIGTERM and SIGHUP. Call this function before any thread starts, so that all threads inherit the
/// mask of blocked signals.
///
/// The first signal makes every wait of [`crate::poll`] return an error. The second signal ends the process
/// immediately: the kernel then kills the child processes, and the next run removes the remaining state.
pub fn watch() -> Result<()> {
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
    signals.thread_block().context("block signals")?;
    thread::spawn(move || {
        while signals.wait().is_ok() {
            if REQUESTED.swap(true, Ordering::Relaxed) {
                leave();
            }
        }
    });
    Ok(())
}

/// Whether a signal has arrived.
pub fn is_requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// Waits for a signal and clears it, so that later waits are not interrupted.
pub fn wait() {
    while !REQUESTED.swap(false, Ordering::Relaxed) {
        thread::park_timeout(LOOK);
    }
}

/// Waits for a signal as [`wait`] does, but at most for `limit`.
pub fn wait_at_most(limit: Duration) {
    let start = Instant::now();
    while start.elapsed() < limit && !REQUESTED.swap(false, Ordering::Relaxed) {
        thread::park_timeout(LOOK.min(limit.saturating_sub(start.elapsed())));
    }
}

#[expect(clippy::exit, reason = "a second signal skips the orderly shutdown")]
fn leave() {
    process::exit(EXIT_CODE.into());
}
