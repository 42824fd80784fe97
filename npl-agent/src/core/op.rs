// SPDX-License-Identifier: Apache-2.0
//! The operations by which the agent changes mappings, allowed sources, reservations and Pods. Only the executor
//! executes operations.

use std::collections::BTreeSet;

use super::model::{Backend, Frontend, Moment, PodKey, PodUid, sources::SourceRange};

/// One operation that a pass plans. Every operation is idempotent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Bind a socket to the node port, so that no other process can use the port.
    Reserve(Frontend, RecentTraffic),
    /// Add these sources to the allowed sources of the mapping. The added sources take effect only if the mapping is
    /// restricted.
    AllowSources(Frontend, BTreeSet<SourceRange>),
    /// Write the mapping. If the frontend has a mapping, the new mapping atomically replaces the old mapping.
    UpsertMapping(Frontend, Backend),
    /// Patch the Pod's annotation or readiness condition.
    WritePod {
        /// The Pod that is patched.
        pod: PodKey,
        /// The Pod's uid; a Pod of the same name with another uid is not patched.
        uid: PodUid,
        /// The change of the Pod's annotation or condition.
        value: PodWrite,
    },
    /// Delete the mapping. If no other mapping has the same endpoint, the executor later deletes the conntrack entries
    /// of the endpoint.
    RemoveMapping(Frontend),
    /// Remove these sources from the allowed sources of the mapping.
    ForgetSources(Frontend, BTreeSet<SourceRange>),
    /// Close the socket that reserves the node port.
    Release(Frontend),
}

/// Whether to reserve a node port that received packets recently while it had no mapping: see [`npl_common::unmapped`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RecentTraffic {
    /// Reserve the node port in spite of the traffic: its mapping exists already and is kept, or no other port is free.
    Tolerated,
    /// Do not reserve the node port if the port received packets recently. The Pod then gets another port.
    Refused,
}

/// A change of a Pod's annotation, or of the Pod condition that the readiness gate waits for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum PodWrite {
    /// Set the annotation to this value.
    Set(String),
    /// Set the annotation to `[]`, then remove the annotation: some load balancers do not notice a removed annotation
    /// (contract C-12 in `docs/antrea-compatibility.md`).
    Withdraw,
    /// Set the readiness gate's condition to true.
    OpenGate(GateReason),
}

/// The reason why the readiness gate of a Pod opens, which is also the `reason` of the Pod's condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum GateReason {
    /// All node ports of the Pod are published.
    Published,
    /// No Service requests node ports for the Pod, or no requested node port can be served.
    NoNodePorts,
    /// Some or all of the requested node ports are published. For each port that is not published, or not served as
    /// requested, an Event states why.
    PartlyPublished,
}

impl GateReason {
    /// The text in the condition's field `reason`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Published => "Published",
            Self::NoNodePorts => "NoNodePorts",
            Self::PartlyPublished => "PartlyPublished",
        }
    }

    /// The text in the condition's field `message`.
    pub const fn message(self) -> &'static str {
        match self {
            Self::Published => "all node ports of the Pod are published in its annotation",
            Self::NoNodePorts => {
                "the Pod's containers are ready, and the Pod has no node ports: no enabled Service selects the Pod, or \
                 an Event states why its ports are not served"
            }
            Self::PartlyPublished => {
                "the Pod's containers are ready, and its node ports are published, except those for which an Event \
                 states why they are not served"
            }
        }
    }
}

/// The reason why an operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// For [`Op::Reserve`]: another process uses the node port. The Pod gets another node port.
    PortTaken,
    /// For [`RecentTraffic::Refused`]: the port is not reserved, because a packet arrived at the unmapped port, or the
    /// port's mapping was removed, a short time ago. The Pod gets another port, if another port is free.
    RecentTraffic {
        /// The time from which the port counts as unused if no more packets arrive.
        until: Moment,
    },
    /// For [`Op::AllowSources`]: the kernel's map is full. The operation is retried when sources are removed from the
    /// map, or at the time `at`.
    NoRoom {
        /// The time of the retry if no sources are removed before.
        at: Moment,
    },
    /// A failure of any operation for which a retry may succeed.
    Retry {
        /// The earliest time at which the operation is retried.
        at: Moment,
    },
    /// For [`Op::WritePod`]: the Pod does not exist. The watch will report the Pod's deletion.
    Gone,
}

/// The key under which the retry delay of an operation is stored: the kind of the operation and the object that the
/// operation changes, but not the values that the operation writes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RetryKey {
    Reserve(Frontend),
    AllowSources(Frontend),
    Upsert(Frontend),
    WritePod(PodUid),
    Remove(Frontend),
    ForgetSources(Frontend),
    Release(Frontend),
}

impl Op {
    /// The position of this kind of operation in a pass. Because of this order, the agent can stop after any operation:
    /// every mapping that a published annotation names then exists in the datapath (exceptions: invariant 4 in
    /// ARCHITECTURE.md), with its reservation and its allowed sources.
    pub const fn rank(&self) -> u8 {
        match self {
            Self::Reserve(..) => 0,
            Self::AllowSources(..) => 1,
            Self::UpsertMapping(..) => 2,
            Self::WritePod { .. } => 3,
            Self::RemoveMapping(_) => 4,
            Self::ForgetSources(..) => 5,
            Self::Release(_) => 6,
        }
    }
}

impl RetryKey {
    pub(super) fn of(op: &Op) -> Self {
        match op {
            Op::Reserve(frontend, _) => Self::Reserve(*frontend),
            Op::AllowSources(frontend, _) => Self::AllowSources(*frontend),
            Op::UpsertMapping(frontend, _) => Self::Upsert(*frontend),
            Op::WritePod { uid, .. } => Self::WritePod(uid.clone()),
            Op::RemoveMapping(frontend) => Self::Remove(*frontend),
            Op::ForgetSources(frontend, _) => Self::ForgetSources(*frontend),
            Op::Release(frontend) => Self::Release(*frontend),
        }
    }
}
