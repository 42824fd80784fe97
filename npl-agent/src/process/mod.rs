// SPDX-License-Identifier: Apache-2.0
//! The agent's own process: limit of open files, heap, SELinux type, logging, and the lock against a second agent.

pub mod error_chain;
pub mod limits;
pub mod lock;
pub mod memory;
pub mod selinux;
pub mod telemetry;
