// SPDX-License-Identifier: Apache-2.0
//! Tests that krew installs the kubectl plug-in that `cargo xtask image` packs, and that kubectl finds the plug-in.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use npl_testkit::run::Run;
use npl_testkit::tools;

/// The name of the archive for this machine.
fn archive() -> String {
    let arch = if env::consts::ARCH == "aarch64" { "arm64" } else { "amd64" };
    format!("kubectl-npl-linux-{arch}.tar.gz")
}

/// Returns the folder whose path is in an environment variable that `cargo xtask test` sets.
fn folder(variable: &str) -> PathBuf {
    let folder = env::var_os(variable);
    folder.with_context(|| format!("{variable} is unset: run this test with `cargo xtask test`")).unwrap().into()
}

/// The folder with the archive and the manifest of the plug-in.
fn packed() -> PathBuf {
    folder("NPL_IMAGES_DIR").join("krew")
}

/// Installs the plug-in from an archive into the folder `root`, in a network namespace without any network.
fn install(root: &Path, archive: &Path) -> Result<String> {
    let mut krew = Command::new("unshare");
    krew.args(["--net", "--"]).arg(folder("NPL_KREW_DIR").join("krew")).arg("install");
    krew.arg("--manifest").arg(packed().join("npl.yaml")).arg("--archive").arg(archive).env("KREW_ROOT", root);
    tools::output(&mut krew)
}

/// Runs `kubectl npl`. kubectl looks for plug-ins only in `root/bin`, where krew links the plug-ins that it has
/// installed.
fn kubectl_npl(root: &Path, argument: &str) -> Result<String> {
    let search = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&search).map(|folder| folder.join("kubectl")).find(|path| path.is_file());
    let mut kubectl = Command::new(found.context("kubectl is not on the PATH")?);
    kubectl.args(["npl", argument]).env("PATH", root.join("bin"));
    tools::output(&mut kubectl)
}

#[test]
fn krew_installs_the_plugin_without_network_and_kubectl_runs_it() {
    let run = Run::start().unwrap();
    let root = run.file("krew");
    let error = kubectl_npl(&root, "--help").unwrap_err().to_string();
    assert!(error.contains("unknown command \"npl\""), "{error}");
    install(&root, &packed().join(archive())).unwrap();
    let installed = root.join("store/npl").join(concat!("v", env!("CARGO_PKG_VERSION")));
    for (name, source) in [("LICENSE", "LICENSE"), ("LICENSE-GPL2", "npl-ebpf/LICENSE-GPL2")] {
        let license = fs::read(tools::repository_file(source)).unwrap();
        assert!(fs::read(installed.join(name)).unwrap() == license, "{name} in {} differs", installed.display());
    }
    let help = kubectl_npl(&root, "--help").unwrap();
    for words in ["kubectl npl", "mappings", "members", "check"] {
        assert!(help.contains(words), "`{words}` is missing from {help}");
    }
    let version = kubectl_npl(&root, "--version").unwrap();
    assert!(version.contains(env!("CARGO_PKG_VERSION")), "{version}");
}

#[test]
fn krew_refuses_an_archive_with_other_bytes_than_those_of_the_manifest() {
    let run = Run::start().unwrap();
    let changed = run.file(&archive());
    let mut bytes = fs::read(packed().join(archive())).unwrap();
    bytes.push(0);
    fs::write(&changed, bytes).unwrap();
    let error = install(&run.file("krew"), &changed).unwrap_err().to_string();
    assert!(error.contains("checksum does not match"), "{error}");
}
