// SPDX-License-Identifier: Apache-2.0
//! Configures and starts the kubelet of a Node.

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

/// The group of kubelets in the Node authorizer.
pub(super) const GROUP: &str = "system:nodes";

/// The kubelet's Pod limit: more Pods than any test creates, within the Node's address range.
const MAX_PODS: u32 = 200;

/// Returns the API server user of a Node's kubelet.
pub(super) fn user(node: NodeNumber) -> String {
    format!("system:node:{}", node.name())
}

/// Writes the kubelet's configuration and kubeconfig into the Node's directory.
pub(super) fn configure(directory: &Path, node: NodeNumber, plane: &ControlPlane) -> Result<()> {
    let folder = directory.join("run/npl");
    write_secret(&folder.join("kubelet.kubeconfig"), &plane.kubeconfig(&user(node))?)?;
    let settings = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        // The kubelet need not authorize requests, because only this cluster's machines reach it.
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "clusterDNS": ["10.96.0.10"],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": format!("unix://{}", containerd::SOCKET),
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "failCgroupV1": false,
        "failSwapOn": false,
        // Disable image garbage collection: without a registry, a removed image cannot be pulled again.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "maxPods": MAX_PODS,
        "nodeStatusUpdateFrequency": "5s",
        // By default, the kubelet lowers its OOM score, which requires CAP_SYS_RESOURCE. Not every test machine grants
        // this capability.
        "oomScoreAdj": 0,
        "resolvConf": "",
        // The directory is set, because the default is a directory of the host.
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
    });
    let file = folder.join("kubelet.json");
    fs::write(&file, settings.to_string()).with_context(|| format!("write {}", file.display()))
}

/// Starts the kubelet. The Node becomes ready later.
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
