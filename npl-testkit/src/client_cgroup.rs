// SPDX-License-Identifier: Apache-2.0
//! Control groups of version 2 for single threads, so that programs for sockets meet nobody but a test's own clients.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::{cgroups, mounts, process};

/// A cgroup below that of this process; removed on drop.
#[derive(Debug)]
pub struct ClientCgroup {
    path: PathBuf,
}

impl ClientCgroup {
    /// Creates it, below the cgroup of this process, for single threads of this process.
    pub(crate) fn create(name: &str) -> Result<Self> {
        let path = own()?.join(name);
        fs::create_dir(&path).with_context(|| format!("create cgroup {}", path.display()))?;
        let cgroup = Self { path };
        cgroup.write("cgroup.type", "threaded")?;
        Ok(cgroup)
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `work` inside, on a thread of its own. A socket that it opens belongs to this cgroup wherever it is used, and
    /// so do those of threads that it starts.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let inside = || -> Result<T> {
            self.write("cgroup.threads", "0")?;
            Ok(work())
        };
        process::on_own_thread(inside)
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let file = self.path.join(file);
        fs::write(&file, value).with_context(|| format!("write {value} to {}", file.display()))
    }
}

impl Drop for ClientCgroup {
    fn drop(&mut self) {
        if let Err(err) = cgroups::delete(&self.path) {
            process::report(&format!("{err:#}"));
        }
    }
}

/// Deletes the cgroups below that of this process whose names begin so.
pub(crate) fn delete_all(prefix: &str) -> Result<()> {
    // Where there is no hierarchy, no run has made a cgroup.
    let Ok(own) = own() else { return Ok(()) };
    for entry in fs::read_dir(&own).with_context(|| format!("list {}", own.display()))?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            cgroups::delete(&entry.path())?;
        }
    }
    Ok(())
}

/// The folder of this process's own cgroup.
fn own() -> Result<PathBuf> {
    let mounts = mounts::all()?;
    let mount =
        mounts.into_iter().find(|mount| mount.kind == "cgroup2").context("no cgroup v2 hierarchy is mounted")?;
    let table = fs::read_to_string("/proc/self/cgroup").context("read /proc/self/cgroup")?;
    let path = table.lines().find_map(|line| line.strip_prefix("0::/"));
    Ok(mount.point.join(path.context("this process is in no cgroup of version 2")?))
}
