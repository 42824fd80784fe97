// SPDX-License-Identifier: Apache-2.0
//! A Node's kubelet.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::json;

use super::containerd;
use super::init::{BINARIES, TEMPORARY};
use super::network::NodeNumber;
use super::space::Space;
use crate::control_plane::{ControlPlane, write_secret};
use crate::process::Process;

/// The group that the API server takes for kubelets.
pub(super) const GROUP: &str = "system:nodes";

/// More than any test puts on a Node, and as many as its range has addresses for.
const MAX_NEXT_HOPS: u32 = 200;

/// The user that a Node's kubelet is to the API server.
pub(super) fn user(node: NodeNumber) -> String {
    format!("system:node:{}", node.name())
}

/// Writes its settings and its access into the Node's folder.
pub(super) fn configure(directory: &Path, node: NodeNumber, plane: &ControlPlane) -> Result<()> {
    let folder = directory.join("run/npl");
    write_secret(&folder.join("kubelet.kubeconfig"), &plane.kubeconfig(&user(node))?)?;
    let settings = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        // Nobody but this cluster reaches it.
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "clusterDNS": ["10.96.0.10"],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": format!("unix://{}", containerd::SOCKET),
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "failCgroupV1": false,
        "failSwapOn": false,
        // An image that is removed to make room cannot be had back: there is no registry.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "maxPods": MAX_NEXT_HOPS,
        "nodeStatusUpdateFrequency": "5s",
        // A machine may lack CAP_SYS_RESOURCE, which a lower value needs.
        "oomScoreAdj": 0,
        "resolvConf": "",
        // The usual one is a folder of the machine's own.
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
    });
    let file = folder.join("kubelet.json");
    fs::write(&file, settings.to_string()).with_context(|| format!("write {}", file.display()))
}

/// Starts it; the Node is ready when the API server says so.
pub(super) fn start(space: &Space, node: NodeNumber, directory: &Path) -> Result<Process> {
    let [v4, v6] = node.addresses();
    let mut command = Command::new(Path::new(BINARIES).join("kubelet"));
    command
        .args(["--config=/run/npl/kubelet.json", "--kubeconfig=/run/npl/kubelet.kubeconfig", "--v=2"])
        .arg(format!("--hostname-override={}", node.name()))
        .arg(format!("--node-ip={v4},{v6}"))
        .env("TMPDIR", TEMPORARY);
    space.spawn(&format!("kubelet of {}", node.name()), command, &directory.join("log/kubelet.log"))
}
