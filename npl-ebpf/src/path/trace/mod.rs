// SPDX-License-Identifier: GPL-2.0-only
//! Implements packet tracing. The programs record packets for `npl-agent trace`; the programs of the trace build log
//! each verdict instead of recording packets.

#[cfg(feature = "trace")]
mod log;
#[cfg(not(feature = "trace"))]
mod record;

#[cfg(feature = "trace")]
pub use log::{decide, frame, packet, step};
#[cfg(not(feature = "trace"))]
pub use record::{decide, frame, packet, step};
