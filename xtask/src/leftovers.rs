// SPDX-License-Identifier: Apache-2.0
//! Checks with npl-testkit's program `npl-residue` that tests leave no namespaces, devices or other objects behind on
//! this machine.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::{build, paths, process};

/// A file that lists the namespaces, devices and similar objects that existed before the tests.
#[derive(Debug)]
pub(crate) struct Leftovers {
    before: PathBuf,
}

impl Leftovers {
    /// Writes the list of the objects that exist now.
    pub(crate) fn look() -> Result<Self> {
        let before = paths::target_dir().join("residue-before-tests.txt");
        let list = process::ask(&mut residue())?;
        fs::write(&before, list).with_context(|| format!("write {}", before.display()))?;
        Ok(Self { before })
    }

    /// Waits up to a minute, longer on a busy machine, until all objects that are not in the list of [`Self::look`] are
    /// gone. Fails if any remain.
    pub(crate) fn check(&self) -> Result<()> {
        process::run(residue().arg("--nothing-beyond").arg(&self.before))
    }
}

fn residue() -> Command {
    Command::new(build::built_folder().join("npl-residue"))
}
