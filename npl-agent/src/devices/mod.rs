// SPDX-License-Identifier: Apache-2.0
//! Carries out the decisions of the device planner: attaches TC and XDP programs to network devices. Also attaches the
//! socket programs to the cgroup of the local clients.

pub mod apply;
pub mod local_clients;
pub mod uplinks;
