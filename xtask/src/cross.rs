// SPDX-License-Identifier: Apache-2.0
//! Configures cargo for another architecture than this machine's: the Rust compiler, its standard library for the other
//! architecture, and the C compiler, which also links.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::arch::Arch;
use crate::setup::{self, Need};
use crate::{ebpf, paths, process};

/// Adds to a cargo command the environment variables for a target of another architecture. `flags` are the compiler
/// flags of the target.
///
/// If `rustup target add` has installed the standard library for the architecture, the toolchain that runs xtask
/// compiles the code. Otherwise, Debian's compiler compiles the code, with the standard library from Debian's package
/// for the architecture.
pub(crate) fn configure(command: &mut Command, arch: Arch, flags: &str) -> Result<()> {
    let sysroot = prepare(arch)?;
    let (target, compiler) = (arch.target(), format!("{}-gcc", arch.gnu_prefix()));
    if let Some(sysroot) = sysroot {
        command.env("RUSTC", ebpf::SYSTEM_RUSTC).env("RUSTFLAGS", format!("{flags} --sysroot={}", sysroot.display()));
    }
    let [for_cargo, for_cc] = [target.to_uppercase(), target].map(|name| name.replace('-', "_"));
    command.env(format!("CARGO_TARGET_{for_cargo}_LINKER"), &compiler).env(format!("CC_{for_cc}"), &compiler);
    Ok(())
}

/// Installs the compilers and the standard library for an architecture. Returns the system root with the standard
/// library of Debian's compiler; `None` if the toolchain that runs xtask has a standard library for the architecture.
pub(crate) fn prepare(arch: Arch) -> Result<Option<PathBuf>> {
    setup::ensure(&[Need::CrossCompiler(arch)])?;
    let own = Path::new(&paths::cargo()).with_file_name("rustc");
    if has_standard_library(&own, arch) {
        return Ok(None);
    }
    let sysroot = system_root(arch)?;
    ensure!(
        !sysroot.to_string_lossy().contains(char::is_whitespace),
        "the path of the cache, {}, contains a space, which RUSTFLAGS cannot hold: set XDG_CACHE_HOME",
        sysroot.display()
    );
    process::say(&format!(
        "{arch}: {} compiles with the standard library in {}",
        ebpf::SYSTEM_RUSTC,
        sysroot.display()
    ));
    Ok(Some(sysroot))
}

/// Whether a standard library for the architecture is installed for a compiler.
fn has_standard_library(rustc: &Path, arch: Arch) -> bool {
    let mut query = Command::new(rustc);
    query.args(["--print", "target-libdir", "--target", &arch.target()]);
    process::ask(&mut query).is_ok_and(|folder| Path::new(folder.trim()).is_dir())
}

/// Returns a system root that contains the standard library of Debian's compiler for the architecture.
fn system_root(arch: Arch) -> Result<PathBuf> {
    ensure!(
        setup::can_install(),
        "a build for {arch} needs the standard library of Rust for it: run `rustup target add {}`, or as root on \
         Debian this command again",
        arch.target()
    );
    if process::find(ebpf::SYSTEM_RUSTC).is_none() {
        setup::ensure(&[Need::EbpfCompiler])?;
    }
    setup::standard_library(arch)
}
