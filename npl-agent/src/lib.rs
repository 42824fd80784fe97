// SPDX-License-Identifier: Apache-2.0
//! The NodePortLocal agent: watches the cluster, decides in [`core`], acts on the kernel, and publishes last.
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
pub mod http;
pub mod kube;
pub mod metrics;
pub mod netlink;
pub mod nft_guard;
pub mod process;
pub mod reference;
pub mod sockets;
