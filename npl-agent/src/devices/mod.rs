// SPDX-License-Identifier: Apache-2.0
//! Carries out the decisions of the device planner: attaches TC and XDP programs to network devices, and the socket
//! programs to the cgroup that contains local clients.

pub mod apply;
pub mod local_clients;
pub mod uplinks;
