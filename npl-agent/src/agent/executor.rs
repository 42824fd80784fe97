// SPDX-License-Identifier: Apache-2.0
//! Carries operations out; nothing else does. Operations on the kernel complete at once, and writes to the API server
//! when its answer arrives.

use std::{collections::BTreeMap, time::Duration};

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use tracing::{debug, info};

use crate::{
    core::{
        model::{Backend, Frontend, PodKey, observed::Observed},
        op::{Op, RecentTraffic},
        state::State,
    },
    datapath::{Datapath, DatapathError},
    kube::{
        patch::{Class, PatchError, Patched, PodPatcher},
        writes::Writes,
    },
    nft_guard::Guard,
    sockets::{Reservations, ReserveError},
};

/// The delay after the first failure; it doubles up to [`LONGEST_WAIT`].
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// The shortest delay after a denial, which lasts until a person changes permissions.
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
    /// Clients of the port's former owner still send to it.
    #[error(
        "reserve node port {frontend}: it received packets without being mapped; it counts as unused in {wait:?} at \
         the earliest"
    )]
    RecentTraffic {
        /// The port.
        frontend: Frontend,
        /// When the port counts as unused, if no more packets arrive.
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
    failures: BTreeMap<BackoffKey, ExponentialBackoff>,
}

/// Each has a back-off of its own.
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

    /// The number of writes to the API server without an answer.
    pub fn pending_writes(&self) -> usize {
        self.writes.pending()
    }

    /// Logs a completed operation with the Pod of its node port, and resets the back-off of its subject.
    pub fn record_success(&mut self, op: &Op, state: &State) {
        let pod_of = |frontend: &Frontend| state.pod_of(*frontend).map(tracing::field::display);
        match op {
            Op::UpsertMapping(frontend, Backend { pod_ip, pod_port, .. }) => {
                info!(%frontend, pod = pod_of(frontend), %pod_ip, %pod_port, "mapping written");
            }
            Op::AllowSources(frontend, ranges) => {
                info!(%frontend, pod = pod_of(frontend), ranges = ranges.len(), "allowed sources added");
            }
            Op::ForgetSources(frontend, ranges) => {
                info!(%frontend, pod = pod_of(frontend), ranges = ranges.len(), "allowed sources removed");
            }
            Op::RemoveMapping(frontend) => info!(%frontend, pod = pod_of(frontend), "mapping removed"),
            Op::WritePod { pod, .. } => debug!(%pod, ?op, "Pod patched"),
            Op::Reserve(frontend, _) | Op::Release(frontend) => {
                debug!(%frontend, ?op, "operation completed");
            }
        }
        self.guard.record(op);
        self.failures.remove(&BackoffKey::of(op));
    }

    /// The delay before the op is retried, which grows with each failure.
    pub fn back_off(&mut self, op: &Op, error: &OpError) -> Duration {
        let delays = self.failures.entry(BackoffKey::of(op)).or_insert_with(delays);
        let at_least = match error {
            OpError::Patch(error) => match error.class() {
                Class::Denied => DENIED_WAIT,
                Class::Retry { after } => after.unwrap_or_default(),
                Class::Gone => Duration::ZERO,
            },
            OpError::Datapath(_) | OpError::Reserve(_) | OpError::RecentTraffic { .. } => Duration::ZERO,
        };
        wait(delays, at_least)
    }
}

/// The mapping that an op writes.
const fn mapping(op: &Op) -> Option<(Frontend, Backend)> {
    if let Op::UpsertMapping(frontend, backend) = op { Some((*frontend, *backend)) } else { None }
}

fn delays() -> ExponentialBackoff {
    ExponentialBuilder::new().with_min_delay(FIRST_WAIT).with_max_delay(LONGEST_WAIT).without_max_times().build()
}

/// The next delay, but at least `at_least`, and a random part. An API server that refuses half of forty simultaneous
/// patches would refuse half of their simultaneous retries. Not backon's jitter, which would not apply to `at_least`.
fn wait(delays: &mut ExponentialBackoff, at_least: Duration) -> Duration {
    let shortest = delays.next().unwrap_or(LONGEST_WAIT).max(at_least);
    shortest + shortest.mul_f32(fastrand::f32() / 2.0)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, time::Duration};

    use super::{DENIED_WAIT, FIRST_WAIT, LONGEST_WAIT, delays, wait};

    #[test]
    fn waits_double_up_to_the_longest_and_are_never_shorter_than_asked_for() {
        for (failures, shortest) in [(1, FIRST_WAIT), (2, 2 * FIRST_WAIT), (20, LONGEST_WAIT), (10_000, LONGEST_WAIT)] {
            let mut delays = delays();
            assert_eq!(delays.by_ref().take(failures - 1).count(), failures - 1);
            let wait = wait(&mut delays, Duration::ZERO);
            assert!(wait >= shortest && wait <= shortest * 3 / 2, "{failures}: {wait:?}");
        }
        assert!(wait(&mut delays(), DENIED_WAIT) >= DENIED_WAIT);
    }

    #[test]
    fn simultaneous_failures_are_retried_at_different_times() {
        let waits: BTreeSet<Duration> = (0..40).map(|_| wait(&mut delays(), Duration::from_secs(1))).collect();
        assert!(waits.len() > 20, "{waits:?}");
    }
}
