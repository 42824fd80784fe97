// SPDX-License-Identifier: Apache-2.0
//! The only ways to change the world. The executor is the only place that carries one out.

use super::model::{Backend, Frontend, PodKey, PodUid};

/// One step. Every op is idempotent: done twice, it does nothing the second time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Op {
    /// Bind the port's socket so that no other process takes it.
    Reserve(Frontend),
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
    /// Close the port's socket.
    Release(Frontend),
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
