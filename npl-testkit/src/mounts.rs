// SPDX-License-Identifier: Apache-2.0
//! Mounts BPF file systems for tests, and reads the mount table.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};

use crate::process;

/// A BPF file system. Dropping this value unmounts the file system, which removes all pins in it.
#[derive(Debug)]
pub struct BpfFs {
    path: PathBuf,
}

impl BpfFs {
    /// Creates the directory `path`, and mounts a BPF file system there.
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
        // If the run has already removed its directory, there is no mount to remove.
        if below(&self.path).is_ok_and(|mounts| mounts.is_empty()) {
            return;
        }
        if let Err(err) = umount2(&self.path, MntFlags::MNT_DETACH) {
            process::report(&format!("unmount {}: {err}", self.path.display()));
        }
    }
}

/// A private mount namespace with its own BPF file system.
///
/// Other processes do not see the mount. The mount disappears when this value is dropped, and also when the process is
/// killed.
#[derive(Debug)]
pub struct PrivateBpffs {
    /// The mount namespace.
    mounts: File,
    path: PathBuf,
}

impl PrivateBpffs {
    /// Mounts a BPF file system at `path`, which must exist.
    pub fn mount(path: &Path) -> Result<Self> {
        process::on_own_thread(|| {
            unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_FS).context("create a private mount namespace")?;
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
                .context("make all mounts private")?;
            // The new namespace has copies of all mounts. Copies of BPF file systems and of namespaces would keep pins
            // and namespaces alive after their owner has unmounted the originals.
            let copies: Vec<Mount> =
                all()?.into_iter().filter(|mount| ["bpf", "nsfs"].contains(&mount.kind.as_str())).collect();
            unmount_copies(&copies)?;
            mount_bpf(path)?;
            let mounts = File::open("/proc/thread-self/ns/mnt").context("open a private mount namespace")?;
            Ok(Self { mounts, path: path.to_owned() })
        })
    }

    /// Runs `work` on a thread in the private mount namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let inside = || -> Result<T> {
            // The kernel refuses to change the mount namespace of a thread that shares its root and working directory
            // with other threads.
            unshare(CloneFlags::CLONE_FS).context("unshare the root directory")?;
            setns(&self.mounts, CloneFlags::CLONE_NEWNS).context("enter a private mount namespace")?;
            Ok(work())
        };
        process::on_own_thread(inside)
    }

    /// Creates the directory `path`, and mounts the file system there. Processes outside the private mount namespace
    /// also see this mount.
    pub fn show_at(&self, path: &Path) -> Result<BpfFs> {
        fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))?;
        let copy = self.run(|| copy_of_mount(&self.path))?.context("copy a mount")?;
        place_mount(&copy, path).with_context(|| format!("show a BPF file system at {}", path.display()))?;
        Ok(BpfFs { path: path.to_owned() })
    }
}

/// Removes copied mounts from the calling thread's private mount namespace.
fn unmount_copies(copies: &[Mount]) -> Result<()> {
    for copy in copies {
        match umount2(&copy.point, MntFlags::MNT_DETACH) {
            Ok(()) => {}
            // If another process unmounts the original and removes its mount point, the kernel also removes the copy.
            Err(Errno::ENOENT | Errno::EINVAL) if !all()?.contains(copy) => {}
            Err(err) => {
                let point = copy.point.display();
                return Err(err).with_context(|| format!("unmount {point} in the private namespace"));
            }
        }
    }
    Ok(())
}

/// Creates a detached mount of the file system that is mounted at `at`.
#[expect(unsafe_code, reason = "no library in use has open_tree")]
fn copy_of_mount(at: &Path) -> io::Result<OwnedFd> {
    const OPEN_TREE_CLONE: libc::c_uint = 1;
    const CLOSE_ON_EXEC: libc::c_uint = libc::O_CLOEXEC.cast_unsigned();
    let at = CString::new(at.as_os_str().as_bytes())?;
    // SAFETY: the path is a C string that outlives the call.
    let tree =
        unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, at.as_ptr(), OPEN_TREE_CLONE | CLOSE_ON_EXEC) };
    if tree < 0 {
        return Err(io::Error::last_os_error());
    }
    let tree = i32::try_from(tree).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned this descriptor, and this function is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(tree) })
}

#[expect(unsafe_code, reason = "no library in use has move_mount")]
fn place_mount(mount: &OwnedFd, at: &Path) -> io::Result<()> {
    const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 4;
    let at = CString::new(at.as_os_str().as_bytes())?;
    let (from, nothing) = (mount.as_raw_fd(), c"".as_ptr());
    // SAFETY: both paths are C strings that outlive the call.
    let result = unsafe {
        libc::syscall(libc::SYS_move_mount, from, nothing, libc::AT_FDCWD, at.as_ptr(), MOVE_MOUNT_F_EMPTY_PATH)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Creates the directory `to`, and bind-mounts the directory `from` there.
pub fn bind(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("create {}", to.display()))?;
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .with_context(|| format!("mount {} at {}", from.display(), to.display()))
}

/// Returns the mount points at or below `directory`, in mount order.
pub fn below(directory: &Path) -> Result<Vec<PathBuf>> {
    Ok(all()?.into_iter().map(|mount| mount.point).filter(|point| point.starts_with(directory)).collect())
}

/// One line of the mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The mount point.
    pub point: PathBuf,
    /// The type of the file system.
    pub kind: String,
    /// The options of the file system, which are equal at all its mount points. The options of a cgroup v1 hierarchy
    /// include its controllers.
    pub options: Vec<String>,
}

/// Returns all mounts that the calling thread sees.
pub fn all() -> Result<Vec<Mount>> {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").context("read /proc/thread-self/mountinfo")?;
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
    /// Another process may unmount a BPF file system after the mount table was read.
    #[test]
    fn a_copy_that_has_disappeared_needs_no_unmount() {
        let gone = Mount { point: "/run/no-such-mount-point".into(), kind: "bpf".to_owned(), options: Vec::new() };
        unmount_copies(&[gone]).unwrap();
    }
}
