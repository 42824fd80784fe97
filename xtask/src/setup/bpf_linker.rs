// SPDX-License-Identifier: Apache-2.0
//! Builds bpf-linker, which links rustc's LLVM bitcode into a kernel object.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::{cache, paths, process};

/// The version of bpf-linker: the last one that loads the compiler's libLLVM at run time, so that no LLVM besides the
/// compiler's needs to be installed.
const VERSION: &str = "0.10.3";

/// The major version of LLVM whose bitcode [`VERSION`] reads.
pub(crate) const LLVM: u32 = 22;

/// Returns the path of bpf-linker in the cache, and compiles bpf-linker if it is missing there.
pub(crate) fn obtain() -> Result<PathBuf> {
    let folder = cache::obtain("bpf-linker", &[VERSION.as_bytes(), &LLVM.to_le_bytes()], |folder| {
        process::say(&format!(
            "bpf-linker {VERSION}: compiling the linker of the kernel programs once, 1 to 2 minutes"
        ));
        let mut install = Command::new(paths::cargo());
        install.args(["install", "bpf-linker", "--version", VERSION, "--locked", "--no-track", "--root"]).arg(folder);
        // bpf-linker is compiled in its own target directory and without compiler flags: directory and flags of the
        // calling build must not apply to it.
        install.args(["--target-dir"]).arg(folder.join("build")).env_remove("RUSTFLAGS");
        // Little optimization is sufficient: most of the work of bpf-linker is done by LLVM, which is already compiled.
        install.env("CARGO_PROFILE_RELEASE_DEBUG", "false").env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1");
        process::run_quietly(&mut install)?;
        Ok(std::fs::remove_dir_all(folder.join("build"))?)
    })?;
    Ok(folder.join("bin").join("bpf-linker"))
}
