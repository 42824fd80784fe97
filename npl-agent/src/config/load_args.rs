// SPDX-License-Identifier: Apache-2.0
//! The command line of `npl-agent load`.

use std::path::PathBuf;

use clap::Args;

use super::args::DEFAULT_BPFFS;
use crate::core::sizes::MaxFlows;

/// Flags of `load`.
#[derive(Debug, Clone, Args)]
pub struct LoadArgs {
    /// Pin the programs below this mount point of the BPF file system, where the agent finds them.
    #[arg(long, env = "NPL_BPFFS", value_name = "DIRECTORY", default_value = DEFAULT_BPFFS)]
    pub bpffs: PathBuf,

    /// Make room for this many flows. Give the agent's value: an agent with another value replaces the maps.
    #[arg(long, env = "NPL_MAX_FLOWS", value_name = "auto|NUMBER", default_value = "auto")]
    pub max_flows: MaxFlows,

    /// First mount a BPF file system at the mount point of --bpffs, if none is mounted. Mounting needs `CAP_SYS_ADMIN`
    /// and, in a container, a mount with bidirectional propagation.
    #[arg(long, env = "NPL_MOUNT_BPFFS")]
    pub mount_bpffs: bool,
}
