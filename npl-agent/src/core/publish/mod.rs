// SPDX-License-Identifier: Apache-2.0
//! The texts that users and load balancers read: the annotation of a Pod, problems, and their Events.

pub mod annotation;
pub mod delays;
pub mod event_reason;
pub mod problem;
pub mod report;
