// SPDX-License-Identifier: Apache-2.0
//! Removes expired connection tracking entries and half-open entries. The sweeper has its own thread, because scanning
//! a large map takes long.

use std::{
    path::Path,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::Duration,
};

use tracing::{debug, warn};

use crate::{
    core::{
        flows::half_open::{HalfOpenExpiry, SWEEP_INTERVAL_NS},
        model::last::Last,
    },
    datapath::{DatapathError, Pins, Tables, kernel_clock},
    metrics::Metrics,
    process::error_chain::ErrorChain,
};

/// The time between two scans.
const EVERY: Duration = Duration::from_nanos(SWEEP_INTERVAL_NS);

/// The thread, which ends when this handle is dropped.
#[derive(Debug)]
pub struct Sweeper {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Sweeper {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// If the maps cannot be opened.
    pub fn start(bpffs: &Path, metrics: Metrics) -> Result<Self, DatapathError> {
        let tables = Tables::open(&Pins::new(bpffs))?;
        // Both families have the same size.
        metrics.set_flow_limit(tables.flow_capacities().into_iter().min().unwrap_or_default());
        let (end, ended) = mpsc::channel();
        let thread = thread::Builder::new().name("sweeper".to_owned()).spawn(move || sweep(tables, &metrics, &ended));
        if let Err(error) = &thread {
            warn!(err = %error, "the sweeper thread cannot be started: expired connection tracking entries stay \
                                 until the table is full");
        }
        Ok(Self { end: Some(end), thread: thread.ok() })
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn sweep(mut tables: Tables, metrics: &Metrics, ended: &Receiver<()>) {
    let (mut failing, mut expiry) = (Last::default(), <[HalfOpenExpiry; 2]>::default());
    while ended.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
        let flows = tables.remove_expired_flows(kernel_clock(), |family, left| metrics.set_flows(family, left));
        let swept = flows.and_then(|flows| Ok(flows + tables.remove_expired_half_open(&mut expiry)?));
        let is_change = failing.update(swept.is_err());
        match &swept {
            Ok(0) => {}
            Ok(entries) => debug!(entries, "expired connection tracking entries removed"),
            Err(error) if is_change => warn!(
                err = %ErrorChain(error),
                "expired connection tracking entries cannot be removed: they stay until the table is full and the kernel evicts \
                 the least recently used ones"
            ),
            Err(error) => {
                debug!(err = %ErrorChain(error), "expired connection tracking entries still cannot be removed");
            }
        }
    }
}
