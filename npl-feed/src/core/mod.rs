// SPDX-License-Identifier: Apache-2.0
//! Decides the members of each Service port from Pods, Services and Nodes.
//!
//! The core does no I/O, reads no clock and writes no log. The same objects result in the same [`snapshot::Snapshot`]
//! with the same version, regardless of the order in which the objects arrive. Therefore, all replicas serve the same
//! versions, and the feed does not send an unchanged snapshot again.

mod draining;
pub mod entries;
pub mod members;
pub mod model;
pub mod snapshot;
pub mod state;
pub(crate) mod work;

#[cfg(test)]
pub(crate) mod tests;
