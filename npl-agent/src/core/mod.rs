// SPDX-License-Identifier: Apache-2.0
//! Pure decisions: what should exist, and in which order to get there.
//!
//! No I/O, no clock, no randomness, no logging; the same input gives the same output, whatever the order of events.
//!
//! ```text
//! Change ──► Snapshot ──► desired(snapshot, ports, settings, now) ──► Desired ─┐
//!                                                                             ├─► plan ──► Vec<Op> ──► executor
//!                                             kernel, sockets, annotations ──► Observed ─┘
//! ```

mod adopt;
pub mod annotation;
mod assign;
pub mod devices;
pub mod model;
pub mod op;
mod plan;
pub mod ports;
pub mod problem;
mod publish;
pub mod select;
pub mod settings;
pub mod snapshot;
pub mod state;

#[cfg(test)]
mod tests;
