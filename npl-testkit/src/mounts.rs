// SPDX-License-Identifier: Apache-2.0
//! BPF file systems for tests, and what is mounted where.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};

use crate::process;

/// A BPF file system of its own; unmounted on drop, with which all that is pinned in it goes.
#[derive(Debug)]
pub struct BpfFs {
    path: PathBuf,
}

impl BpfFs {
    /// Mounts at `path`, which is created.
    pub fn mount(path: &Path) -> Result<Self> {
        fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))?;
        mount_bpf(path)?;
        Ok(Self { path: path.to_owned() })
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for BpfFs {
    fn drop(&mut self) {
        // The run may have removed its folder before.
        if below(&self.path).is_ok_and(|mounts| mounts.is_empty()) {
            return;
        }
        if let Err(err) = umount2(&self.path, MntFlags::MNT_DETACH) {
            process::report(&format!("unmount {}: {err}", self.path.display()));
        }
    }
}

/// A private view of all mounts, in which a BPF file system of its own is mounted.
///
/// Nothing of it is seen outside, and it is gone on drop, also when the process is killed.
#[derive(Debug)]
pub struct PrivateBpffs(File);

impl PrivateBpffs {
    /// Mounts one at `path`, which is there.
    pub fn mount(path: &Path) -> Result<Self> {
        process::on_own_thread(|| {
            unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_FS).context("create a private mount namespace")?;
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
                .context("make all mounts private")?;
            mount_bpf(path)?;
            File::open("/proc/thread-self/ns/mnt").map(Self).context("open a private mount namespace")
        })
    }

    /// Runs `work` on a thread that sees it.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let inside = || -> Result<T> {
            // Who shares a root and a working directory with other threads may not go elsewhere.
            unshare(CloneFlags::CLONE_FS).context("have a root of one's own")?;
            setns(&self.0, CloneFlags::CLONE_NEWNS).context("enter a private mount namespace")?;
            Ok(work())
        };
        process::on_own_thread(inside)
    }
}

/// Shows the folder `from` at `to` as well, which is created.
pub fn bind(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("create {}", to.display()))?;
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .with_context(|| format!("mount {} at {}", from.display(), to.display()))
}

/// The mount points at or below `directory`, in the order in which they were mounted.
pub fn below(directory: &Path) -> Result<Vec<PathBuf>> {
    Ok(all()?.into_iter().map(|mount| mount.point).filter(|point| point.starts_with(directory)).collect())
}

/// One line of this process's mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Where it is mounted.
    pub point: PathBuf,
    /// The type of the file system.
    pub kind: String,
    /// Its options, which are the same wherever it is mounted: of a hierarchy of control groups, its controllers.
    pub options: Vec<String>,
}

/// Everything that this process sees mounted.
pub fn all() -> Result<Vec<Mount>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
    Ok(table.lines().filter_map(parse).collect())
}

fn parse(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let point = PathBuf::from(left.split(' ').nth(4)?);
    let mut right = right.split(' ');
    let kind = right.next()?.to_owned();
    let options = right.nth(1)?.split(',').map(str::to_owned).collect();
    Some(Mount { point, kind, options })
}

fn mount_bpf(path: &Path) -> Result<()> {
    mount(Some("bpf"), path, Some("bpf"), MsFlags::empty(), None::<&str>)
        .with_context(|| format!("mount a BPF file system at {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optional_fields_of_a_mount_line_are_skipped() {
        let line = "36 35 98:0 /mnt1 /mnt/parent rw,noatime shared:1 master:2 - bpf none rw,errors=continue";
        let options = vec!["rw".to_owned(), "errors=continue".to_owned()];
        assert_eq!(parse(line), Some(Mount { point: "/mnt/parent".into(), kind: "bpf".to_owned(), options }));
    }
}
