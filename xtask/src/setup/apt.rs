// SPDX-License-Identifier: Apache-2.0
//! Installs Debian packages if this machine runs Debian and the user is root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context as _, Result, bail};

use crate::process;

/// A program that xtask runs, and the Debian package that contains it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) package: &'static str,
}

/// Returns the Debian packages of those programs that are not installed.
pub(crate) fn missing(programs: &[Program]) -> Vec<&'static str> {
    let mut packages: Vec<_> = programs.iter().filter(|p| process::find(p.name).is_none()).map(|p| p.package).collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

/// Installs packages. If xtask cannot install packages here, returns an error with advice.
pub(crate) fn install(packages: &[&str], why: &str) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    let list = packages.join(" ");
    if process::find("apt-get").is_none() {
        bail!("{why} needs {list}, and this machine has no apt-get: install the programs of these Debian packages");
    }
    if !is_root() {
        bail!("{why} needs {list}, and only root can install packages: run `sudo apt-get install {list}`");
    }
    process::say(&format!("{why}: installing {list}"));
    update_once()?;
    process::run_quietly(apt_get().args(["install", "--yes", "--no-install-recommends"]).args(packages))
}

/// Downloads a package from this machine's package sources into a folder, without installing the package. Returns the
/// path of the package file.
fn download(package: &str, folder: &Path) -> Result<PathBuf> {
    if process::find("apt-get").is_none() {
        bail!("this machine has no apt-get: install {package}, so that its programs are in the search path");
    }
    let fetch = |folder: &Path| {
        // Because of this option, apt-get does not warn that the user _apt may not write to the folder.
        let mut command = apt_get();
        command.args(["-o", "APT::Sandbox::User=root", "download", package]).current_dir(folder);
        process::run_quietly(&mut command)
    };
    if fetch(folder).is_err() {
        // The package lists are updated first, because the lists of a fresh machine are often empty or old.
        update_once()?;
        fetch(folder)?;
    }
    let entries = folder.read_dir().with_context(|| format!("list {}", folder.display()))?;
    let mut files = entries.filter_map(Result::ok).map(|entry| entry.path());
    files
        .find(|path| path.extension().is_some_and(|ending| ending == "deb"))
        .with_context(|| format!("apt-get downloaded no file of {package}"))
}

/// Downloads a package and unpacks its files into a folder, without installing the package. `work` is a new folder for
/// the package file.
pub(crate) fn unpack(package: &str, work: &Path, folder: &Path) -> Result<()> {
    fs::create_dir_all(work).with_context(|| format!("create {}", work.display()))?;
    extract(&download(package, work)?, folder)
}

/// Unpacks the files of a package file into a folder.
pub(crate) fn extract(package: &Path, folder: &Path) -> Result<()> {
    process::ask(Command::new("dpkg-deb").arg("--extract").arg(package).arg(folder)).map(drop)
}

/// Whether xtask can install packages on this machine.
pub(crate) fn is_available() -> bool {
    process::find("apt-get").is_some() && is_root()
}

/// Whether the user is root.
pub(crate) fn is_root() -> bool {
    process::ask(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0")
}

/// Updates the package lists once per run of xtask, because the lists of a fresh machine are often empty or old.
fn update_once() -> Result<()> {
    static UPDATED: OnceLock<()> = OnceLock::new();
    if UPDATED.get().is_none() {
        process::run_quietly(apt_get().arg("update"))?;
        UPDATED.get_or_init(|| ());
    }
    Ok(())
}

/// Returns a non-interactive `apt-get` that waits for another package manager's lock.
fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").args(["-o", "DPkg::Lock::Timeout=120", "--quiet"]);
    command
}
