// SPDX-License-Identifier: Apache-2.0
//! The kernel's side of the agent: loads the programs, attaches them to devices, and reads and writes their maps.
//!
//! Everything is pinned under `<bpffs>/npl/v<ABI>/`, so the datapath outlives the agent: it may be killed, restarted or
//! upgraded at any line, and packets are translated all the while. What the kernel holds is read back, never remembered.

pub mod attach;
pub mod cgroup;
pub mod cleanup;
mod direct;
pub mod error;
mod family;
mod fittings;
pub mod inspect;
mod layout;
pub mod load;
pub mod local;
pub mod mappings;
mod object;
pub mod pins;
pub mod preflight;
mod programs;
mod sys;
pub mod tables;
mod xdp;

pub use attach::Hooks;
pub use cgroup::CgroupSelection;
pub use error::DatapathError;
pub use fittings::OwnPrograms;
pub use load::Datapath;
pub use local::LocalClients;
pub use object::embedded_object;
pub use pins::Pins;
pub use programs::is_unfenced;
pub(crate) use sys::now as kernel_clock;
pub use tables::Tables;
