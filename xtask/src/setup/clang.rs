// SPDX-License-Identifier: Apache-2.0
//! Obtains the C compiler with which Cilium compiles its kernel programs on each Node.
//!
//! The compiler's packages are unpacked into the cache and not installed: bpf-linker could load the libLLVM of an
//! installed package instead of the libLLVM of the Rust compiler.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::apt;
use crate::{cache, files, process};

/// The name of the compiler's program and of its Debian package. The kernel refuses Cilium's programs if clang 14 has
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
        let work = folder.join("work");
        let unpacked = work.join("unpacked");
        for package in PACKAGES {
            apt::unpack(package, &work.join(package), &unpacked)?;
        }
        collect(&unpacked, folder)?;
        fs::remove_dir_all(&work).context("remove the packages")?;
        process::ask(Command::new(folder.join("clang")).arg("--version"))
            .with_context(|| format!("run {COMPILER}, which also needs installed shared libraries"))
            .map(drop)
    })
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
    files::write_executable(&folder.join("clang"), WRAPPER)
}
