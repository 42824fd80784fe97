// SPDX-License-Identifier: Apache-2.0
//! Serves clients on the Node itself and in its Pods: attaches the socket programs to their cgroup.

use crate::{
    datapath::{CgroupSelection, Datapath, ServedClients},
    process::error_chain::ErrorChain,
};

/// The clients whose sockets may use mappings.
#[derive(Debug)]
pub struct LocalClients {
    selection: CgroupSelection,
}

impl LocalClients {
    /// No client is served yet.
    pub const fn new(selection: CgroupSelection) -> Self {
        Self { selection }
    }

    /// Attaches the programs where they are missing. A failure affects these clients only.
    ///
    /// # Errors
    ///
    /// The failure and its causes on one line.
    pub fn serve(&self, datapath: &mut Datapath) -> Result<Option<ServedClients>, String> {
        datapath.serve_local_clients(&self.selection).map_err(|error| ErrorChain(&error).to_string())
    }
}
