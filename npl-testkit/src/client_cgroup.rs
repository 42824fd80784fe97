// SPDX-License-Identifier: Apache-2.0
//! Threaded cgroup v2 groups for the clients of a test. Socket programs that are attached to such a group see the
//! sockets of these clients and no others.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::{cgroups, mounts, process};

/// A cgroup below the cgroup of this process. Dropping this value removes the cgroup.
#[derive(Debug)]
pub struct ClientCgroup {
    path: PathBuf,
}

impl ClientCgroup {
    /// Creates a threaded cgroup below the cgroup of this process.
    pub(crate) fn create(name: &str) -> Result<Self> {
        let path = own()?.join(name);
        fs::create_dir(&path).with_context(|| format!("create cgroup {}", path.display()))?;
        let cgroup = Self { path };
        cgroup.write("cgroup.type", "threaded")?;
        Ok(cgroup)
    }

    /// The cgroup's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `work` on a new thread in this cgroup. Sockets that `work` opens stay in this cgroup even when other
    /// threads use them; threads that `work` starts also run in this cgroup.
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

/// Deletes the cgroups below the cgroup of this process whose names begin with `prefix`.
pub(crate) fn delete_all(prefix: &str) -> Result<()> {
    // Without a cgroup v2 hierarchy, no run can have created a cgroup, so there is no cgroup to delete.
    let Ok(own) = own() else { return Ok(()) };
    for entry in fs::read_dir(&own).with_context(|| format!("list {}", own.display()))?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            cgroups::delete(&entry.path())?;
        }
    }
    Ok(())
}

/// The directory of this process's own cgroup.
fn own() -> Result<PathBuf> {
    let mounts = mounts::all()?;
    let mount = mounts
        .into_iter()
        .find(|mount| mount.kind == "cgroup2")
        .context("no cgroup v2 hierarchy is mounted: mount one with `mount -t cgroup2 cgroup2 DIRECTORY`")?;
    let table = fs::read_to_string("/proc/self/cgroup").context("read /proc/self/cgroup")?;
    let path = table.lines().find_map(|line| line.strip_prefix("0::/"));
    Ok(mount.point.join(path.context("this process is in no cgroup v2 group")?))
}
