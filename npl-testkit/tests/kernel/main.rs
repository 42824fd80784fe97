// SPDX-License-Identifier: Apache-2.0
//! Tests of the kernel programs, loaded as the agent loads them: single packets, real traffic, and the life cycle of
//! links. The tests need root. `cargo xtask test` runs the same binary on the host's kernel and on emulated machines
//! with Debian's kernels.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod bpffs_pool;
mod counters;
mod differential;
mod lab;
mod links;
mod lists;
mod loads;
mod local;
mod mutation;
mod oracle;
mod prog_run;
mod sys;
mod traffic;
mod wire;
mod world;
