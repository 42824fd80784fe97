// SPDX-License-Identifier: Apache-2.0
//! Starts the kube-proxy of a Node.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::json;

use super::init::{BINARIES, TEMPORARY};
use super::network::{NodeNumber, pod_range};
use super::space::Space;
use crate::control_plane::{ControlPlane, write_secret};
use crate::process::Process;

/// The API server user of kube-proxy, which may read Services.
pub(super) const USER: &str = "system:kube-proxy";

/// The mode of kube-proxy, which implements Services on a Node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum KubeProxy {
    /// kube-proxy does not run. Services work only with Cilium, which replaces kube-proxy.
    None,
    /// kube-proxy with iptables rules.
    #[default]
    Iptables,
    /// kube-proxy with nftables rules.
    Nftables,
}

impl fmt::Display for KubeProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
        })
    }
}

/// Starts kube-proxy in the given mode, unless the mode is `None`.
pub(super) fn start(
    mode: KubeProxy,
    space: &Space,
    node: NodeNumber,
    directory: &Path,
    plane: &ControlPlane,
) -> Result<Option<Process>> {
    if mode == KubeProxy::None {
        return Ok(None);
    }
    let folder = directory.join("run/npl");
    write_secret(&folder.join("kube-proxy.kubeconfig"), &plane.kubeconfig(USER)?)?;
    let file = folder.join("kube-proxy.json");
    fs::write(&file, settings(mode).to_string()).with_context(|| format!("write {}", file.display()))?;
    let mut command = Command::new(Path::new(BINARIES).join("kube-proxy"));
    command
        .args(["--config=/run/npl/kube-proxy.json", "--v=2"])
        .arg(format!("--hostname-override={}", node.name()))
        .env("TMPDIR", TEMPORARY);
    let log = directory.join("log/kube-proxy.log");
    space.spawn(&format!("kube-proxy of {}", node.name()), command, &log).map(Some)
}

fn settings(mode: KubeProxy) -> serde_json::Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode.to_string(),
        "clientConnection": {"kubeconfig": "/run/npl/kube-proxy.kubeconfig"},
        "clusterCIDR": pod_range(),
        "detectLocalMode": "ClusterCIDR",
        // kube-proxy must not set the limits of the conntrack table, because these limits apply to the whole host, and
        // a Node in a namespace cannot change host-wide limits.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        // By default, kube-proxy lowers its OOM score, which requires CAP_SYS_RESOURCE. Not every test machine grants
        // this capability.
        "oomScoreAdj": 0,
    })
}
