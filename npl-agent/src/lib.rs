// SPDX-License-Identifier: Apache-2.0
//! The NodePortLocal agent: watches the cluster, decides in [`core`], acts on the kernel, and publishes last.
//!
//! ```text
//! kube ──► Change ──► reconciler ──► core ──► Op ──► executor ──► datapath, sockets, guard, kube
//! netlink ──────────────┘ uplinks ───────────────────────────────► datapath
//! ```

pub mod args;
pub mod cli;
pub mod clients;
pub mod config;
pub mod core;
pub mod datapath;
pub mod executor;
pub mod facts;
pub mod guard;
pub mod http;
pub mod kube;
pub mod limits;
pub mod lock;
pub mod memory;
pub mod metrics;
pub mod netlink;
pub mod reconciler;
pub mod returns;
pub mod run;
pub mod sockets;
pub mod sweeper;
pub mod telemetry;
mod told;
pub mod uplinks;
