// SPDX-License-Identifier: Apache-2.0
//! The texts that users and load balancers read: annotations of Pods, problems, and the Events about problems.

pub mod annotation;
pub mod delays;
pub mod event_reason;
pub mod problem;
pub mod report;
pub mod request_problem;
