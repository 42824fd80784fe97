// SPDX-License-Identifier: Apache-2.0
//! Waits: every one polls a condition and ends at a deadline.

use std::sync::OnceLock;
use std::time::{Duration, Instant};
use std::{env, io, thread};

use anyhow::{Result, bail};

use crate::interrupt;

/// Time between two looks at a condition; to look may cost much where everything is slow.
const INTERVAL: Duration = Duration::from_millis(5);

/// How many times longer everything may take than where these limits were found: `NPL_PATIENCE`, on emulated machines.
pub fn patience() -> u32 {
    static PATIENCE: OnceLock<u32> = OnceLock::new();
    *PATIENCE.get_or_init(|| env::var("NPL_PATIENCE").ok().and_then(|text| text.parse().ok()).unwrap_or(1))
}

/// Calls `condition` until it returns a value, which is returned with the time that it took.
///
/// # Errors
/// When `limit` is over and the condition never held; the error names `what` was waited for.
pub fn until<T>(what: &str, limit: Duration, condition: impl FnMut() -> Option<T>) -> Result<(T, Duration)> {
    wait(what, limit, condition, interrupt::is_requested)
}

/// Calls again what the end of a child interrupted that another thread had started.
///
/// That is what the kernel tells whoever reads a socket with a time limit, also where nothing handles the signal
/// (signal(7)). The limit then begins anew.
pub fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// As [`until`], for the removal of things, which goes on after an interruption.
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
            bail!("{what} did not come about within {} s", limit.as_secs_f32());
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
    fn deadline_names_what_was_waited_for() {
        let error = until("a miracle", Duration::ZERO, || None::<()>).unwrap_err();
        assert_eq!(error.to_string(), "a miracle did not come about within 0 s");
    }
}
