// SPDX-License-Identifier: Apache-2.0
//! The running agent: the main loop that owns all state, the executor of operations, the sweeper of expired connection
//! tracking entries, and the change log.

pub mod change_log;
pub mod executor;
pub mod introspection;
pub mod reconciler;
pub mod retry_delays;
pub mod run;
pub mod service_meter;
pub mod sweeper;
