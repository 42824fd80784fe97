// SPDX-License-Identifier: Apache-2.0
//! Copies the object file of the kernel programs to `$OUT_DIR/npl.bpf.o`, which the crate includes.
//!
//! `cargo xtask build-ebpf` builds the object with a separate compiler. Without the object, the crate embeds an empty
//! file, so that checks and unit tests need no eBPF toolchain. An agent that embeds the empty file exits with an error
//! at its start.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The environment variable with the absolute path of the kernel object.
const VARIABLE: &str = "NPL_BPF_OBJECT";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    println!("cargo::rerun-if-env-changed=CARGO_TARGET_DIR");
    if reads_packed_relocations() {
        // A statically linked agent relocates itself at its start. Unpacked relocations take a megabyte of resident
        // memory; packed relocations take about ten kilobytes.
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
    let embedded = PathBuf::from(env::var("OUT_DIR")?).join("npl.bpf.o");
    if let Some(named) = env::var_os(VARIABLE).map(PathBuf::from) {
        let problem = |error| format!("embed the kernel object {} named by {VARIABLE}: {error}", named.display());
        return Ok(embed(&named, &embedded).map_err(problem)?);
    }
    let usual = target_dir()?.join("bpf").join("npl.bpf.o");
    if usual.is_file() {
        return Ok(embed(&usual, &embedded)?);
    }
    // Cargo runs this build script again on every build until the object exists.
    println!("cargo::rerun-if-changed={}", usual.display());
    println!("cargo::warning=no kernel object is embedded: `cargo xtask build` makes an agent that can start");
    Ok(fs::write(&embedded, [])?)
}

/// Whether the agent is linked with glibc 2.36 or newer, which supports packed relocations. With an older glibc, an
/// agent with packed relocations would not start. Returns false for a cross build, because `getconf` reports the glibc
/// of the build machine.
fn reads_packed_relocations() -> bool {
    if env::var("CARGO_CFG_TARGET_ENV").as_deref() != Ok("gnu") || env::var("HOST").ok() != env::var("TARGET").ok() {
        return false;
    }
    let Ok(asked) = Command::new("getconf").arg("GNU_LIBC_VERSION").output() else { return false };
    let version = String::from_utf8_lossy(&asked.stdout);
    let mut numbers = version.trim().trim_start_matches("glibc ").split('.').map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= (2, 36))
}

fn embed(object: &Path, embedded: &Path) -> std::io::Result<()> {
    println!("cargo::rerun-if-changed={}", object.display());
    fs::copy(object, embedded).map(drop)
}

fn target_dir() -> Result<PathBuf, env::VarError> {
    let workspace = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("..");
    Ok(env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace.join("target"), |dir| workspace.join(dir)))
}
