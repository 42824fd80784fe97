// SPDX-License-Identifier: Apache-2.0
//! flannel between the Nodes: its daemon on each, with the settings of its own manifest.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use super::cni::{self, Cni};
use super::init::{SETTINGS, TEMPORARY};
use super::network::{NodeNumber, POD_RANGES};
use super::space::Space;
use crate::api_client::ApiClient;
use crate::control_plane::{Account, ControlPlane, write_secret};
use crate::poll;
use crate::process::Process;
use crate::tools;

/// Says in which folder its daemon is.
const VARIABLE: &str = "NPL_FLANNEL_DIR";

/// The user that its daemons are to the API server.
const USER: &str = "npl:flannel";

/// In a Node's folder: what the daemon says about the Node's part of the network.
const SUBNET_FILE: &str = "run/flannel/subnet.env";

/// A kubelet registers its Node within 2 s on an idle machine, and the daemon is ready as soon.
const LIMIT: Duration = Duration::from_mins(1);

/// Whom the API server has to know: it reads Nodes and writes to them.
pub(super) fn account() -> Account {
    Account::new(USER, &["system:masters"])
}

/// flannel, where it makes the network.
#[derive(Clone, Debug)]
pub(super) struct Flannel {
    /// Its daemon.
    program: PathBuf,
    /// How it brings packets to other Nodes, by its own name for that.
    backend: &'static str,
}

impl Flannel {
    /// Nothing if another makes the network; where it does, it is looked for before anything is started.
    pub(super) fn find(cni: Cni) -> Result<Option<Self>> {
        let backend = match cni {
            Cni::Bridge => return Ok(None),
            Cni::FlannelVxlan => "vxlan",
            Cni::FlannelHostGw => "host-gw",
        };
        let folder = env::var_os(VARIABLE).map(PathBuf::from);
        let folder = folder.with_context(|| {
            format!("no flannel is known: run `cargo xtask cluster up`, or set {VARIABLE} to its folder")
        })?;
        let program = folder.join("flannel");
        anyhow::ensure!(program.exists(), "{VARIABLE} is {}, where no flannel is", folder.display());
        Ok(Some(Self { program, backend }))
    }

    /// Starts the daemon of a Node whose kubelet runs, which gets its range of addresses here.
    pub(super) fn start(
        &self,
        space: &Space,
        node: NodeNumber,
        directory: &Path,
        plane: &ControlPlane,
        client: &ApiClient,
    ) -> Result<Process> {
        let path = format!("/api/v1/nodes/{}", node.name());
        poll::until(&format!("the registration of {}", node.name()), LIMIT, || client.find(&path).ok().flatten())?;
        let ranges = [node.pods_v4(), node.pods_v6()];
        client.merge_patch(&path, &json!({"spec": {"podCIDR": ranges[0], "podCIDRs": ranges}}))?;

        let folder = directory.join("run/npl");
        write_secret(&folder.join("flannel.kubeconfig"), &plane.kubeconfig(USER)?)?;
        let file = folder.join("flannel.json");
        fs::write(&file, self.settings().to_string()).with_context(|| format!("write {}", file.display()))?;
        let program = folder.join("flannel");
        tools::copy_program(&self.program, &program)?;
        let mut command = Command::new(Path::new(SETTINGS).join("flannel"));
        command
            .args(["--kube-subnet-mgr", "--kubeconfig-file=/run/npl/flannel.kubeconfig"])
            .args(["--net-config-path=/run/npl/flannel.json", "--ip-masq", "--iface=eth0"])
            .env("NODE_NAME", node.name())
            .env("TMPDIR", TEMPORARY);
        space.spawn(&format!("flannel of {}", node.name()), command, &directory.join("log/flannel.log"))
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

/// Waits until the daemon has said what the Node's part of the network is, and has its Pods connected so.
pub(super) fn connect_pods(daemon: &Process, node: NodeNumber, directory: &Path) -> Result<()> {
    let file = directory.join(SUBNET_FILE);
    let said = || mtu(&fs::read_to_string(&file).ok()?);
    let (mtu, _) =
        poll::until(&format!("flannel of {}", node.name()), LIMIT, said).with_context(|| daemon.log_tail(10))?;
    cni::configure(directory, node, Some(mtu))
}

/// From a line like `FLANNEL_MTU=1450`.
fn mtu(variables: &str) -> Option<u32> {
    variables.lines().find_map(|line| line.strip_prefix("FLANNEL_MTU="))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::mtu;

    #[test]
    fn the_size_of_packets_is_what_the_daemon_says() {
        assert_eq!(mtu("FLANNEL_SUBNET=10.244.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"), Some(1450));
        assert_eq!(mtu("FLANNEL_SUBNET=10.244.1.1/24\n"), None);
    }
}
