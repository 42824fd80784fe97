// SPDX-License-Identifier: Apache-2.0
//! Downloads Debian's packages for another architecture than this machine's: the standard library of Rust, and the
//! programs of emulated machines. The packages are unpacked into the cache, and not installed.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::archive::Archive;
use super::{EMULATION, TEST_NETWORK};
use crate::arch::Arch;
use crate::{cache, process};

/// Debian's package of the compiler of the kernel programs.
const COMPILER: &str = "rustc-web";
/// Debian's package with the standard library of [`COMPILER`].
const STANDARD_LIBRARY: &str = "libstd-rust-web-dev";

/// Directories of packages that no program reads at run time.
const UNUSED: [&str; 3] = ["usr/share", "usr/include", "var"];

/// Returns a system root with the standard library of Debian's compiler for the architecture. The version of the
/// library is the version of the installed compiler, because a compiler reads only libraries of its own version.
pub(crate) fn standard_library(arch: Arch) -> Result<PathBuf> {
    let mut query = Command::new("dpkg-query");
    let version = process::ask(query.args(["--show", "--showformat=${Version}", COMPILER]))?;
    cache::obtain(&format!("std-{arch}"), &[STANDARD_LIBRARY.as_bytes(), version.as_bytes()], |folder| {
        process::say(&format!("Rust {version} for {arch}: downloading Debian's package of the standard library"));
        let work = folder.join("work");
        let unpacked = work.join("unpacked");
        Archive::of_machine(arch, &work)?.unpack(&[format!("{STANDARD_LIBRARY}={version}")], &unpacked)?;
        let library = folder.join("lib/rustlib");
        fs::create_dir_all(folder.join("lib")).with_context(|| format!("create {}/lib", folder.display()))?;
        fs::rename(unpacked.join("usr/lib/rustlib"), &library).context("move the standard library")?;
        fs::remove_dir_all(&work).context("remove the downloaded package")
    })
}

/// Returns a root directory with the programs that emulated machines of the architecture run, and with their libraries.
pub(crate) fn guest_programs(arch: Arch) -> Result<PathBuf> {
    let mut packages: Vec<_> = TEST_NETWORK.iter().map(|program| program.package).collect();
    packages.extend(EMULATION.iter().filter(|program| program.name == "busybox").map(|program| program.package));
    packages.dedup();
    cache::obtain(&format!("programs-{arch}"), &[packages.join(" ").as_bytes()], |folder| {
        process::say(&format!("programs of emulated {arch} machines: downloading Debian's packages"));
        let work = folder.join("work");
        Archive::of_machine(arch, &work)?.unpack_with_dependencies(&packages, folder)?;
        for unused in UNUSED.map(|path| folder.join(path)).iter().chain([&work]).filter(|path| path.is_dir()) {
            fs::remove_dir_all(unused).with_context(|| format!("remove {}", unused.display()))?;
        }
        link_alternatives(folder)
    })
}

/// Links the names of iptables' programs to the program that serves all of them. Normally, the installation of the
/// package adds these links.
fn link_alternatives(root: &Path) -> Result<()> {
    for name in ["iptables", "ip6tables"] {
        let link = root.join("usr/sbin").join(name);
        symlink("xtables-nft-multi", &link).with_context(|| format!("create {}", link.display()))?;
    }
    Ok(())
}
