// SPDX-License-Identifier: Apache-2.0
//! The `NodePortLocal` agent. The agent watches the cluster, decides in [`core`], and applies the decisions to the
//! kernel. The agent writes the annotations last, so that load balancers do not read a mapping that the datapath does
//! not have yet.
//!
//! ```text
//! kube ──► Change ──► agent::reconciler ──► core ──► Op ──► agent::executor ──► datapath, sockets, nft_guard, kube
//! netlink ─────────────────┘ devices ──────────────────────────────────────────► datapath
//! ```

pub mod agent;
pub mod cli;
pub mod config;
pub mod core;
pub mod datapath;
pub mod devices;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod http;
pub mod kube;
pub mod local;
pub mod metrics;
pub mod netlink;
pub mod nft_guard;
pub mod process;
pub mod reference;
pub mod sockets;
