// SPDX-License-Identifier: Apache-2.0
//! Serves clients on the Node itself and in its Pods: attaches the socket programs to the selected cgroup.

use crate::{
    datapath::{CgroupSelection, ClientScope, Datapath, ServedClients},
    process::error_chain::ErrorChain,
};

/// The selection of local clients, whose sockets the socket programs connect to Pods directly.
#[derive(Debug)]
pub struct LocalClients {
    selection: CgroupSelection,
    scope: ClientScope,
}

impl LocalClients {
    /// Creates a value that stores the selection of local clients. [`Self::serve`] attaches the programs.
    pub const fn new(selection: CgroupSelection, scope: ClientScope) -> Self {
        Self { selection, scope }
    }

    /// Attaches the socket programs that are not attached to the selected cgroup yet. If this fails, only local clients
    /// are affected.
    ///
    /// # Errors
    ///
    /// Returns the failure and its causes as one line of text.
    pub fn serve(&self, datapath: &mut Datapath) -> Result<Option<ServedClients>, String> {
        datapath.serve_local_clients(&self.selection, self.scope).map_err(|error| ErrorChain(&error).to_string())
    }
}
