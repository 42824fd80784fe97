// SPDX-License-Identifier: Apache-2.0
//! Measures the traffic of Services for `--service-metrics`. The main loop and the server of metrics share a meter.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use npl_common::stats::MappingStats;
use tokio::time::Instant;

use crate::{
    core::{
        model::Frontend,
        op::Op,
        service_traffic::{ServiceTarget, ServiceTraffic},
        state::PlannerState,
    },
    datapath::{DatapathError, Tables},
};

/// The delay from a change of Pods, Services or mappings until the Services of the mappings are updated in the meter.
const UPDATE_DELAY: Duration = Duration::from_millis(200);

/// Keeps the Services of the mappings in the meter up to date. Does nothing without `--service-metrics`.
#[derive(Debug)]
pub(super) struct MeterUpdates {
    meter: Option<ServiceMeter>,
    /// When to update the Services of the mappings in the meter; `None` if nothing has changed.
    due: Option<Instant>,
}

impl MeterUpdates {
    pub(super) const fn new(meter: Option<ServiceMeter>) -> Self {
        Self { meter, due: None }
    }

    /// Reads the counters once, so that traffic before the start of this agent does not count.
    pub(super) fn start(&self, tables: &Tables) -> Result<(), DatapathError> {
        self.meter.as_ref().map_or(Ok(()), |meter| meter.measure(tables))
    }

    /// Schedules an update after [`UPDATE_DELAY`], unless an update is already scheduled.
    pub(super) fn update_soon(&mut self) {
        if self.meter.is_some() {
            self.due.get_or_insert_with(|| Instant::now() + UPDATE_DELAY);
        }
    }

    /// When [`Self::update`] is due.
    pub(super) const fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Updates the Services of the mappings. The caller calls this method only once [`Self::due`] has passed: each
    /// update goes through all node ports, so all changes within [`UPDATE_DELAY`] share one update.
    pub(super) fn update(&mut self, state: &PlannerState, tables: &Tables) -> Result<(), DatapathError> {
        self.due = None;
        self.meter.as_ref().map_or(Ok(()), |meter| meter.update_owners(state.service_ports(), tables))
    }

    /// Takes the meter's lock. The caller holds the lock while it executes ops, so that no scrape reads counters
    /// meanwhile. If the ops remove mappings, first adds the traffic of all mappings to their Services. Returns `None`
    /// without `--service-metrics`.
    pub(super) fn lock_before(
        &self,
        ops: &[Op],
        tables: &Tables,
    ) -> Result<Option<MutexGuard<'_, ServiceTraffic>>, DatapathError> {
        let mut traffic = self.meter.as_ref().map(ServiceMeter::lock);
        if let Some(traffic) = &mut traffic
            && ops.iter().any(|op| matches!(op, Op::RemoveMapping(_)))
        {
            traffic.observe(tables.read_counters()?);
        }
        Ok(traffic)
    }
}

/// The traffic of Services. Clones share the same traffic. While a thread holds the lock, no other thread changes
/// mappings or reads their counters. Otherwise, counts of a removed mapping could count for the next mapping of its
/// node port.
#[derive(Debug, Clone)]
pub struct ServiceMeter(Arc<Mutex<ServiceTraffic>>);

impl ServiceMeter {
    /// Creates a meter of at most `max` Service ports.
    pub fn new(max: usize) -> Self {
        Self(Arc::new(Mutex::new(ServiceTraffic::new(max))))
    }

    /// Waits for the lock.
    fn lock(&self) -> MutexGuard<'_, ServiceTraffic> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the counters of all mappings.
    fn measure(&self, tables: &Tables) -> Result<(), DatapathError> {
        let mut traffic = self.lock();
        traffic.observe(tables.read_counters()?);
        Ok(())
    }

    /// Sets the Service port of each mapping. If a mapping gets another Service port or was removed, reads the counters
    /// first.
    fn update_owners(
        &self,
        owners: BTreeMap<Frontend, Option<ServiceTarget>>,
        tables: &Tables,
    ) -> Result<(), DatapathError> {
        let mut traffic = self.lock();
        if traffic.changes_owner(&owners) {
            traffic.observe(tables.read_counters()?);
        }
        traffic.set_owners(owners);
        Ok(())
    }

    /// Reads the counters of all mappings, and returns the traffic of each Service port; `None` stands for
    /// all Service ports without series of their own.
    pub(super) fn read(&self, tables: &Tables) -> Result<Vec<(Option<ServiceTarget>, MappingStats)>, DatapathError> {
        let mut traffic = self.lock();
        traffic.observe(tables.read_counters()?);
        let kept = traffic.kept().map(|(port, stats)| (Some(port.clone()), stats));
        Ok(kept.chain([(None, traffic.other())]).collect())
    }
}
