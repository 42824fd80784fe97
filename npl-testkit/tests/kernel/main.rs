// SPDX-License-Identifier: Apache-2.0
//! The kernel programs, as the agent loads them: packet by packet, under real traffic, and over the life of their links.
//! Needs root. The same binary runs on this machine's kernel and, by `cargo xtask test`, on Debian's.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test ends at what it did not expect")]

mod counters;
mod differential;
mod lab;
mod left;
mod links;
mod lists;
mod local;
mod oracle;
mod prog_run;
mod sys;
mod traffic;
mod wire;
mod world;
