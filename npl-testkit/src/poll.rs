// SPDX-License-Identifier: Apache-2.0
//! Waits. Every wait polls a condition and has a deadline.

use std::sync::OnceLock;
use std::time::{Duration, Instant};
use std::{env, io, thread};

use anyhow::{Result, bail};

use crate::interrupt;

/// The interval between two polls. It grows with [`patience`], because polling is expensive on slow machines.
const INTERVAL: Duration = Duration::from_millis(5);

/// The factor by which all limits are extended on slow machines: `NPL_PATIENCE`, set on emulated machines.
pub fn patience() -> u32 {
    static PATIENCE: OnceLock<u32> = OnceLock::new();
    *PATIENCE.get_or_init(|| env::var("NPL_PATIENCE").ok().and_then(|text| text.parse().ok()).unwrap_or(1))
}

/// Polls `condition` until it returns a value. Returns the value and the elapsed time.
///
/// # Errors
/// If the condition does not hold within `limit`. The error contains `what`.
pub fn until<T>(what: &str, limit: Duration, condition: impl FnMut() -> Option<T>) -> Result<(T, Duration)> {
    wait(what, limit, condition, interrupt::is_requested)
}

/// Repeats a call that was interrupted by a signal (`EINTR`).
///
/// A SIGCHLD for a child of another thread interrupts socket reads with a timeout, even without a signal handler
/// (signal(7)). The repeated call starts with the full timeout.
pub fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// As [`until`], for removals: an interruption does not end this wait.
pub fn until_gone(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) -> Result<()> {
    wait(what, limit, || condition().then_some(()), || false).map(drop)
}

fn wait<T>(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Option<T>,
    is_interrupted: impl Fn() -> bool,
) -> Result<(T, Duration)> {
    let limit = limit * patience();
    let start = Instant::now();
    loop {
        if let Some(value) = condition() {
            return Ok((value, start.elapsed()));
        }
        if is_interrupted() {
            bail!("interrupted while waiting for {what}");
        }
        if start.elapsed() >= limit {
            bail!("timed out after {} s waiting for {what}", limit.as_secs_f32());
        }
        thread::sleep(INTERVAL * patience());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn condition_is_polled_until_it_holds() {
        let mut calls = 0;
        let (value, _) = until("three calls", Duration::from_secs(5), || {
            calls += 1;
            (calls == 3).then_some(calls)
        })
        .unwrap();
        assert_eq!(value, 3);
    }

    #[test]
    fn a_timeout_names_the_awaited_condition() {
        let error = until("a miracle", Duration::ZERO, || None::<()>).unwrap_err();
        assert_eq!(error.to_string(), "timed out after 0 s waiting for a miracle");
    }
}
