// SPDX-License-Identifier: Apache-2.0
//! Keeps clients on the Node itself and in its Pods served, whatever becomes of the programs on their cgroup.

use tracing::{info, warn};

use crate::{
    datapath::{CgroupSelection, Datapath, ServedClients},
    devices::uplinks::ErrorChain,
};

/// Whose sockets are led to Pods, and what was last told of it.
#[derive(Debug)]
pub struct LocalClients {
    selection: CgroupSelection,
    told: Option<Result<Option<ServedClients>, String>>,
}

impl LocalClients {
    /// Nobody is served yet.
    pub const fn new(selection: CgroupSelection) -> Self {
        Self { selection, told: None }
    }

    /// Puts programs where they are not, or not any more. Whatever keeps these clients from being served keeps nobody else.
    pub fn serve(&mut self, datapath: &mut Datapath) {
        let served = datapath.serve_local_clients(&self.selection).map_err(|error| ErrorChain(&error).to_string());
        if self.told.as_ref() != Some(&served) {
            tell(&served);
            self.told = Some(served);
        }
    }
}

fn tell(served: &Result<Option<ServedClients>, String>) {
    match served {
        Ok(None) => {}
        Ok(Some(ServedClients { cgroup, has_loopback })) => {
            info!(cgroup = %cgroup.display(), "clients on the Node itself and in its Pods are led to Pods");
            if !has_loopback {
                info!("loopback addresses do not lead to Pods: that needs Linux 5.14 or newer");
            }
        }
        Err(err) => warn!(
            %err,
            "clients on the Node itself and in its Pods do not reach mappings, and all others do; it is tried again"
        ),
    }
}
