// SPDX-License-Identifier: Apache-2.0
//! Debian's packages, where the machine is a Debian and we are root.

use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Result, bail};

use crate::process;

/// A program that a command of ours runs, and Debian's package that has it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) package: &'static str,
}

/// The packages of those programs that are not on the machine.
pub(crate) fn missing(programs: &[Program]) -> Vec<&'static str> {
    let mut packages: Vec<_> = programs.iter().filter(|p| process::find(p.name).is_none()).map(|p| p.package).collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

/// Installs packages, or says how the user can.
pub(crate) fn install(packages: &[&str], why: &str) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    let list = packages.join(" ");
    if process::find("apt-get").is_none() {
        bail!("{why} needs {list}, and this machine has no apt-get: install what these Debian packages contain");
    }
    if !is_root() {
        bail!("{why} needs {list}, and only root can install packages: run `sudo apt-get install {list}`");
    }
    process::say(&format!("{why}: installing {list}"));
    update_once()?;
    process::run_quietly(apt_get().args(["install", "--yes", "--no-install-recommends"]).args(packages))
}

/// Whether this machine can install packages at all.
pub(crate) fn is_available() -> bool {
    process::find("apt-get").is_some() && is_root()
}

/// Whether we may do what only root may.
pub(crate) fn is_root() -> bool {
    process::ask(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0")
}

/// A fresh machine's package lists are often empty or old.
fn update_once() -> Result<()> {
    static UPDATED: OnceLock<()> = OnceLock::new();
    if UPDATED.get().is_none() {
        process::run_quietly(apt_get().arg("update"))?;
        UPDATED.get_or_init(|| ());
    }
    Ok(())
}

/// Waits for another package manager's lock a while, and never asks anything.
fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").args(["-o", "DPkg::Lock::Timeout=120", "--quiet"]);
    command
}
