// SPDX-License-Identifier: Apache-2.0
//! Ctrl-C and termination end the test between two steps, so that its objects are removed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use tokio::signal::unix::{SignalKind, signal};

/// The interval at which conditions are checked.
const PAUSE: Duration = Duration::from_millis(250);

/// Whether a signal has arrived.
#[derive(Debug, Clone)]
pub(super) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Replaces the default effect of SIGINT, SIGTERM and SIGHUP, which would end the process at once.
    pub(super) fn watch() -> anyhow::Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("watch for signals")?;
        let signals = {
            let _context = runtime.enter();
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal)
        };
        let [interrupt, terminate, hangup] = signals;
        let (mut interrupt, mut terminate, mut hangup) = (interrupt?, terminate?, hangup?);
        let has_arrived = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&has_arrived);
        thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = hangup.recv() => {}
                }
            });
            flag.store(true, Ordering::Relaxed);
        });
        Ok(Self(has_arrived))
    }

    /// An error once a signal has arrived.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!(!self.0.load(Ordering::Relaxed), "interrupted");
        Ok(())
    }

    /// Repeats `read` until it returns a result; `None` after the time limit.
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
