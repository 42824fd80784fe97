// SPDX-License-Identifier: Apache-2.0
//! Packet tracing: selects the packets that `npl-agent trace` shows, and decodes the trace records of the programs.

pub mod packet;
mod selection;
mod step;

pub use selection::{PacketSelection, TooManyEndpoints, TracedEndpoint};
pub use step::{Hook, ProgramVerdict, Step};
