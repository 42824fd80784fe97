// SPDX-License-Identifier: Apache-2.0
//! Unpacks Debian's Prometheus into the cache. The package is not installed, because its installation would start a
//! server on this machine.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::apt;
use crate::{cache, process};

const PACKAGE: &str = "prometheus";

/// The programs of Prometheus that the tests run.
const PROGRAMS: [&str; 2] = ["prometheus", "promtool"];

/// Returns a directory with `prometheus` and `promtool`: if Prometheus is installed, its directory; otherwise the cache
/// directory, to which this function downloads the programs if they are missing there.
pub(super) fn obtain() -> Result<PathBuf> {
    let installed = PROGRAMS.map(|program| process::find(program).and_then(|path| Some(path.parent()?.to_owned())));
    if let [Some(server), Some(tool)] = installed
        && server == tool
    {
        return Ok(server);
    }
    cache::obtain(PACKAGE, &[PROGRAMS.join(" ").as_bytes()], |folder| {
        process::say("prometheus: downloading Debian's package for tests of alerts and of the dashboard");
        unpack(folder)
    })
}

fn unpack(folder: &Path) -> Result<()> {
    let work = folder.join("work");
    apt::unpack(PACKAGE, &work, &work.join("unpacked"))?;
    for program in PROGRAMS {
        let unpacked = work.join("unpacked/usr/bin").join(program);
        fs::rename(&unpacked, folder.join(program)).with_context(|| format!("the package has no {program}"))?;
    }
    fs::remove_dir_all(&work).context("remove the downloaded package")
}
