// SPDX-License-Identifier: Apache-2.0
//! Carries operations out; nothing else does. Operations on the kernel complete at once, and writes to the API server
//! when its answer arrives.

use std::{collections::BTreeMap, time::Duration};

use tracing::{debug, info};

use crate::{
    core::{
        model::{Backend, Frontend, PodKey, observed::Observed},
        op::{Op, RecentTraffic},
    },
    datapath::{Datapath, DatapathError},
    kube::{
        backoff::random_part_of,
        patch::{Class, PatchError, Patched, PodPatcher},
        writes::Writes,
    },
    nft_guard::Guard,
    sockets::{Reservations, ReserveError},
};

/// The retry delay after the first failure; it doubles up to [`LONGEST_WAIT`].
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// The minimal delay if a person has to grant a permission first.
const DENIED_WAIT: Duration = Duration::from_mins(1);

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    /// A map operation failed.
    #[error(transparent)]
    Datapath(#[from] DatapathError),
    /// A socket could not be bound.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// A patch failed.
    #[error(transparent)]
    Patch(#[from] PatchError),
    /// Clients of the port's former owner still send datagrams.
    #[error(
        "reserve node port {frontend}: it received datagrams without being mapped; it counts as unused in {wait:?} \
         at the earliest"
    )]
    RecentTraffic {
        /// The port.
        frontend: Frontend,
        /// When the port counts as unused, if no more datagrams arrive.
        wait: Duration,
    },
}

/// The result of an operation: `None` while its answer is outstanding.
pub type Outcome = Result<Option<()>, OpError>;

/// An answer of the API server to an [`Op::WritePod`].
pub type Answer = (Op, Result<Patched, PatchError>);

/// The adapters that operations are carried out with.
#[derive(Debug)]
pub struct Executor {
    /// Programs and maps.
    pub datapath: Datapath,
    reservations: Reservations,
    /// The guard follows mappings and policy routing; no operation changes its table.
    pub guard: Guard,
    writes: Writes,
    failures: BTreeMap<BackoffKey, u32>,
}

/// The subject of repeated failures, as the key of its back-off.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum BackoffKey {
    Port(Frontend),
    Pod(PodKey),
}

impl BackoffKey {
    fn of(op: &Op) -> Self {
        match op {
            Op::Reserve(frontend, _)
            | Op::AllowSources(frontend, _)
            | Op::UpsertMapping(frontend, _)
            | Op::RemoveMapping(frontend)
            | Op::ForgetSources(frontend, _)
            | Op::Release(frontend) => Self::Port(*frontend),
            Op::WritePod { pod, .. } => Self::Pod(pod.clone()),
        }
    }
}

impl Executor {
    /// An executor for an opened datapath.
    pub fn new(datapath: Datapath, patcher: PodPatcher, guard: Guard) -> Self {
        Self {
            datapath,
            reservations: Reservations::default(),
            guard,
            writes: Writes::new(patcher),
            failures: BTreeMap::new(),
        }
    }

    /// Reads the state of the kernel's maps and of the reserved sockets.
    ///
    /// # Errors
    ///
    /// If the maps cannot be read.
    pub fn observe(&mut self) -> Result<Observed, DatapathError> {
        let (mappings, sources) = (self.datapath.mappings()?, self.datapath.sources()?);
        self.guard.observe(&mappings);
        Ok(Observed { mappings, sources, reservations: self.reservations.observe() })
    }

    /// Carries operations out in their order. Consecutive mappings are written in one call.
    pub fn execute(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let runs = ops.chunk_by(|a, b| mapping(a).is_some() && mapping(b).is_some());
        runs.flat_map(|run| if let [op] = run { vec![self.execute_one(op)] } else { self.write_together(run) })
            .collect()
    }

    fn write_together(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let mappings: BTreeMap<Frontend, Backend> = ops.iter().filter_map(mapping).collect();
        let mut refused = self.datapath.upsert_mappings(&mappings);
        let outcome = |(frontend, _)| refused.remove(&frontend).map_or(Ok(Some(())), |error| Err(error.into()));
        ops.iter().filter_map(mapping).map(outcome).collect()
    }

    fn execute_one(&mut self, op: &Op) -> Outcome {
        match op {
            Op::Reserve(frontend, recent_traffic) => self.reserve(*frontend, *recent_traffic)?,
            Op::AllowSources(frontend, ranges) => self.datapath.allow_sources(*frontend, ranges)?,
            Op::UpsertMapping(frontend, backend) => self.datapath.upsert_mapping(*frontend, *backend)?,
            Op::RemoveMapping(frontend) => self.datapath.remove_mapping(*frontend)?,
            Op::ForgetSources(frontend, ranges) => self.datapath.forget_sources(*frontend, ranges)?,
            Op::Release(frontend) => self.reservations.release(*frontend),
            Op::WritePod { pod, uid, value } => {
                self.writes.push((pod.clone(), uid.clone(), value.clone()));
                return Ok(None);
            }
        }
        Ok(Some(()))
    }

    fn reserve(&mut self, frontend: Frontend, recent_traffic: RecentTraffic) -> Result<(), OpError> {
        let wait = match recent_traffic {
            RecentTraffic::Tolerated => None,
            RecentTraffic::Refused => self.datapath.time_until_quiet(frontend)?,
        };
        match wait {
            Some(wait) => Err(OpError::RecentTraffic { frontend, wait }),
            None => Ok(self.reservations.reserve(frontend)?),
        }
    }

    /// Removes the connection tracking entries of endpoints that earlier ops have removed.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn purge_flows(&mut self) -> Result<(), DatapathError> {
        self.datapath.purge_flows()
    }

    /// The next answer of the API server; pending while no write is in flight.
    pub async fn next_answer(&mut self) -> Answer {
        let ((pod, uid, value), result) = self.writes.next_answer().await;
        (Op::WritePod { pod, uid, value }, result)
    }

    /// Logs a completed operation and resets the back-off of its subject.
    pub fn record_success(&mut self, op: &Op) {
        match op {
            Op::UpsertMapping(frontend, backend) => {
                info!(%frontend, pod_ip = %backend.pod_ip, pod_port = %backend.pod_port, "mapping written");
            }
            Op::AllowSources(frontend, ranges) => info!(%frontend, ranges = ranges.len(), "allowed sources added"),
            Op::ForgetSources(frontend, ranges) => {
                info!(%frontend, ranges = ranges.len(), "allowed sources removed");
            }
            Op::RemoveMapping(frontend) => info!(%frontend, "mapping removed"),
            Op::WritePod { pod, .. } => debug!(%pod, ?op, "Pod patched"),
            Op::Reserve(frontend, _) | Op::Release(frontend) => {
                debug!(%frontend, ?op, "operation completed");
            }
        }
        self.guard.record(op);
        self.failures.remove(&BackoffKey::of(op));
    }

    /// The delay before a retry, longer after each failure.
    pub fn back_off(&mut self, op: &Op, error: &OpError) -> Duration {
        let failures = self.failures.entry(BackoffKey::of(op)).or_insert(0);
        *failures = failures.saturating_add(1);
        let at_least = match error {
            OpError::Patch(error) => match error.class() {
                Class::Denied => DENIED_WAIT,
                Class::Retry { after } => after.unwrap_or_default(),
                Class::Gone => Duration::ZERO,
            },
            OpError::Datapath(_) | OpError::Reserve(_) | OpError::RecentTraffic { .. } => Duration::ZERO,
        };
        wait(*failures, at_least)
    }
}

/// The mapping that an op writes.
const fn mapping(op: &Op) -> Option<(Frontend, Backend)> {
    if let Op::UpsertMapping(frontend, backend) = op { Some((*frontend, *backend)) } else { None }
}

/// Half of the delay is random: an API server that rejects half of forty simultaneous patches would reject half of
/// simultaneous retries.
fn wait(failures: u32, at_least: Duration) -> Duration {
    let doubled = FIRST_WAIT.saturating_mul(1 << failures.saturating_sub(1).min(10)).min(LONGEST_WAIT);
    let shortest = doubled.max(at_least);
    shortest + random_part_of(shortest / 2)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, time::Duration};

    use super::{DENIED_WAIT, FIRST_WAIT, LONGEST_WAIT, wait};

    #[test]
    fn waits_double_up_to_the_longest_and_are_never_shorter_than_asked_for() {
        for (failures, shortest) in [(1, FIRST_WAIT), (2, 2 * FIRST_WAIT), (20, LONGEST_WAIT), (u32::MAX, LONGEST_WAIT)]
        {
            let wait = wait(failures, Duration::ZERO);
            assert!(wait >= shortest && wait <= shortest * 3 / 2, "{failures}: {wait:?}");
        }
        assert!(wait(1, DENIED_WAIT) >= DENIED_WAIT);
    }

    #[test]
    fn simultaneous_failures_are_retried_at_different_times() {
        let waits: BTreeSet<Duration> = (0..40).map(|_| wait(1, Duration::from_secs(1))).collect();
        assert!(waits.len() > 20, "{waits:?}");
    }
}
