// SPDX-License-Identifier: Apache-2.0
//! Carries ops out; the only place that does. What the kernel does at once is done at once; what the API server is
//! asked for is under way until its answer comes back.

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

/// The first wait after a failure; it doubles up to [`LONGEST_WAIT`].
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// What a person has to change is not asked for more often.
const DENIED_WAIT: Duration = Duration::from_mins(1);

/// Why an op was not done.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    /// In the kernel's maps.
    #[error(transparent)]
    Datapath(#[from] DatapathError),
    /// At a socket.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// At the API server.
    #[error(transparent)]
    Patch(#[from] PatchError),
    /// Somebody talks to whoever had the port before.
    #[error(
        "reserve node port {frontend}: it received datagrams without being mapped; it counts as unused in {wait:?} \
         at the earliest"
    )]
    RecentTraffic {
        /// The port.
        frontend: Frontend,
        /// After what time it counts as silent, if it is from now on.
        wait: Duration,
    },
}

/// What came of an op: nothing yet, if its answer is still to come.
pub type Outcome = Result<Option<()>, OpError>;

/// An answer of the API server to an [`Op::WritePod`].
pub type Answer = (Op, Result<Patched, PatchError>);

/// What ops are carried out on.
#[derive(Debug)]
pub struct Executor {
    /// Programs and maps.
    pub datapath: Datapath,
    reservations: Reservations,
    /// Its table follows mappings, rules and routes, not ops.
    pub guard: Guard,
    writes: Writes,
    failures: BTreeMap<BackoffKey, u32>,
}

/// What fails again and again, for its back-off.
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
    /// An executor over an opened datapath.
    pub fn new(datapath: Datapath, patcher: PodPatcher, guard: Guard) -> Self {
        Self {
            datapath,
            reservations: Reservations::default(),
            guard,
            writes: Writes::new(patcher),
            failures: BTreeMap::new(),
        }
    }

    /// What the kernel and the sockets hold now.
    ///
    /// # Errors
    ///
    /// If the maps cannot be read.
    pub fn observe(&mut self) -> Result<Observed, DatapathError> {
        let (mappings, sources) = (self.datapath.mappings()?, self.datapath.sources()?);
        self.guard.observe(&mappings);
        Ok(Observed { mappings, sources, reservations: self.reservations.observe() })
    }

    /// Carries out ops in their order. Mappings that follow each other are written together.
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

    /// The next answer of the API server; waits for ever while nothing is under way.
    pub async fn next_answer(&mut self) -> Answer {
        let ((pod, uid, value), result) = self.writes.next_answer().await;
        (Op::WritePod { pod, uid, value }, result)
    }

    /// Tells of an op that was carried out, and forgets what its subject failed with before.
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

    /// How long to wait before the op is tried again, longer each time.
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

/// What failed together is tried again one by one: an API server that refuses half of forty patches because they come
/// at once would refuse half of them again.
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
