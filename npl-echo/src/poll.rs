// SPDX-License-Identifier: Apache-2.0
//! Waits for conditions. Every wait polls a condition and has a deadline. The deadline is later on a slow machine. A
//! machine counts as slow if `NPL_PATIENCE` is set, if the load average or the number of runnable tasks exceeds the
//! number of processors, or if the sleeps between two polls take longer than requested.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use anyhow::{Result, bail};

use crate::interrupt;

/// The interval between two polls. The interval is multiplied by [`patience`], because frequent polls would slow down a
/// slow machine further.
const INTERVAL: Duration = Duration::from_millis(5);

/// The factor by which all time limits are multiplied: the environment variable `NPL_PATIENCE`, which is set on
/// emulated machines, or 1 if the variable is unset.
pub fn patience() -> u32 {
    static PATIENCE: OnceLock<u32> = OnceLock::new();
    *PATIENCE.get_or_init(|| env::var("NPL_PATIENCE").ok().and_then(|text| text.parse().ok()).unwrap_or(1))
}

/// Polls `condition` until it returns a value. Returns the value and the elapsed time.
///
/// # Errors
/// Returns an error if the condition does not hold within `limit`, or if a signal asks the process to end. The limit is
/// extended by [`patience`], by a load above one per processor, and by late sleeps. The error contains `what`.
pub fn until<T>(what: &str, limit: Duration, condition: impl FnMut() -> Option<T>) -> Result<(T, Duration)> {
    wait(what, limit, condition, interrupt::is_requested)
}

/// Repeats a call that was interrupted by a signal (`EINTR`).
///
/// A signal can interrupt a socket read that has a timeout, even if the process has no signal handler (signal(7)). The
/// repeated call starts with the full timeout.
pub fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Waits as [`until`] does, until `condition` is true, for example because an object was removed. An interruption does
/// not end this wait.
pub fn until_gone(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) -> Result<()> {
    wait(what, limit, || condition().then_some(()), || false).map(drop)
}

fn wait<T>(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Option<T>,
    is_interrupted: impl Fn() -> bool,
) -> Result<(T, Duration)> {
    let (start, pause) = (Instant::now(), INTERVAL * patience());
    let (mut asked, mut slept) = (Duration::ZERO, Duration::ZERO);
    loop {
        if let Some(value) = condition() {
            return Ok((value, start.elapsed()));
        }
        if is_interrupted() {
            bail!("interrupted while waiting for {what}");
        }
        if start.elapsed() >= limit * patience() {
            let (load, lateness) = (load_per_processor(), lateness(asked, slept));
            if start.elapsed() >= multiplied(limit * patience(), load.max(lateness)) {
                bail!(
                    "timed out after {} s at a load of {load:.1} per processor, with sleeps {lateness:.1} times as \
                     long as asked for, waiting for {what}",
                    start.elapsed().as_secs()
                );
            }
        }
        let before = Instant::now();
        thread::sleep(pause);
        (asked, slept) = (asked + pause, slept + before.elapsed());
    }
}

/// Multiplies the time limit of a single blocking call, for example of a read from a socket, by [`patience`] and by the
/// slowness of the machine before the call. Use [`until`] where a condition can be polled: `until` measures the
/// slowness when the limit has passed, so `until` also takes load into account that begins during the wait.
pub fn extended(limit: Duration) -> Duration {
    multiplied(limit * patience(), slowness())
}

/// The time for which a measured slowness is valid. A test sends thousands of requests, and a measurement for each
/// request would delay the test.
const MEASURED_EVERY: Duration = Duration::from_secs(1);

/// Returns the slowness of the machine: the larger of the load per processor and the [`lateness`] of one sleep.
/// Measures the slowness at most once per [`MEASURED_EVERY`].
fn slowness() -> f32 {
    static LATEST: Mutex<Option<(Instant, f32)>> = Mutex::new(None);
    let mut latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, slowness)) = latest.filter(|(measured, _)| measured.elapsed() < MEASURED_EVERY) {
        return slowness;
    }
    let before = Instant::now();
    thread::sleep(INTERVAL);
    let slowness = load_per_processor().max(lateness(INTERVAL, before.elapsed()));
    *latest = Some((Instant::now(), slowness));
    slowness
}

/// Multiplies a time limit by the slowness of the machine, but at least by 1 and at most by [`LARGEST_EXTENSION`]. The
/// slowness is the larger of two factors: the load per processor, because a task gets only `1 / load` of a processor's
/// time, and the [`lateness`] of sleeps.
fn multiplied(limit: Duration, slowness: f32) -> Duration {
    limit.mul_f32(slowness.clamp(1.0, LARGEST_EXTENSION))
}

/// Returns the ratio of the actual duration of sleeps to the requested duration. The load average does not contain the
/// time that a hypervisor gives to other virtual machines, but this time delays the end of a sleep.
fn lateness(asked: Duration, slept: Duration) -> f32 {
    if asked.is_zero() { 1.0 } else { slept.div_duration_f32(asked) }
}

/// The maximum factor by which a limit is extended.
const LARGEST_EXTENSION: f32 = 10.0;

/// The load per processor; 0 if the kernel does not report it.
fn load_per_processor() -> f32 {
    let processors = thread::available_parallelism().map_or(1, |count| u16::try_from(count.get()).unwrap_or(u16::MAX));
    load(&fs::read_to_string("/proc/loadavg").unwrap_or_default()) / f32::from(processors)
}

/// Returns the larger of two numbers in the text of `/proc/loadavg`: the load average of the last minute, and the
/// number of tasks that run or wait for a processor now. The average follows a new load only after tens of seconds.
fn load(text: &str) -> f32 {
    let mut fields = text.split_whitespace();
    let average = fields.next().and_then(|first| first.parse::<f32>().ok()).unwrap_or_default();
    let running = fields.nth(2).and_then(|tasks| tasks.split('/').next()?.parse::<f32>().ok()).unwrap_or_default();
    average.max(running)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_grow_with_the_load_up_to_a_maximum() {
        let limit = Duration::from_secs(20);
        for (load, seconds) in [(0.0, 20), (0.9, 20), (1.0, 20), (3.0, 60), (1000.0, 200)] {
            assert_eq!(multiplied(limit, load), Duration::from_secs(seconds), "{load}");
        }
    }

    #[test]
    fn limits_grow_with_the_lateness_of_sleeps() {
        let seconds = Duration::from_secs;
        for (asked, slept, limit) in [(0, 0, 20), (8, 8, 20), (8, 10, 25), (2, 6, 60), (1, 1000, 200)] {
            let lateness = lateness(seconds(asked), seconds(slept));
            assert_eq!(multiplied(seconds(20), lateness), seconds(limit), "{slept} s instead of {asked} s");
        }
    }

    #[test]
    fn the_load_is_the_average_or_the_number_of_running_tasks() {
        for (text, expected) in [("4.25 1.00 0.50 2/640 1234", 4.25), ("0.25 1.00 9.00 8/640 1234", 8.0), ("", 0.0)] {
            assert!((load(text) - expected).abs() < f32::EPSILON, "{text}: {}", load(text));
        }
    }

    #[test]
    fn the_limit_of_a_blocking_call_is_never_shortened() {
        let limit = Duration::from_secs(2);
        assert!((limit * patience()..=limit * patience() * 10).contains(&extended(limit)));
    }

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
        let error = error.to_string();
        assert!(
            error.starts_with("timed out after 0 s at a load of ") && error.ends_with(" waiting for a miracle"),
            "{error}"
        );
    }
}
