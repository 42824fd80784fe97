// SPDX-License-Identifier: Apache-2.0
//! Downloads Debian packages of other suites and of other architectures. The package sources and the installed packages
//! of this machine do not change.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::apt;
use crate::arch::Arch;
use crate::process;

/// A suite of one of Debian's archives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Suite {
    pub(super) name: &'static str,
    /// The label of the archive.
    label: &'static str,
}

impl Suite {
    pub(super) const fn main(name: &'static str) -> Self {
        Self { name, label: "Debian" }
    }

    pub(super) const fn security(name: &'static str) -> Self {
        Self { name, label: "Debian-Security" }
    }
}

/// Package sources and package lists in a directory of their own, for one architecture.
pub(super) struct Archive {
    work: PathBuf,
}

impl Archive {
    /// Downloads the package lists of suites. `work` is a new directory.
    pub(super) fn of_suites(suites: &[Suite], arch: Arch, work: &Path) -> Result<Self> {
        let sources = suites.iter().map(|suite| Ok((mirror(suite.label)?, suite.name.to_owned())));
        Self::of_sources(&sources.collect::<Result<Vec<_>>>()?, arch, work)
    }

    /// Downloads the package lists of those suites of Debian that this machine uses. `work` is a new directory.
    pub(super) fn of_machine(arch: Arch, work: &Path) -> Result<Self> {
        let suites = targets("$(LABEL) $(REPO_URI) $(RELEASE) $(COMPONENT)")?;
        let sources = suites.lines().filter_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
            ["Debian" | "Debian-Security", address, suite, "main"] => Some((address.to_owned(), suite.to_owned())),
            _ => None,
        });
        Self::of_sources(&sources.collect::<Vec<_>>(), arch, work)
    }

    fn of_sources(sources: &[(String, String)], arch: Arch, work: &Path) -> Result<Self> {
        let shown = work.display();
        for folder in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(work.join(folder)).with_context(|| format!("create {shown}/{folder}"))?;
        }
        let keys = "signed-by=/usr/share/keyrings/debian-archive-keyring.gpg";
        let line = |(address, suite): &(String, String)| format!("deb [{keys}] {address} {suite} main\n");
        // The empty list of installed packages makes apt-get download all dependencies of a package.
        let files = [
            ("sources.list", sources.iter().map(line).collect::<String>()),
            ("status", String::new()),
            ("apt.conf", configuration(work, arch)),
        ];
        for (file, text) in files {
            fs::write(work.join(file), text).with_context(|| format!("write {shown}/{file}"))?;
        }
        let archive = Self { work: work.to_owned() };
        process::run_quietly(&mut archive.tool("apt-get", &["update"]))?;
        Ok(archive)
    }

    fn tool(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", self.work.join("apt.conf")).arg("--quiet").args(arguments);
        command
    }

    /// Returns the name of the package on which `package` depends, and whose name is `prefix` followed by a version.
    pub(super) fn dependency(&self, package: &str, prefix: &str) -> Result<Option<String>> {
        let answer = process::ask(&mut self.tool("apt-cache", &["depends", package]))?;
        let names = answer.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        let versioned = |name: &&str| name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(char::is_numeric));
        Ok(names.into_iter().find(versioned).map(str::to_owned))
    }

    /// Downloads packages and unpacks their files into a directory. A package may be given with a version, as
    /// `name=version`.
    pub(super) fn unpack(&self, packages: &[String], folder: &Path) -> Result<()> {
        for package in packages {
            process::run_quietly(self.tool("apt-get", &["download", package]).current_dir(&self.work))?;
        }
        extract_all(&self.work, folder)
    }

    /// Downloads packages with all packages on which they depend, and unpacks their files into a directory.
    pub(super) fn unpack_with_dependencies(&self, packages: &[&str], folder: &Path) -> Result<()> {
        let mut install = self.tool("apt-get", &["install", "--yes", "--no-install-recommends", "--download-only"]);
        process::run_quietly(install.args(packages))?;
        extract_all(&self.work.join("cache/archives"), folder)
    }
}

fn configuration(work: &Path, arch: Arch) -> String {
    let shown = work.display();
    format!(
        "Dir::Etc::sourcelist \"{shown}/sources.list\";\nDir::Etc::sourceparts \"-\";\n\
         Dir::State::lists \"{shown}/lists\";\nDir::State::status \"{shown}/status\";\n\
         Dir::Cache \"{shown}/cache\";\nAPT::Architecture \"{arch}\";\n\
         APT::Architectures {{ \"{arch}\"; }};\nAPT::Sandbox::User \"\";\n"
    )
}

fn extract_all(packages: &Path, folder: &Path) -> Result<()> {
    let entries = packages.read_dir().with_context(|| format!("list {}", packages.display()))?;
    let paths = entries.filter_map(Result::ok).map(|entry| entry.path());
    paths.filter(|path| path.extension() == Some("deb".as_ref())).try_for_each(|path| apt::extract(&path, folder))
}

/// Lists the package archives of this machine, one line per suite and component.
fn targets(format: &str) -> Result<String> {
    let mut query = Command::new("apt-get");
    query.args(["indextargets", "--format", format, "Created-By: Packages"]);
    process::ask(&mut query).context("list the package archives of this machine")
}

/// Returns the address of the Debian archive with this label, from this machine's package sources.
fn mirror(label: &str) -> Result<String> {
    match targets("$(LABEL) $(REPO_URI)")?.lines().find_map(|line| line.strip_prefix(label)?.strip_prefix(' ')) {
        Some(address) => Ok(address.to_owned()),
        None => bail!(
            "the kernels for emulated tests come from the {label} archive, which this machine does not use: add it, or \
             test with `--kernels none`"
        ),
    }
}
