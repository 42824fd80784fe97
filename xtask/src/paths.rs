// SPDX-License-Identifier: Apache-2.0
//! Paths of the workspace, its target folder and the toolchain that runs xtask.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The root directory of the workspace in which `cargo xtask` was started.
pub(crate) fn root() -> PathBuf {
    let manifest = env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    manifest.parent().map_or_else(|| manifest.clone(), Path::to_path_buf)
}

/// Cargo's target directory, which the user may have moved by `CARGO_TARGET_DIR`.
pub(crate) fn target_dir() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// The cargo program that runs xtask. All steps use this program, so that they use the same toolchain.
pub(crate) fn cargo() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Cargo's home directory, which contains the sources of dependencies.
pub(crate) fn cargo_home() -> Option<PathBuf> {
    env::var_os("CARGO_HOME").map(PathBuf::from).or_else(|| env::home_dir().map(|home| home.join(".cargo")))
}

/// The path of the kernel object that `build-ebpf` writes and the agent embeds.
pub(crate) fn bpf_object() -> PathBuf {
    target_dir().join("bpf").join("npl.bpf.o")
}

/// The path of the kernel object for trace builds.
pub(crate) fn trace_object() -> PathBuf {
    bpf_object().with_file_name("npl-trace.bpf.o")
}

/// Returns a path in the form for messages: relative to the root of the workspace if the path is below this root.
pub(crate) fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}
