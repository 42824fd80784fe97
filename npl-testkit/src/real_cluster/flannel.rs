// SPDX-License-Identifier: Apache-2.0
//! flannel as the Pod network: one daemon per Node, configured like upstream's manifest.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use super::binaries::find_directory;
use super::cni;
use super::init::{SETTINGS, TEMPORARY};
use super::network::{NodeNumber, POD_RANGES};
use super::provider::Place;
use crate::api_client::ApiClient;
use crate::control_plane::{Account, ControlPlane, write_secret};
use crate::poll;
use crate::process::Process;
use crate::tools;

/// The environment variable with the directory of the flannel daemon.
const VARIABLE: &str = "NPL_FLANNEL_DIR";

/// The API server user of the flannel daemons.
const USER: &str = "npl:flannel";

/// The file with flannel's settings for the Node, relative to the Node's directory.
const SUBNET_FILE: &str = "run/flannel/subnet.env";

/// The time limit for flannel to be ready, which takes about 2 s on an idle machine.
const LIMIT: Duration = Duration::from_mins(1);

/// The API server account of flannel, which reads and updates Nodes.
pub(super) fn account() -> Account {
    Account::new(USER, &["system:masters"])
}

/// The flannel daemon.
#[derive(Clone, Debug)]
pub(super) struct Flannel {
    /// The daemon's binary.
    program: PathBuf,
    /// The name of the flannel backend.
    backend: &'static str,
}

impl Flannel {
    /// Finds the binary of a daemon with this backend.
    pub(super) fn find(backend: &'static str) -> Result<Self> {
        let program = find_directory(VARIABLE, "flannel", &["flannel"])?.join("flannel");
        Ok(Self { program, backend })
    }

    /// Sets the Pod ranges of a Node whose kubelet runs, and starts the Node's flannel daemon.
    pub(super) fn start(&self, place: Place<'_>, plane: &ControlPlane, client: &ApiClient) -> Result<Process> {
        cni::assign_ranges(client, place.number)?;
        let folder = place.directory.join("run/npl");
        write_secret(&folder.join("flannel.kubeconfig"), &plane.kubeconfig(USER)?)?;
        let file = folder.join("flannel.json");
        fs::write(&file, self.settings().to_string()).with_context(|| format!("write {}", file.display()))?;
        tools::copy_program(&self.program, &folder.join("flannel"))?;
        run(place)
    }

    fn settings(&self) -> serde_json::Value {
        let [v4, v6] = POD_RANGES;
        json!({
            "Network": v4,
            "EnableIPv6": true,
            "IPv6Network": v6,
            "Backend": {"Type": self.backend},
        })
    }
}

/// Starts the daemon of a Node that [`Flannel::start`] has prepared.
pub(super) fn run(place: Place<'_>) -> Result<Process> {
    let Place { number, space, directory, .. } = place;
    let mut command = Command::new(Path::new(SETTINGS).join("flannel"));
    command
        .args(["--kube-subnet-mgr", "--kubeconfig-file=/run/npl/flannel.kubeconfig"])
        .args(["--net-config-path=/run/npl/flannel.json", "--ip-masq", "--iface=eth0"])
        .env("NODE_NAME", number.name())
        .env("TMPDIR", TEMPORARY);
    space.spawn(&format!("flannel of {}", number.name()), command, &directory.join("log/flannel.log"))
}

/// Waits until flannel has written the subnet file, and configures the bridge with the MTU from this file.
pub(super) fn connect_pods(daemon: &Process, node: NodeNumber, directory: &Path) -> Result<()> {
    let file = directory.join(SUBNET_FILE);
    let said = || mtu(&fs::read_to_string(&file).ok()?);
    let (mtu, _) =
        poll::until(&format!("flannel of {}", node.name()), LIMIT, said).with_context(|| daemon.log_tail(10))?;
    cni::configure(directory, node, Some(mtu))
}

/// Reads the MTU from a line such as `FLANNEL_MTU=1450`.
fn mtu(variables: &str) -> Option<u32> {
    variables.lines().find_map(|line| line.strip_prefix("FLANNEL_MTU="))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::mtu;

    #[test]
    fn the_mtu_is_read_from_the_subnet_file() {
        assert_eq!(mtu("FLANNEL_SUBNET=10.244.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"), Some(1450));
        assert_eq!(mtu("FLANNEL_SUBNET=10.244.1.1/24\n"), None);
    }
}
