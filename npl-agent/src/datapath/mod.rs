// SPDX-License-Identifier: Apache-2.0
//! The kernel side of the agent: loads programs, attaches them, and reads and writes their maps.
//!
//! Everything is pinned below `<bpffs>/npl/v<ABI>/`, so packets are translated while no agent runs: it may be killed,
//! restarted or upgraded at any time.

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
