// SPDX-License-Identifier: Apache-2.0
//! Configures and starts containerd, the container runtime of a Node.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::binaries::Images;
use super::init::TEMPORARY;
use super::space::Space;
use crate::process::Process;
use crate::{poll, tools};

/// The path of containerd's socket inside the Node.
pub(super) const SOCKET: &str = "/run/containerd/containerd.sock";

/// The containerd namespace that Kubernetes uses.
const NAMESPACE: &str = "k8s.io";

const READY_LIMIT: Duration = Duration::from_mins(1);

/// Writes containerd's configuration into the Node's directory.
pub(super) fn configure(directory: &Path, cni: &Path) -> Result<()> {
    let file = directory.join("run/npl/containerd.toml");
    fs::write(&file, settings(cni)).with_context(|| format!("write {}", file.display()))
}

/// Starts containerd and waits until it listens.
pub(super) fn start(space: &Space, node: &str, directory: &Path) -> Result<Process> {
    let mut command = Command::new("containerd");
    command.args(["--config", "/run/npl/containerd.toml"]).env("TMPDIR", TEMPORARY);
    let process = space.spawn(&format!("containerd of {node}"), command, &directory.join("log/containerd.log"))?;
    let socket = socket_from_outside(directory);
    poll::until(&format!("containerd of {node}"), READY_LIMIT, || UnixStream::connect(&socket).ok())
        .with_context(|| process.log_tail(10))?;
    Ok(process)
}

/// Imports the images that every Node has.
pub(super) fn import(directory: &Path, images: &Images) -> Result<()> {
    for archive in images.archives() {
        tools::output(ctr(directory).args(["images", "import"]).arg(&archive))?;
    }
    Ok(())
}

/// Returns a `ctr` command for the Node's containerd, run from outside the Node.
pub(super) fn ctr(directory: &Path) -> Command {
    let mut command = Command::new("ctr");
    command.arg("--address").arg(socket_from_outside(directory)).args(["--namespace", NAMESPACE]);
    command
}

fn socket_from_outside(directory: &Path) -> PathBuf {
    directory.join(SOCKET.trim_start_matches('/'))
}

fn settings(cni: &Path) -> String {
    let (pause, cni) = (Images::PAUSE, cni.display());
    format!(
        r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
# The first plug-in would create a directory on the host; the others need file systems or devices that Nodes lack.
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  # Lowering the OOM score below the parent's requires CAP_SYS_RESOURCE, which a machine may lack.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "/run/npl/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"#
    )
}
