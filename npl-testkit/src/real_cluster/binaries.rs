// SPDX-License-Identifier: Apache-2.0
//! Finds the programs and images of a cluster.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::tools;

/// The environment variable with the directory of kubelet, kube-proxy, kube-controller-manager and kube-scheduler.
const PROGRAMS_VARIABLE: &str = "NPL_KUBERNETES_DIR";

/// The environment variable with the directory of the images that `cargo xtask image` packs.
const IMAGES_VARIABLE: &str = "NPL_IMAGES_DIR";

/// The directories in which Debian and the upstream archive install CNI plug-ins.
const CNI_FOLDERS: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];

/// Programs of distribution packages, found on `PATH`.
pub(super) const CONTAINER_TOOLS: [&str; 3] = ["containerd", "ctr", "runc"];

/// The directory of the Kubernetes programs other than the API server, and the directory of the CNI plug-ins.
#[derive(Clone, Debug)]
pub(super) struct Programs {
    pub(super) folder: PathBuf,
    pub(super) cni: PathBuf,
}

impl Programs {
    /// Finds both directories. A missing program is thus reported before any program is started.
    pub(super) fn find() -> Result<Self> {
        let names = ["kubelet", "kube-proxy", "kube-controller-manager", "kube-scheduler"];
        let folder = find_directory(PROGRAMS_VARIABLE, "kubelet", &names)?;
        let search = env::var_os("PATH").unwrap_or_default();
        for name in CONTAINER_TOOLS {
            let is_there = env::split_paths(&search).any(|folder| folder.join(name).exists());
            anyhow::ensure!(is_there, "{name} is not on PATH: run `cargo xtask setup`");
        }
        let cni = CNI_FOLDERS.iter().map(Path::new).find(|folder| folder.join("bridge").exists());
        let cni = cni.with_context(|| format!("no CNI plug-ins in {CNI_FOLDERS:?}: run `cargo xtask setup`"))?;
        Ok(Self { folder, cni: cni.to_owned() })
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// Returns the directory that the environment variable `variable` names. The directory must contain `files`; otherwise
/// the error message names `program`.
pub(super) fn find_directory(variable: &str, program: &str, files: &[&str]) -> Result<PathBuf> {
    let directory = env::var_os(variable).map(PathBuf::from).with_context(|| {
        format!("{program} not found: run `cargo xtask cluster up`, or set {variable} to its directory")
    })?;
    for file in files {
        let is_there = directory.join(file).exists();
        anyhow::ensure!(is_there, "{variable} is {}, which does not contain {file}", directory.display());
    }
    Ok(directory)
}

/// The directory of the images that are imported into every Node, because there is no registry.
#[derive(Clone, Debug)]
pub(super) struct Images(PathBuf);

impl Images {
    /// The sandbox image, whose container keeps a Pod's namespaces open.
    pub(super) const PAUSE: &str = concat!("localhost/npl-pause:", env!("CARGO_PKG_VERSION"));

    const FILES: [&str; 4] = ["npl-pause.oci.tar", "npl-echo.oci.tar", "npl-agent.oci.tar", "npl-feed.oci.tar"];

    pub(super) fn find() -> Result<Self> {
        let folder = env::var_os(IMAGES_VARIABLE).map_or_else(|| tools::repository_file("target"), PathBuf::from);
        for file in Self::FILES {
            anyhow::ensure!(
                folder.join(file).exists(),
                "no image {file} in {}: run `cargo xtask image`, or set {IMAGES_VARIABLE}",
                folder.display()
            );
        }
        Ok(Self(folder))
    }

    pub(super) fn archives(&self) -> impl Iterator<Item = PathBuf> {
        Self::FILES.iter().map(|file| self.0.join(file))
    }
}
