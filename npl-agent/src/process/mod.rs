// SPDX-License-Identifier: Apache-2.0
//! The agent's own process: the limit of open files, the heap, the SELinux type, logging, and the lock that excludes a
//! second agent.

pub mod error_chain;
pub mod limits;
pub mod lock;
pub mod memory;
pub mod selinux;
pub mod telemetry;
