// SPDX-License-Identifier: GPL-2.0-only
//! The lowest layer of the kernel programs contains program contexts, clocks, map statics, shared map memory, counters
//! and verdicts. This layer imports only `npl-common`.

pub mod cell;
pub mod clock;
pub mod context;
pub mod error;
pub mod maps;
pub mod mode;
pub mod stats;
#[cfg(feature = "trace")]
pub mod trace;
pub mod verdict;
