// SPDX-License-Identifier: Apache-2.0
//! The agent's access to the kernel: loads the programs, attaches the programs to devices and cgroups, and reads and
//! writes the maps.
//!
//! Maps, programs and links are pinned under `<bpffs>/npl/v<ABI>/`, so that the datapath translates packets while the
//! agent is stopped, killed or upgraded. The state in the kernel is authoritative, so the agent reads the maps again at
//! start and at each resync.

pub mod attach;
pub mod cgroup;
pub mod cleanup;
pub mod error;
mod family;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod host_connections;
pub mod inspect;
mod layout;
pub mod load;
pub mod local_clients;
mod machine;
pub mod mappings;
mod next_hops;
mod node_addresses;
mod object;
mod own_programs;
mod packet_trace;
pub mod pins;
mod predecessor;
pub mod preflight;
mod programs;
mod socket_program;
mod sys;
pub mod tables;
#[cfg(feature = "trace")]
mod trace;
mod xdp;

pub use attach::Hooks;
pub use cgroup::{CgroupSelection, ClientScope};
pub use error::DatapathError;
pub use family::{FlowTableFill, SweptFlows};
pub use load::Datapath;
pub use local_clients::ServedClients;
pub use object::embedded_object;
pub use own_programs::OwnPrograms;
pub use packet_trace::{LEASE as TRACE_LEASE, LeftOut, PacketTrace};
pub use pins::Pins;
pub use predecessor::Takeover;
pub use programs::is_unmitigated;
pub(crate) use sys::now as kernel_clock;
pub use tables::Tables;
