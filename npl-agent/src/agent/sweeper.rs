// SPDX-License-Identifier: Apache-2.0
//! Removes NPL's expired conntrack entries, in the flow tables and in the half-open caches. The sweeper has its own
//! thread, because scanning a large map would delay the main loop.

use std::{
    path::Path,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::Duration,
};

use npl_common::half_open;
use tracing::{debug, warn};

use crate::{
    core::{
        flows::{
            evictions::{EvictionEstimate, Sweep},
            half_open::{HalfOpenExpiry, SWEEP_INTERVAL_NS},
        },
        model::{Family, Protocol, last::Last},
        pages,
    },
    datapath::{DatapathError, Pins, SweptFlows, Tables, kernel_clock},
    metrics::{Metrics, RemovalCause, SweptTable},
    process::error_chain::ErrorChain,
};

/// The time between two scans of NPL's flow tables and half-open caches.
const EVERY: Duration = Duration::from_nanos(SWEEP_INTERVAL_NS);

/// The handle of the sweeper's thread, which ends when this handle is dropped.
#[derive(Debug)]
pub struct Sweeper {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Sweeper {
    /// Opens the maps and starts the sweeper's thread.
    ///
    /// # Errors
    ///
    /// If the maps cannot be opened.
    pub fn start(bpffs: &Path, metrics: Metrics) -> Result<Self, DatapathError> {
        let tables = Tables::open(&Pins::new(bpffs))?;
        // A protocol's flow tables of both IP families have the same size, so the metric has no label for the family.
        for (protocol, capacity) in Protocol::ALL.into_iter().zip(tables.flow_capacities(Family::V4)) {
            metrics.set_flow_limit(protocol, capacity);
        }
        let (end, ended) = mpsc::channel();
        let thread = thread::Builder::new().name("sweeper".to_owned()).spawn(move || sweep(tables, &metrics, &ended));
        if let Err(error) = &thread {
            warn!(
                see = pages::url(pages::SIZES),
                err = %error,
                "the sweeper thread cannot be started: expired connection tracking entries stay until the table is full"
            );
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
    let (mut failing, mut memory) = (Last::default(), Memory::default());
    while ended.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
        let swept = sweep_once(&mut tables, metrics, &mut memory);
        let is_change = failing.update(swept.is_err());
        match &swept {
            Ok(0) => {}
            Ok(entries) => debug!(entries, "expired connection tracking entries removed"),
            Err(error) if is_change => warn!(
                see = pages::url(pages::SIZES),
                err = %ErrorChain(error),
                "expired connection tracking entries cannot be removed: the entries stay until the table is full and \
                 the kernel evicts the least recently used entries"
            ),
            Err(error) => {
                debug!(err = %ErrorChain(error), "expired connection tracking entries still cannot be removed");
            }
        }
    }
}

/// State that the sweeper keeps between two sweeps, for IPv4 and for IPv6. From this state, a sweep finds half-open
/// entries that have expired, and flows that the kernel has evicted.
#[derive(Debug, Default)]
struct Memory {
    half_open: [HalfOpenExpiry; 2],
    evictions: [EvictionEstimate; 2],
}

/// Removes expired entries and returns their number. Sets the metrics of table sizes, and counts removed entries in the
/// metrics.
fn sweep_once(tables: &mut Tables, metrics: &Metrics, memory: &mut Memory) -> Result<usize, DatapathError> {
    // The counters of established flows are read before the entries. If an entry is added between the two reads, the
    // sweep finds an entry that the counters do not count yet, and the next estimate of evictions corrects the
    // difference. If the entries were read first, an entry that is added between the two reads would appear to be
    // evicted.
    let established = [tables.totals(Family::V4)?.established_flows, tables.totals(Family::V6)?.established_flows];
    let mut swept = Vec::new();
    let mut removed = tables.remove_expired_flows(kernel_clock(), |family, flows| swept.push((family, flows)))?;
    for (index, (family, SweptFlows { removed, left, room })) in swept.into_iter().enumerate() {
        for (protocol, left) in Protocol::ALL.into_iter().zip(left) {
            metrics.set_flows(family, protocol, left);
        }
        metrics.count_removed_flows(family, RemovalCause::Expired, removed as u64);
        let purged = metrics.removed_flows(family, RemovalCause::MappingRemoved);
        let found = left.iter().sum::<usize>() + removed;
        let sweep = Sweep { found, room, expired: removed, established: established[index], purged };
        let evicted = memory.evictions[index].observe(sweep);
        metrics.count_removed_flows(family, RemovalCause::Evicted, evicted);
    }
    removed += tables.remove_expired_half_open(&mut memory.half_open)?;
    for (family, half_open) in Family::ALL.into_iter().zip(&memory.half_open) {
        metrics.set_table_fill(SweptTable::HalfOpen, family, half_open.used(), half_open::WORDS as usize);
        let (used, capacity) = tables.socket_rnat_fill(family)?;
        metrics.set_table_fill(SweptTable::SocketReverseNat, family, used, capacity);
    }
    Ok(removed)
}
