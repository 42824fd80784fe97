// SPDX-License-Identifier: Apache-2.0
//! Where things are: the workspace, its target folder, the toolchain that runs us.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The root of the workspace that `cargo xtask` was started in.
pub(crate) fn root() -> PathBuf {
    let manifest = env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    manifest.parent().map_or_else(|| manifest.clone(), Path::to_path_buf)
}

/// Cargo's target folder, wherever the user has put it.
pub(crate) fn target_dir() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// The cargo that runs us, so that every step uses the same toolchain.
pub(crate) fn cargo() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Cargo's home: its registry is below it.
pub(crate) fn cargo_home() -> Option<PathBuf> {
    env::var_os("CARGO_HOME").map(PathBuf::from).or_else(|| env::home_dir().map(|home| home.join(".cargo")))
}

/// The target triple of the agent and of everything that is built with it.
pub(crate) fn agent_target() -> String {
    format!("{}-unknown-linux-gnu", env::consts::ARCH)
}

/// Where `build-ebpf` leaves the kernel object that the agent embeds.
pub(crate) fn bpf_object() -> PathBuf {
    target_dir().join("bpf").join("npl.bpf.o")
}

/// A path as a reader wants to see it: relative to the workspace where it is inside.
pub(crate) fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}
