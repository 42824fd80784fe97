// SPDX-License-Identifier: Apache-2.0
//! The kernel's side of the agent: loads the programs, attaches them to devices, and reads and writes their maps.
//!
//! Everything is pinned under `<bpffs>/npl/v<ABI>/`, so the datapath outlives the agent: it may be killed, restarted or
//! upgraded at any line, and packets are translated all the while. What the kernel holds is read back, never remembered.

pub mod attach;
pub mod cgroup;
pub mod cleanup;
pub mod error;
mod family;
pub mod inspect;
mod layout;
pub mod load;
pub mod local_clients;
pub mod mappings;
mod next_hops;
mod object;
mod own_programs;
pub mod pins;
pub mod preflight;
mod programs;
mod sys;
pub mod tables;
mod xdp;

pub use attach::Hooks;
pub use cgroup::CgroupSelection;
pub use error::DatapathError;
pub use load::Datapath;
pub use local_clients::ServedClients;
pub use object::embedded_object;
pub use own_programs::OwnPrograms;
pub use pins::Pins;
pub use programs::is_unmitigated;
pub(crate) use sys::now as kernel_clock;
pub use tables::Tables;
