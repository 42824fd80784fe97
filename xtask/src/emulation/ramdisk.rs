// SPDX-License-Identifier: Apache-2.0
//! Builds the root file system of a guest: busybox, tools with their libraries, kernel modules, the test binary, and
//! copies of this machine's files.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::Guest;
use crate::arch::Arch;
use crate::setup::{self, KernelImage};
use crate::{files, process};

/// The path of the test binary in the guest.
pub(super) const TEST_BINARY: &str = "/test";

/// The programs that npl-testkit runs in network tests.
const TOOLS: [&str; 6] = ["ip", "tc", "ethtool", "nft", "iptables", "conntrack"];

/// The folders that are created in the guest's root file system before files are copied to it.
const FOLDERS: [&str; 14] = [
    "bin", "dev", "etc", "newroot", "proc", "root", "run", "sbin", "sys", "tmp", "usr/bin", "usr/sbin", "var/lib",
    "var/log",
];

/// Writes the guest's RAM disk: an archive that the guest's kernel unpacks.
pub(super) fn write(archive: &Path, image: &KernelImage, guest: &Guest) -> Result<()> {
    let root = archive.with_extension("root");
    if root.exists() {
        fs::remove_dir_all(&root).with_context(|| format!("remove the old {}", root.display()))?;
    }
    for folder in FOLDERS {
        fs::create_dir_all(root.join(folder)).with_context(|| format!("create {}/{folder}", root.display()))?;
    }
    if guest.arch.is_native() {
        add_programs(&root, guest.programs)?;
    } else {
        add_foreign_programs(&root, guest.arch)?;
    }
    files::copy(Path::new(guest.test.get_program()), &below(&root, Path::new(TEST_BINARY)))?;
    for path in &guest.copies {
        files::copy(path, &below(&root, path))?;
    }
    files::copy(&image.library(), &root.join("lib"))?;
    files::write_executable(&root.join("init"), &guest.init_script())?;
    fs::write(root.join("etc/hosts"), "127.0.0.1 localhost\n::1 localhost\n").context("write etc/hosts")?;
    pack(&root, archive)?;
    fs::remove_dir_all(&root).with_context(|| format!("remove {}", root.display()))
}

fn add_programs(root: &Path, additional: &[&str]) -> Result<()> {
    let busybox = process::find("busybox").context("busybox is not installed: run `cargo xtask setup`")?;
    files::copy(&busybox, &root.join("bin/busybox"))?;
    let mut libraries = shared_libraries(&busybox)?;
    symlink("/bin/busybox", root.join("sbin/modprobe")).context("link modprobe")?;
    for tool in TOOLS.iter().chain(additional) {
        let Some(path) = process::find(tool) else { bail!("{tool} is not installed: run `cargo xtask setup`") };
        // The guest gets the binary to which the tool's links point, and a link with the tool's name. With Debian's
        // alternatives, one binary serves several tools, and acts according to the name by which it is called.
        let real = path.canonicalize().with_context(|| format!("resolve the links of {tool}"))?;
        libraries.extend(shared_libraries(&real)?);
        files::copy(&real, &below(root, &real))?;
        let called = root.join("usr/sbin").join(tool);
        if !called.exists() {
            symlink(&real, &called).with_context(|| format!("link {tool}"))?;
        }
    }
    for library in &libraries {
        files::copy(library, &below(root, library))?;
    }
    add_match_extensions(root, &libraries)
}

/// Adds the programs that every guest needs, from Debian's packages for another architecture.
fn add_foreign_programs(root: &Path, arch: Arch) -> Result<()> {
    let programs = setup::guest_programs(arch)?;
    // `cp --archive` copies the symbolic links between programs and libraries as links.
    process::ask(Command::new("cp").arg("--archive").arg(programs.join(".")).arg(root))?;
    symlink("/bin/busybox", root.join("sbin/modprobe")).context("link modprobe")
}

/// Adds the match extensions that iptables loads by name at run time, which `ldd` does not list.
fn add_match_extensions(root: &Path, libraries: &BTreeSet<PathBuf>) -> Result<()> {
    let folders: BTreeSet<PathBuf> = libraries.iter().filter_map(|path| Some(path.parent()?.join("xtables"))).collect();
    // Links are resolved: `ldd` prints paths below /lib, which is a link to /usr/lib, but iptables searches /usr/lib.
    let real: BTreeSet<PathBuf> = folders.iter().filter_map(|folder| folder.canonicalize().ok()).collect();
    real.iter().try_for_each(|folder| files::copy(folder, &below(root, folder)))
}

fn shared_libraries(program: &Path) -> Result<BTreeSet<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("list the libraries of a program with ldd")?;
    // A failure of ldd is ignored, because ldd fails for a static program, which needs no shared libraries.
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .filter(|path| path.is_file())
        .collect())
}

fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Packs the root directory as an uncompressed archive: on an emulated machine, decompressing takes longer than reading
/// the larger file.
fn pack(root: &Path, archive: &Path) -> Result<()> {
    let names = process::ask(Command::new("find").arg(".").current_dir(root))?;
    let output = File::create(archive).with_context(|| format!("create {}", archive.display()))?;
    let mut cpio = Command::new("cpio")
        .args(["--create", "--format=newc", "--quiet", "--owner=0:0"])
        .current_dir(root)
        .stdin(Stdio::piped())
        .stdout(output)
        .spawn()
        .context("start cpio")?;
    let mut input = cpio.stdin.take().context("write file names to cpio")?;
    input.write_all(names.as_bytes()).context("write file names to cpio")?;
    drop(input);
    let status = cpio.wait().context("wait for cpio")?;
    if !status.success() {
        bail!("cpio could not pack {}", root.display());
    }
    Ok(())
}
