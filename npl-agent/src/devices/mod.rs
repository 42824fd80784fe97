// SPDX-License-Identifier: Apache-2.0
//! Applies device decisions: attaches the programs to network devices and to the cgroup of local clients, and follows the
//! policy routes that lead replies back.

pub mod local_clients;
pub mod reply_routing;
pub mod uplinks;
