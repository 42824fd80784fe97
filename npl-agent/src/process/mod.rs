// SPDX-License-Identifier: Apache-2.0
//! The agent's own process: limit of open files, heap, logging, and the lock against a second agent.

pub mod error_chain;
pub mod limits;
pub mod lock;
pub mod memory;
pub mod telemetry;
