// SPDX-License-Identifier: Apache-2.0
//! The feed watches Pods, Services and Nodes, computes the members of each Service port in [`core`], and serves the
//! members to any load balancer by xDS, DNS and HTTP. The feed writes nothing to the API server.
//!
//! ```text
//! kube ──► Change ──► follow ──► core ──► Snapshot ──► xds, dns, http
//! ```

pub mod access;
pub mod client_memory;
pub mod config;
pub mod connection_limits;
pub mod core;
pub mod dns;
pub mod follow;
pub mod http;
pub mod kube;
pub mod listen;
#[cfg(test)]
mod panics;
pub mod run;
mod stall;
pub mod status;
pub mod xds;
