// SPDX-License-Identifier: Apache-2.0
//! Packet tracing: which packets `npl-agent trace` follows, and what the records of the programs contain.

pub mod packet;
mod selection;
mod step;

pub use selection::{PacketSelection, TooManyEndpoints, TracedEndpoint};
pub use step::{Hook, ProgramVerdict, Step};
