// SPDX-License-Identifier: Apache-2.0
//! The running agent: the main loop that owns all state, and the parts that the loop uses, such as the executor of
//! operations and the change log. The sweeper removes expired conntrack entries in a thread of its own.

pub mod change_log;
pub mod executor;
pub mod introspection;
pub mod reconciler;
pub mod retry_delays;
pub mod run;
pub mod service_meter;
pub mod sweeper;
