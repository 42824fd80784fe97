// SPDX-License-Identifier: Apache-2.0
//! The process itself: its limits, memory, log and lock.

pub mod error_chain;
pub mod limits;
pub mod lock;
pub mod memory;
pub mod telemetry;
