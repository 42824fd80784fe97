// SPDX-License-Identifier: Apache-2.0
//! The only ways to change the world. The executor is the only place that carries one out.

use std::collections::BTreeSet;

use super::model::{Backend, Frontend, Moment, PodKey, PodUid, sources::SourceRange};

/// One step. Every op is idempotent: done twice, it does nothing the second time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Bind the port's socket so that no other process takes it.
    Reserve(Frontend, RecentTraffic),
    /// Let these use the mapping, if it is a restricted one; nobody else is let in or shut out.
    AllowSources(Frontend, BTreeSet<SourceRange>),
    /// Write the mapping; an existing one of the same frontend is replaced at once.
    UpsertMapping(Frontend, Backend),
    /// Patch the Pod.
    WritePod {
        /// The Pod.
        pod: PodKey,
        /// A Pod of the same name with another uid is left alone.
        uid: PodUid,
        /// What to write.
        value: PodWrite,
    },
    /// Delete the mapping and forget the flows of its endpoint.
    RemoveMapping(Frontend),
    /// Let these not use the mapping any more.
    ForgetSources(Frontend, BTreeSet<SourceRange>),
    /// Close the port's socket.
    Release(Frontend),
}

/// Whether a port is taken to which datagrams have come lately although it led nowhere: see [`npl_common::unmapped`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RecentTraffic {
    /// It leads somewhere already, or no other port is free.
    Tolerated,
    /// Another one is to be chosen.
    Refused,
}

/// What happens to a Pod's annotation, or to the condition that its readiness waits for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum PodWrite {
    /// Set to this value.
    Set(String),
    /// Set to `[]`, so that consumers which ignore a missing key see the change, then remove the key (contract C-12).
    Withdraw,
    /// Let the Pod become ready: all that it is to be reached by is published.
    OpenGate,
}

/// Why an op could not be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// Of [`Op::Reserve`]: another process has the port. Another one is chosen.
    PortTaken,
    /// Of [`RecentTraffic::Refused`]: somebody talks to whoever had the port before. Another one is chosen, if there is one.
    RecentTraffic {
        /// When it counts as silent, if it is from now on.
        until: Moment,
    },
    /// Of [`Op::AllowSources`]: the kernel has no room for more. It is tried again when there may be.
    NoRoom {
        /// Or else not before this moment.
        at: Moment,
    },
    /// It may work later.
    Retry {
        /// Not before this moment.
        at: Moment,
    },
    /// Of [`Op::WritePod`]: there is no such Pod; the watcher will say so.
    Gone,
}

/// An op for the purpose of trying again: what it is about, not what it says.
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
    /// The place of the op in a pass. After any prefix of a pass that is ordered so, no annotation names a mapping that the
    /// datapath lacks, and no mapping lacks its reservation or its allowed sources.
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
