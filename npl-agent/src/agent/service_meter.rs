// SPDX-License-Identifier: Apache-2.0
//! Measures the traffic of Services for `--service-metrics`. The main loop and the server of metrics share a meter.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use npl_common::stats::MappingStats;

use crate::{
    core::{
        model::Frontend,
        service_traffic::{ServicePort, ServiceTraffic},
    },
    datapath::{DatapathError, Tables},
};

/// The traffic of Services. Clones share the same traffic. While a thread holds the lock, no other thread changes
/// mappings or reads their counters, so that no count is attributed to another mapping.
#[derive(Debug, Clone)]
pub struct ServiceMeter(Arc<Mutex<ServiceTraffic>>);

impl ServiceMeter {
    /// Creates a meter of at most `max` Service ports.
    pub fn new(max: usize) -> Self {
        Self(Arc::new(Mutex::new(ServiceTraffic::new(max))))
    }

    /// Waits for the lock.
    pub(super) fn lock(&self) -> MutexGuard<'_, ServiceTraffic> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the counters of all mappings.
    pub(super) fn measure(&self, tables: &Tables) -> Result<(), DatapathError> {
        let mut traffic = self.lock();
        traffic.observe(tables.reading()?);
        Ok(())
    }

    /// Sets the Service port of each mapping. Reads the counters first if a mapping gets another one.
    pub(super) fn follow(
        &self,
        owners: BTreeMap<Frontend, Option<ServicePort>>,
        tables: &Tables,
    ) -> Result<(), DatapathError> {
        let mut traffic = self.lock();
        if traffic.changes_owner(&owners) {
            traffic.observe(tables.reading()?);
        }
        traffic.set_owners(owners);
        Ok(())
    }

    /// Reads the counters of all mappings, and returns the traffic of each Service port; `None` stands for all that
    /// have no sums of their own.
    pub(super) fn read(&self, tables: &Tables) -> Result<Vec<(Option<ServicePort>, MappingStats)>, DatapathError> {
        let mut traffic = self.lock();
        traffic.observe(tables.reading()?);
        let kept = traffic.kept().map(|(port, stats)| (Some(port.clone()), stats));
        Ok(kept.chain([(None, traffic.other())]).collect())
    }
}
