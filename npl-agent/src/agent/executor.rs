// SPDX-License-Identifier: Apache-2.0
//! The only code that executes operations. Operations on the kernel complete immediately; writes to the API server
//! complete when the API server's answer arrives.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tracing::{debug, info, warn};

use crate::{
    agent::retry_delays::{RetryAdvice, RetryDelays},
    core::{
        model::{Backend, Frontend, PodUid, observed::Observed, settings::PortRange},
        op::{Op, RecentTraffic},
        pages,
        state::PlannerState,
    },
    datapath::{Datapath, DatapathError},
    kube::{
        patch::{Class, PatchError, Patched, PodPatcher},
        writes::Writes,
    },
    nft_guard::{Guard, translated_connections},
    process::error_chain::ErrorChain,
    sockets::{Reservations, ReserveError},
};

/// Why an [`Op`] that the core has planned failed.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    /// An operation on a BPF map failed.
    #[error(transparent)]
    Datapath(#[from] DatapathError),
    /// The socket that reserves the node port could not be bound.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// The patch of a Pod failed.
    #[error(transparent)]
    Patch(#[from] PatchError),
    /// Within about the last two minutes, a packet arrived at this unmapped node port, or the port's mapping was
    /// removed, so clients may still use the port for an earlier Pod.
    #[error(
        "reserve node port {frontend}: a short time ago, a packet arrived at this unmapped port, or the port's mapping \
         was removed; the port counts as unused in {wait:?} at the earliest"
    )]
    RecentTraffic {
        /// The node port that was not reserved.
        frontend: Frontend,
        /// The remaining time without packets after which the port counts as unused.
        wait: Duration,
    },
}

/// The result of an operation; `Ok(None)` for a write that the API server has not answered yet.
pub type OpResult = Result<Option<()>, OpError>;

/// An answer of the API server to an [`Op::WritePod`].
pub type PatchAnswer = (Op, Result<Patched, PatchError>);

/// The adapters that execute operations.
#[derive(Debug)]
pub struct Executor {
    /// The kernel programs and their maps.
    pub datapath: Datapath,
    reservations: Reservations,
    /// The handle of the worker that maintains NPL's nftables table. The worker, not an operation, updates the table
    /// when mappings or policy routing change.
    pub guard: Guard,
    writes: Writes,
    delays: RetryDelays,
    /// The node port range; `None` after this agent has written its first mappings. Before and after the agent writes
    /// these mappings, the agent records the connections to ports of the range that other software translates.
    unread_range: Option<PortRange>,
}

impl Executor {
    /// Creates an executor for an open datapath.
    pub fn new(datapath: Datapath, patcher: PodPatcher, guard: Guard, range: PortRange) -> Self {
        Self {
            unread_range: Some(range),
            datapath,
            reservations: Reservations::default(),
            guard,
            writes: Writes::new(patcher),
            delays: RetryDelays::default(),
        }
    }

    /// Reads the mappings in the kernel's maps, and the node ports that sockets reserve.
    ///
    /// # Errors
    ///
    /// If the maps cannot be read.
    pub fn observe(&mut self) -> Result<Observed, DatapathError> {
        let (mappings, sources) = (self.datapath.mappings()?, self.datapath.sources()?);
        self.guard.observe(&mappings);
        Ok(Observed { mappings, sources, reservations: self.reservations.observe() })
    }

    /// Executes operations in the given order. Consecutive ops that write mappings are combined in one call.
    ///
    /// Before and after this agent writes its first mappings, the connections that other software translates are
    /// recorded: see [`Self::leave_translated_connections`].
    pub fn execute(&mut self, ops: &[Op]) -> Vec<OpResult> {
        let first_mappings = if ops.iter().any(|op| mapping(op).is_some()) { self.unread_range.take() } else { None };
        if let Some(range) = first_mappings {
            self.leave_translated_connections(range);
        }
        let runs = ops.chunk_by(|a, b| mapping(a).is_some() && mapping(b).is_some());
        let outcomes = runs
            .flat_map(|run| if let [op] = run { vec![self.execute_one(op)] } else { self.write_together(run) })
            .collect();
        if let Some(range) = first_mappings {
            // The connections are recorded again, because a further handshake may have begun between the first reading
            // and the writing of the mappings.
            self.leave_translated_connections(range);
        }
        outcomes
    }

    /// Records the connections that rules of other software, such as Antrea's, translate, so that NPL does not
    /// translate them. Without the records, NPL would translate the next packet of such a connection before kernel
    /// conntrack sees the packet. Kernel conntrack would then see a second connection with the same reply tuple, and
    /// change the client port of the packet, so that the Pod would reset the connection.
    ///
    /// Until the mappings are written, the attached programs record each further connection themselves, when its first
    /// reply leaves the Node from the node port. An error affects only connections that other software translates, so
    /// the agent logs the error and continues.
    fn leave_translated_connections(&self, range: PortRange) {
        match translated_connections(range) {
            Ok(connections) if connections.is_empty() => {}
            Ok(connections) => match self.datapath.leave_to_host(&connections) {
                Ok(()) => info!(
                    connections = connections.len(),
                    "rules of other software translate connections to node ports; kernel conntrack continues to \
                     translate these connections until they end"
                ),
                Err(err) => {
                    warn!(
                        see = pages::url(pages::BOTH_AGENTS),
                        err = %ErrorChain(&err),
                        "cannot record the connections that other software translates: NPL may translate their next packets, \
                         and Pods then reset these connections"
                    );
                }
            },
            Err(err) => {
                warn!(
                    see = pages::url(pages::BOTH_AGENTS),
                    err = %ErrorChain(&err),
                    "cannot read the connections that other software translates: NPL may translate their next packets, and \
                     Pods then reset these connections"
                );
            }
        }
    }

    fn write_together(&mut self, ops: &[Op]) -> Vec<OpResult> {
        let mappings: BTreeMap<Frontend, Backend> = ops.iter().filter_map(mapping).collect();
        let mut refused = self.datapath.upsert_mappings(&mappings);
        let outcome = |(frontend, _)| refused.remove(&frontend).map_or(Ok(Some(())), |error| Err(error.into()));
        ops.iter().filter_map(mapping).map(outcome).collect()
    }

    fn execute_one(&mut self, op: &Op) -> OpResult {
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

    /// Removes NPL's conntrack entries of Pod endpoints whose mappings earlier ops have removed. Returns the numbers of
    /// removed entries for IPv4 and for IPv6.
    ///
    /// # Errors
    ///
    /// If a BPF map operation fails.
    pub fn purge_flows(&mut self) -> Result<[usize; 2], DatapathError> {
        self.datapath.purge_flows()
    }

    /// Waits for the API server's next answer to a write. While no write is in flight, the future stays pending.
    pub async fn next_answer(&mut self) -> PatchAnswer {
        let ((pod, uid, value), result) = self.writes.next_answer().await;
        (Op::WritePod { pod, uid, value }, result)
    }

    /// The number of writes that the API server has not answered yet.
    pub fn pending_writes(&self) -> usize {
        self.writes.pending()
    }

    /// Logs a completed operation with the Pod to which the operation's node port belongs. Resets the back-off of the
    /// port or Pod that the operation changed.
    pub fn record_success(&mut self, op: &Op, state: &PlannerState) {
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
        self.delays.reset(op);
    }

    /// Counts a failure of the op, and returns the delay before the agent retries the op. The delay grows with each
    /// consecutive failure, and is zero if the Pod no longer exists.
    pub fn back_off(&mut self, op: &Op, error: &OpError) -> Duration {
        let advice = match error {
            OpError::Patch(error) => match error.class() {
                Class::Denied => RetryAdvice::Denied,
                Class::Retry { after } => after.map_or(RetryAdvice::None, RetryAdvice::NotBefore),
                Class::Gone => {
                    self.delays.reset(op);
                    return Duration::ZERO;
                }
            },
            OpError::Datapath(_) | OpError::Reserve(_) | OpError::RecentTraffic { .. } => RetryAdvice::None,
        };
        self.delays.after_failure(op, advice)
    }

    /// Drops the failure counts of Pods that `known` does not contain, because these Pods were deleted.
    pub fn forget_other_pods(&mut self, known: impl FnOnce() -> BTreeSet<PodUid>) {
        if !self.delays.is_empty() {
            self.delays.retain_pods(&known());
        }
    }
}

/// The mapping that an op writes; `None` if the op writes no mapping.
const fn mapping(op: &Op) -> Option<(Frontend, Backend)> {
    if let Op::UpsertMapping(frontend, backend) = op { Some((*frontend, *backend)) } else { None }
}
