// SPDX-License-Identifier: Apache-2.0
//! Obtains the C compiler with which Cilium compiles its kernel programs on each Node.
//!
//! The compiler's packages are unpacked into the cache and not installed: bpf-linker could load the libLLVM of an
//! installed package instead of the libLLVM of the Rust compiler.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::apt;
use crate::{cache, process};

/// The compiler, which is also the name of its Debian package. The kernel refuses Cilium's programs if clang 14 has
/// compiled them.
const COMPILER: &str = "clang-19";

/// The packages with the compiler and its libraries.
const PACKAGES: [&str; 3] = [COMPILER, "libclang-cpp19", "libllvm19"];

/// Runs the compiler with its own libraries. The directory of the script is read from `$0`, because the cache renames
/// the directory after the script has been written.
const WRAPPER: &str = r#"#!/bin/sh
folder=$(dirname "$(readlink -f "$0")")
export LD_LIBRARY_PATH="$folder/lib"
exec "$folder/clang.bin" "$@"
"#;

/// Returns a directory with the program `clang`. Downloads the compiler if it is neither installed nor in the cache.
pub(super) fn obtain() -> Result<PathBuf> {
    if let Some(installed) = process::find(COMPILER) {
        let path = installed.display().to_string();
        return cache::obtain("clang", &[path.as_bytes()], |folder| {
            symlink(&installed, folder.join("clang")).with_context(|| format!("link {path}"))
        });
    }
    let made_from = PACKAGES.map(str::as_bytes);
    cache::obtain("clang", &[&made_from[..], &[WRAPPER.as_bytes()]].concat(), |folder| {
        process::say(&format!("{COMPILER}: downloading the compiler of Cilium's kernel programs once, 50 MB"));
        let unpacked = folder.join("unpacked");
        for package in PACKAGES {
            unpack(package, &folder.join(package), &unpacked)?;
        }
        collect(&unpacked, folder)?;
        fs::remove_dir_all(&unpacked).context("remove the unpacked packages")?;
        process::ask(Command::new(folder.join("clang")).arg("--version"))
            .with_context(|| format!("run {COMPILER}, which also needs installed shared libraries"))
            .map(drop)
    })
}

/// Downloads a package into a new folder, and unpacks the package.
fn unpack(package: &str, folder: &Path, unpacked: &Path) -> Result<()> {
    fs::create_dir(folder).with_context(|| format!("create {}", folder.display()))?;
    let file = apt::download(package, folder)?;
    process::run_quietly(Command::new("dpkg-deb").arg("-x").arg(file).arg(unpacked))?;
    fs::remove_dir_all(folder).with_context(|| format!("remove {}", folder.display()))
}

/// Moves the compiler and its libraries out of the unpacked packages, and writes the program `clang`.
fn collect(unpacked: &Path, folder: &Path) -> Result<()> {
    let compiler = fs::canonicalize(unpacked.join("usr/bin").join(COMPILER)).context("find the compiler")?;
    fs::rename(&compiler, folder.join("clang.bin")).context("move the compiler")?;
    let libraries = folder.join("lib");
    fs::create_dir(&libraries).context("create the folder of libraries")?;
    let mut find = Command::new("find");
    find.arg(unpacked.join("usr/lib")).args(["-type", "f", "-name", "lib*.so*", "-exec", "mv", "-t"]).arg(&libraries);
    process::run_quietly(find.args(["{}", "+"]))?;
    let program = folder.join("clang");
    fs::write(&program, WRAPPER).context("write the program clang")?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).context("make the program clang executable")
}
