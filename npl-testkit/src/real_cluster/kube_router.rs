// SPDX-License-Identifier: Apache-2.0
//! kube-router as the Pod network, BGP router and policy engine: one daemon per Node, configured like upstream's
//! manifest for both families. kube-proxy translates Services.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::binaries::find_directory;
use super::cni;
use super::init::{SETTINGS, TEMPORARY};
use super::network::NodeNumber;
use super::provider::Place;
use crate::api_client::ApiClient;
use crate::control_plane::{Account, ControlPlane, SERVICE_RANGE, write_secret};
use crate::poll;
use crate::process::Process;
use crate::tools;

/// The environment variable with the directory of kube-router.
const VARIABLE: &str = "NPL_KUBE_ROUTER_DIR";

/// The API server user of kube-router.
const USER: &str = "npl:kube-router";

/// The bridge that connects the Pods of a Node; kube-router accepts no other name.
const BRIDGE: &str = "kube-bridge";

/// The time limit for the routes to all Nodes, far above the 10 s in which kube-router establishes its BGP sessions.
const LIMIT: Duration = Duration::from_mins(2);

/// Gives the Node its own copy of iproute2's file with names of routing tables, because kube-router appends a line to
/// this file.
const PREPARE: &str = r#"
for folder in /etc/iproute2 /usr/lib/iproute2 /usr/share/iproute2; do
    if [ -e "$folder/rt_tables" ]; then
        cp "$folder/rt_tables" /run/npl/rt_tables
        mount --bind /run/npl/rt_tables "$folder/rt_tables"
        break
    fi
done"#;

/// The API server account of kube-router.
pub(super) fn account() -> Account {
    Account::new(USER, &["system:masters"])
}

/// The kube-router daemon.
#[derive(Clone, Debug)]
pub(super) struct KubeRouter {
    program: PathBuf,
}

impl KubeRouter {
    /// Finds the binary.
    pub(super) fn find() -> Result<Self> {
        let program = find_directory(VARIABLE, "kube-router", &["kube-router"])?.join("kube-router");
        Ok(Self { program })
    }

    /// Sets the Pod ranges of a Node whose kubelet runs, and starts the Node's daemon.
    pub(super) fn start(&self, place: Place<'_>, plane: &ControlPlane, client: &ApiClient) -> Result<Process> {
        cni::assign_ranges(client, place.number)?;
        let folder = place.directory.join("run/npl");
        write_secret(&folder.join("kube-router.kubeconfig"), &plane.kubeconfig(USER)?)?;
        tools::copy_program(&self.program, &folder.join("kube-router"))?;
        let mut prepare = Command::new("sh");
        prepare.args(["-e", "-c", PREPARE]);
        place.space.output(prepare).context("separate the Node's list of routing tables from that of the machine")?;
        cni::write(place.directory, &settings())?;
        run(place)
    }
}

/// Starts the daemon of a Node that [`KubeRouter::start`] has prepared.
pub(super) fn run(place: Place<'_>) -> Result<Process> {
    let Place { number, space, directory, .. } = place;
    let mut command = Command::new(Path::new(SETTINGS).join("kube-router"));
    command
        .args(["--kubeconfig=/run/npl/kube-router.kubeconfig", &format!("--hostname-override={}", number.name())])
        .args(["--run-router=true", "--run-firewall=true", "--run-service-proxy=false"])
        .args(["--bgp-graceful-restart=true", "--enable-ipv6=true"])
        .arg(format!("--service-cluster-ip-range={SERVICE_RANGE}"))
        // Tunnels are off: all Nodes are in one subnet, and not every machine has the kernel modules for tunnels.
        .arg("--enable-overlay=false")
        .env("NODE_NAME", number.name())
        .env("KUBE_ROUTER_CNI_CONF_FILE", Path::new("/").join(cni::FILE))
        .env("TMPDIR", TEMPORARY);
    space.spawn(&format!("kube-router of {}", number.name()), command, &directory.join("log/kube-router.log"))
}

/// Waits until the daemon has added the Node's Pod ranges to the CNI settings, and the routes to the Pods of all other
/// Nodes to the kernel.
pub(super) fn wait_for_routes(place: Place<'_>, daemon: &Process, all: &[NodeNumber]) -> Result<()> {
    let Place { number, netns, directory, .. } = place;
    let is_configured = || {
        let settings = std::fs::read_to_string(directory.join(cni::FILE)).ok()?;
        [number.pods_v4(), number.pods_v6()].iter().all(|range| settings.contains(range)).then_some(())
    };
    let is_routed = |to: &NodeNumber| {
        let leads_there = |(pods, node): (IpAddr, IpAddr)| {
            netns.ip(&format!("route get {pods}")).is_ok_and(|route| route.contains(&format!("via {node} ")))
        };
        to.bridge_addresses().into_iter().zip(to.addresses()).all(leads_there)
    };
    let others = || all.iter().filter(|it| **it != number);
    let name = number.name();
    poll::until(&format!("the CNI settings of {name}"), LIMIT, is_configured)
        .and_then(|_| poll::until(&format!("the routes of {name}"), LIMIT, || others().all(is_routed).then_some(())))
        .map(drop)
        .with_context(|| daemon.log_tail(10))
}

/// The CNI settings of kube-router's manifest. The daemon adds the Node's Pod ranges.
fn settings() -> Value {
    json!({
        "cniVersion": "0.3.0",
        "name": "npl",
        "plugins": [
            {
                "name": "kubernetes",
                "type": "bridge",
                "bridge": BRIDGE,
                "isDefaultGateway": true,
                "hairpinMode": true,
                "ipam": {"type": "host-local"},
            },
            {"type": "portmap", "capabilities": {"snat": true, "portMappings": true}},
        ],
    })
}
