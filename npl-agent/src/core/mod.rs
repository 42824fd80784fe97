// SPDX-License-Identifier: Apache-2.0
//! Pure decisions: what should exist, and in which order to get there.
//!
//! No I/O, no clock, no randomness, no logging; the same input gives the same output, whatever the order of events.
//!
//! ```text
//! Change ─► snapshot ─► select ─► assign ─► port table ─┐
//!                                                       ├─► plan, publish ─► Pass ─► the executor ─┐
//!                kernel, sockets, annotations as seen ──┘                                          │
//!                      ▲                            done, failed                                   │
//!                      └───────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! A node port's life: claimed and reserved, mapped, published; then withdrawn, drained, unmapped, kept in quarantine,
//! released. An annotation never names a mapping that is not there, with three exceptions, each because the mapping
//! would lead to a stranger: the Pod has finished, has lost its address, or shares it with a Pod that has the better
//! claim. Those mappings go at once, and the annotation right after.
//!
//! Who may use a mapping is in the kernel before the mapping asks for it, and for as long as it does.

pub mod devices;
pub mod doctor;
pub mod flows;
pub mod model;
pub mod op;
pub mod ports;
pub mod publish;
pub mod state;

#[cfg(test)]
mod tests;
