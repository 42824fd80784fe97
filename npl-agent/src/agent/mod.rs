// SPDX-License-Identifier: Apache-2.0
//! The running agent: the loop that owns all state, the executor of its ops, the sweeper of ended connections, and the
//! change log.

pub mod change_log;
pub mod executor;
pub mod reconciler;
pub mod run;
pub mod sweeper;
