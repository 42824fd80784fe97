// SPDX-License-Identifier: Apache-2.0
//! Ctrl-C as an end like any other: every wait gives up, so that all guards run.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, Signal};

/// How often a wait looks for a signal.
const LOOK: Duration = Duration::from_millis(100);

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// What a shell reports of a program that was interrupted.
pub const EXIT_CODE: u8 = 130;

/// Takes SIGINT, SIGTERM and SIGHUP over. To be called before any thread is started, since threads inherit what they
/// do not receive.
///
/// The first signal makes every wait of [`crate::poll`] give up. The second ends the process at once: the kernel then
/// kills its children, and the next run removes the rest.
pub fn watch() -> Result<()> {
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
    signals.thread_block().context("take signals over")?;
    thread::spawn(move || {
        while signals.wait().is_ok() {
            if REQUESTED.swap(true, Ordering::Relaxed) {
                leave();
            }
        }
    });
    Ok(())
}

/// Whether a signal has come.
pub fn is_requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// Waits for a signal and takes it as dealt with, so that what follows can wait for other things.
pub fn wait() {
    while !REQUESTED.swap(false, Ordering::Relaxed) {
        thread::park_timeout(LOOK);
    }
}

/// As [`wait`], but not for longer than `limit`.
pub fn wait_at_most(limit: Duration) {
    let start = Instant::now();
    while start.elapsed() < limit && !REQUESTED.swap(false, Ordering::Relaxed) {
        thread::park_timeout(LOOK.min(limit.saturating_sub(start.elapsed())));
    }
}

#[expect(clippy::exit, reason = "whoever interrupts twice does not want to wait for an orderly end")]
fn leave() {
    process::exit(EXIT_CODE.into());
}
