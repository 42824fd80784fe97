// SPDX-License-Identifier: Apache-2.0
//! Runs Calico as the Pod network and policy engine: Felix and its helpers are processes of each Node; Typha, BIRD and
//! the operator are not used.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::binaries::find_directory;
use super::cni::{self, wait_for_registration};
use super::init::{SETTINGS, TEMPORARY};
use super::network::{NodeNumber, POD_RANGES};
use super::provider::Place;
use crate::api_client::ApiClient;
use crate::cluster::{Cluster, timeout_option};
use crate::control_plane::{Account, ControlPlane, write_secret};
use crate::process::Process;
use crate::tools;

/// The environment variable with the directory of Calico's programs.
const VARIABLE: &str = "NPL_CALICO_DIR";

/// The API server user of Calico.
const USER: &str = "npl:calico";

/// Calico's programs, and the file with its custom resource definitions.
const FILES: [&str; 3] = ["calico-node", "calico", "crds.yaml"];

/// Runs Felix (`$0`), and restarts Felix whenever Felix exits with an error. Felix exits with an error when its
/// settings change, for the first time shortly after its first start. If Felix exits 20 times within a minute, the
/// script fails.
const FELIX: &str = r#"
first=$(date +%s) ends=0
until "$0" -felix; do
    now=$(date +%s)
    if [ $((now - first)) -ge 60 ]; then first=$now ends=0; fi
    ends=$((ends + 1))
    if [ "$ends" -ge 20 ]; then
        echo "Felix has exited 20 times within a minute and is not started again: the lines above show why" >&2
        exit 1
    fi
done"#;

/// The API server account of Calico.
pub(super) fn account() -> Account {
    Account::new(USER, &["system:masters"])
}

/// The transport of packets between Pods of different Nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encapsulation {
    Vxlan,
    None,
}

/// Felix's dataplane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dataplane {
    Iptables,
    Nftables,
}

/// Calico's programs and settings.
#[derive(Clone, Debug)]
pub(super) struct Calico {
    folder: PathBuf,
    encapsulation: Encapsulation,
    dataplane: Dataplane,
}

impl Calico {
    /// Finds the programs.
    pub(super) fn find(encapsulation: Encapsulation, dataplane: Dataplane) -> Result<Self> {
        Ok(Self { folder: find_directory(VARIABLE, "Calico", &FILES)?, encapsulation, dataplane })
    }

    /// Links Calico's and the machine's CNI plug-ins into one directory of the Node. Returns the directory's path
    /// inside the Node.
    pub(super) fn add_plugins(&self, directory: &Path, machines: &Path) -> Result<PathBuf> {
        let (folder, inside) = cni::link_plugins(directory, machines)?;
        tools::copy_program(&self.folder.join("calico"), &folder.join("calico"))?;
        // Calico has one program for both plug-ins; the name by which it is called selects the plug-in.
        symlink("calico", folder.join("calico-ipam")).context("link the plug-in calico-ipam")?;
        Ok(inside)
    }

    /// Creates Calico's custom resource definitions and waits until the API server serves them.
    pub(super) fn define(&self, cluster: &Cluster) -> Result<()> {
        let file = self.folder.join("crds.yaml").display().to_string();
        cluster.kubectl(&["create", "--filename", &file])?;
        cluster.kubectl(&["wait", "--for=condition=Established", timeout_option(), "--filename", &file]).map(drop)
    }

    /// Registers a Node with Calico after the Node's kubelet has started, configures the CNI plug-ins, and starts Felix
    /// and the process that assigns addresses to tunnel devices.
    pub(super) fn start(
        &self,
        place: Place<'_>,
        plane: &ControlPlane,
        client: &ApiClient,
    ) -> Result<(Process, Process)> {
        let Place { number, space, directory, .. } = place;
        wait_for_registration(client, number)?;
        write_secret(&directory.join("run/npl/calico.kubeconfig"), &plane.kubeconfig(USER)?)?;
        tools::copy_program(&self.folder.join("calico-node"), &directory.join("run/npl/calico-node"))?;
        space.output(self.command(number, &["-startup"])).context("register the Node with Calico")?;
        let felix = self.run(place)?;
        let tunnel_addresses = self.command(number, &["-allocate-tunnel-addrs"]);
        let name = format!("Calico's tunnel addresses of {}", number.name());
        let tunnel_addresses = space.spawn(&name, tunnel_addresses, &directory.join("log/calico-tunnel.log"))?;
        cni::write(directory, &settings(number))?;
        Ok((felix, tunnel_addresses))
    }

    /// Starts Felix on a Node that [`Self::start`] has prepared.
    pub(super) fn run(&self, place: Place<'_>) -> Result<Process> {
        let Place { number, space, directory, .. } = place;
        let mut felix = Command::new("sh");
        felix.args(["-c", FELIX, "/run/npl/calico-node"]);
        self.set_variables(&mut felix, number);
        space.spawn(&format!("felix of {}", number.name()), felix, &directory.join("log/felix.log"))
    }

    fn command(&self, node: NodeNumber, arguments: &[&str]) -> Command {
        let mut command = Command::new(Path::new(SETTINGS).join("calico-node"));
        command.args(arguments);
        self.set_variables(&mut command, node);
        command
    }

    fn set_variables(&self, command: &mut Command, node: NodeNumber) {
        let [v4, v6] = POD_RANGES;
        let nftables = match self.dataplane {
            Dataplane::Iptables => "Disabled",
            Dataplane::Nftables => "Enabled",
        };
        // BIRD does not run, so Felix adds the routes to the Pods of other Nodes. The backend decides which addresses
        // `calico-node -startup` registers for a Node; Felix uses these addresses as next hops.
        let (backend, vxlan, routes) = match self.encapsulation {
            Encapsulation::Vxlan => ("vxlan", "Always", "Disabled"),
            Encapsulation::None => ("bird", "Never", "Enabled"),
        };
        let variables = [
            ("NODENAME", node.name()),
            ("FELIX_FELIXHOSTNAME", node.name()),
            ("IP", node.v4().to_string()),
            // The prefix length is necessary: without it, Felix does not find the uplink for the IPv6 routes.
            ("IP6", format!("{}/64", node.v6())),
            ("CALICO_IPV4POOL_CIDR", v4.to_owned()),
            ("CALICO_IPV6POOL_CIDR", v6.to_owned()),
            ("CALICO_NETWORKING_BACKEND", backend.to_owned()),
            ("CALICO_IPV4POOL_VXLAN", vxlan.to_owned()),
            ("CALICO_IPV6POOL_VXLAN", vxlan.to_owned()),
            ("FELIX_PROGRAMCLUSTERROUTES", routes.to_owned()),
            ("FELIX_NFTABLESMODE", nftables.to_owned()),
        ];
        command.envs(variables).envs(VARIABLES).current_dir(TEMPORARY);
    }
}

/// The settings that all Nodes share.
const VARIABLES: [(&str, &str); 19] = [
    ("TMPDIR", TEMPORARY),
    ("KUBECONFIG", "/run/npl/calico.kubeconfig"),
    ("DATASTORE_TYPE", "kubernetes"),
    ("FELIX_DATASTORETYPE", "kubernetes"),
    ("FELIX_TYPHAK8SSERVICENAME", "none"),
    ("WAIT_FOR_DATASTORE", "true"),
    ("CLUSTER_TYPE", "k8s"),
    ("CALICO_IPV4POOL_IPIP", "Never"),
    ("CALICO_IPV4POOL_NAT_OUTGOING", "true"),
    ("CALICO_IPV6POOL_NAT_OUTGOING", "true"),
    ("FELIX_IPV6SUPPORT", "true"),
    ("FELIX_DEFAULTENDPOINTTOHOSTACTION", "ACCEPT"),
    ("FELIX_USAGEREPORTINGENABLED", "false"),
    ("FELIX_LOGSEVERITYSCREEN", "info"),
    // The periodic refresh of routes is disabled: in each refresh, Felix deletes all IPv6 routes and adds them again,
    // which loses packets.
    ("FELIX_ROUTEREFRESHINTERVAL", "0"),
    // These features are disabled, because their code panics or reads absent files in a build without cgo.
    ("FELIX_BPFENABLED", "false"),
    ("FELIX_XDPENABLED", "false"),
    // Felix reads this variable only with this capitalization.
    ("FELIX_DebugSkipCTLBCleanup", "true"),
    ("FELIX_HEALTHENABLED", "false"),
];

/// Returns the CNI settings of Calico's manifest.
fn settings(node: NodeNumber) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "k8s-pod-network",
        "plugins": [
            {
                "type": "calico",
                "datastore_type": "kubernetes",
                "nodename": node.name(),
                "nodename_file_optional": true,
                "mtu": 0,
                "log_level": "info",
                "log_file_path": "/var/log/calico-cni.log",
                "ipam": {"type": "calico-ipam", "assign_ipv4": "true", "assign_ipv6": "true"},
                "policy": {"type": "k8s"},
                "kubernetes": {"kubeconfig": "/run/npl/calico.kubeconfig"},
            },
            {"type": "portmap", "snat": true, "capabilities": {"portMappings": true}},
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_felix_that_keeps_exiting_is_not_started_again_and_the_reason_is_logged() {
        let run = |program: &str| Command::new("sh").args(["-c", FELIX, program]).output().unwrap();
        let failed = run("false");
        let text = String::from_utf8_lossy(&failed.stderr);
        assert!(!failed.status.success() && text.contains("Felix has exited 20 times within a minute"), "{text}");
        assert!(run("true").status.success());
    }
}
