// SPDX-License-Identifier: Apache-2.0
//! Computes the desired state, and the order of the operations that establish the desired state.
//!
//! The core does no I/O, reads no clock, uses no random numbers and writes no log. The same input gives the same
//! output, regardless of the order in which changes arrive.
//!
//! ```text
//! Change ─► snapshot ─► select ─► assign ─► port table ─┐
//!                                                       ├─► plan, publication ─► Pass ─► executor ─┐
//!               observed kernel, sockets, annotations ──┘                                          │
//!                      ▲                            done, failed                                   │
//!                      └───────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! A node port is claimed, reserved, mapped and published, then withdrawn, drained, unmapped, quarantined and released.
//! Every mapping that an annotation names exists, with three exceptions: Pods that have finished, Pods that have lost
//! their address, and Pods whose address another Pod claims with precedence. A mapping of one of these Pods could point
//! to the address of another Pod. So the agent removes the mapping in the pass that withdraws the annotation, without
//! waiting for the API server's answer.
//!
//! A mapping's allowed sources are written to the kernel before the mapping is restricted. An allowed source is removed
//! from the kernel only after the restriction has ended, or when no Service's list contains the source any more.

pub mod certificate;
pub mod check;
pub mod cleanup;
pub mod devices;
pub mod doctor;
pub mod flows;
pub mod kernel_floor;
pub mod members;
pub mod model;
pub mod networks;
pub mod op;
pub mod packet_trace;
pub mod pages;
pub mod path_test;
pub mod ports;
pub mod publish;
pub mod repairs;
pub mod service_traffic;
pub mod sizes;
pub mod state;
pub mod verdict;
pub mod view;
pub mod why;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod tests;
