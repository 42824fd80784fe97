// SPDX-License-Identifier: Apache-2.0
//! The API server: what the agent reads from it, the one thing that it writes, and what it tells users.
//!
//! ```text
//! watch ──► objects ──► convert ──► Change ──► (owner task) ──► PodWrite ──► patch ──► Pod
//!                                                   └─────────► Problem ──► events ──► Event
//! ```
//!
//! Nothing here decides anything, and nothing here ends the agent because the API server is away: the watches go on
//! trying, and the last known state goes on being served.

pub mod backoff;
pub mod client;
pub mod convert;
pub mod events;
pub mod failure;
mod limit;
pub mod objects;
pub mod patch;
pub mod watch;

pub use convert::AnnotationKeys;

#[cfg(test)]
mod mock;
