// SPDX-License-Identifier: Apache-2.0
//! bpf-linker: turns rustc's LLVM bitcode into the kernel object.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::{cache, paths, process};

/// The last version that loads the compiler's own libLLVM when it runs, so that no LLVM has to be installed for it.
const VERSION: &str = "0.10.3";

/// The major version of LLVM that [`VERSION`] speaks.
pub(crate) const LLVM: u32 = 22;

/// The linker in the cache, compiled there the first time.
pub(crate) fn obtain() -> Result<PathBuf> {
    let folder = cache::obtain("bpf-linker", &[VERSION.as_bytes(), &LLVM.to_le_bytes()], |folder| {
        process::say(&format!("bpf-linker {VERSION}: links the kernel programs; compiled once, takes 1 to 2 minutes"));
        let mut install = Command::new(paths::cargo());
        install.args(["install", "bpf-linker", "--version", VERSION, "--locked", "--no-track", "--root"]).arg(folder);
        // Its own flags and folder, not those of the build that asked for it.
        install.args(["--target-dir"]).arg(folder.join("build")).env_remove("RUSTFLAGS");
        // It links two small objects, and the newcomer waits for it: LLVM does the work, which is compiled already.
        install.env("CARGO_PROFILE_RELEASE_DEBUG", "false").env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1");
        process::run_quietly(&mut install)?;
        Ok(std::fs::remove_dir_all(folder.join("build"))?)
    })?;
    Ok(folder.join("bin").join("bpf-linker"))
}
