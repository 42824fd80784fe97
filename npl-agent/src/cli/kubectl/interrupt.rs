// SPDX-License-Identifier: Apache-2.0
//! Ends a command between two of its steps after SIGINT (Ctrl-C), SIGTERM or SIGHUP, or at the end of a time limit, so
//! that the command can remove the objects that it has created.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use tokio::signal::unix::{SignalKind, signal};

/// The interval between two checks of a condition.
const PAUSE: Duration = Duration::from_millis(250);

/// Detects that a signal has arrived, or that the time limit is over.
#[derive(Debug, Clone)]
pub(super) struct Interrupt {
    signals: Arc<AtomicUsize>,
    /// The number of signals that arrived before this time limit began.
    earlier: usize,
    start: Instant,
    limit: Duration,
}

impl Interrupt {
    /// Begins a time limit. From now on, SIGINT, SIGTERM and SIGHUP are counted, and do not end the process.
    pub(super) fn watch(limit: Duration) -> anyhow::Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("watch for signals")?;
        let signals = {
            let _context = runtime.enter();
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal)
        };
        let [interrupt, terminate, hangup] = signals;
        let (mut interrupt, mut terminate, mut hangup) = (interrupt?, terminate?, hangup?);
        let watched = Self::new(limit);
        let counter = Arc::clone(&watched.signals);
        thread::spawn(move || {
            runtime.block_on(async {
                loop {
                    tokio::select! {
                        _ = interrupt.recv() => {}
                        _ = terminate.recv() => {}
                        _ = hangup.recv() => {}
                    }
                    counter.fetch_add(1, Ordering::Relaxed);
                }
            });
        });
        Ok(watched)
    }

    /// Begins a time limit that no signal interrupts.
    pub(super) fn new(limit: Duration) -> Self {
        Self { signals: Arc::default(), earlier: 0, start: Instant::now(), limit }
    }

    /// Begins a new time limit for removing the objects that the command has created. Signals that arrived before this
    /// call do not interrupt the removal; a further signal interrupts the removal.
    pub(super) fn renewed(&self, limit: Duration) -> Self {
        let signals = Arc::clone(&self.signals);
        Self { earlier: signals.load(Ordering::Relaxed), signals, start: Instant::now(), limit }
    }

    /// Returns an error once a signal has arrived, or the time limit is over.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!(self.signals.load(Ordering::Relaxed) == self.earlier, "interrupted");
        ensure!(self.start.elapsed() < self.limit, "the time limit of {} s is over", self.limit.as_secs());
        Ok(())
    }

    /// Repeats `read` until it returns a result. Returns `None` if `limit` has passed before `read` returns a result.
    pub(super) fn until<T>(
        &self,
        limit: Duration,
        mut read: impl FnMut() -> anyhow::Result<Option<T>>,
    ) -> anyhow::Result<Option<T>> {
        let start = Instant::now();
        loop {
            self.check()?;
            if let Some(found) = read()? {
                return Ok(Some(found));
            }
            if start.elapsed() >= limit {
                return Ok(None);
            }
            thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_further_signal_interrupts_the_removal() {
        let interrupt = Interrupt::new(Duration::from_mins(1));
        assert!(interrupt.check().is_ok());
        interrupt.signals.fetch_add(1, Ordering::Relaxed);
        assert_eq!(interrupt.check().unwrap_err().to_string(), "interrupted");
        let removal = interrupt.renewed(Duration::from_mins(1));
        assert!(removal.check().is_ok());
        interrupt.signals.fetch_add(1, Ordering::Relaxed);
        assert_eq!(removal.check().unwrap_err().to_string(), "interrupted");
    }

    #[test]
    fn the_time_limit_ends_the_command() {
        let error = Interrupt::new(Duration::ZERO).check().unwrap_err();
        assert_eq!(error.to_string(), "the time limit of 0 s is over");
    }
}
