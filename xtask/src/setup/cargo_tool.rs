// SPDX-License-Identifier: Apache-2.0
//! Compiles programs that are published as crates, once per machine.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::{cache, paths, process};

/// Returns the path of the program in the cache, and compiles the program if it is missing there. If `made_from`
/// changes, the program is compiled again. `purpose` is the end of the message that announces the compilation.
pub(super) fn obtain(name: &str, version: &str, made_from: &[&[u8]], purpose: &str) -> Result<PathBuf> {
    let folder = cache::obtain(name, made_from, |folder| {
        process::say(&format!("{name} {version}: compiling {purpose}"));
        let mut install = Command::new(paths::cargo());
        install.args(["install", name, "--version", version, "--locked", "--no-track", "--root"]).arg(folder);
        // The program has its own target directory and no flags, because the directory and the flags of the calling
        // build must not apply to the program.
        install.args(["--target-dir"]).arg(folder.join("build")).env_remove("RUSTFLAGS");
        // Little optimization is sufficient, because the compilation takes longer than all runs of the program.
        install.env("CARGO_PROFILE_RELEASE_DEBUG", "false").env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1");
        install.env("CARGO_PROFILE_RELEASE_LTO", "false").env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
        process::run_quietly(&mut install)?;
        Ok(std::fs::remove_dir_all(folder.join("build"))?)
    })?;
    Ok(folder.join("bin").join(name))
}
