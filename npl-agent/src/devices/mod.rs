// SPDX-License-Identifier: Apache-2.0
//! Applies device decisions: attaches the programs to network devices, and to the cgroup of local clients.

pub mod apply;
pub mod local_clients;
pub mod uplinks;
