// SPDX-License-Identifier: Apache-2.0
//! cgroups for test Nodes: each is a child of the root of a mounted hierarchy, v1 or v2.
//!
//! A kubelet requires exclusive control of its cgroup root. Each Node therefore has a cgroup namespace with the Node's
//! own group as root. A Node's groups have the same name in all hierarchies, so that a cleanup finds them by name.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;

use crate::{mounts, poll};

/// The parent of all cgroup v1 mounts, or the mount point of the only hierarchy.
pub(crate) const ROOT: &str = "/sys/fs/cgroup";

/// The group of a Node's own processes, like `system.slice` on a real Node. Without this group, each process would have
/// as large a CPU share as all Pods together. Also, cgroup v2 forbids processes in a group that delegates controllers
/// to its children.
const SYSTEM: &str = "system";

/// The time limit of a removal. A group stays busy for about 100 ms after its last process has exited.
const REMOVED_WITHIN: Duration = Duration::from_mins(1);

/// Mount options of cgroup v1 that are not controllers.
const FLAGS: [&str; 9] =
    ["rw", "ro", "xattr", "clone_children", "noprefix", "cpuset_v2_mode", "favordynmods", "all", "none"];

/// One mounted cgroup hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// The mount point.
    pub point: PathBuf,
    /// The cgroup version.
    pub version: Version,
}

/// The cgroup version of a hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Version {
    /// cgroup v1, with the controllers (or the name) from its mount options.
    V1(Vec<String>),
    /// cgroup v2, with every controller that no v1 hierarchy uses.
    V2,
}

/// A Node's group in every hierarchy.
#[derive(Clone, Debug)]
pub struct Cgroup {
    name: String,
    hierarchies: Vec<Hierarchy>,
}

impl Hierarchy {
    /// Returns all hierarchies that are mounted at or below `/sys/fs/cgroup`, without duplicates.
    pub fn all() -> Result<Vec<Self>> {
        let mut hierarchies: Vec<Self> = Vec::new();
        for mount in mounts::all()?.into_iter().filter(|mount| mount.point.starts_with(ROOT)) {
            let version = match mount.kind.as_str() {
                "cgroup" => Version::V1(controllers(&mount.options)),
                "cgroup2" => Version::V2,
                _other => continue,
            };
            if !hierarchies.iter().any(|known| known.version == version) {
                hierarchies.push(Self { point: mount.point, version });
            }
        }
        Ok(hierarchies)
    }

    /// Creates a group that processes can join.
    fn add(&self, group: &Path) -> Result<()> {
        fs::create_dir(group).with_context(|| format!("create cgroup {}", group.display()))?;
        let has_cpuset =
            matches!(&self.version, Version::V1(controllers) if controllers.iter().any(|it| it == "cpuset"));
        // These files are empty in a new group, so they are copied from the parent. Without a value, no process can
        // join the group.
        for file in ["cpuset.cpus", "cpuset.mems"].into_iter().filter(|_file| has_cpuset) {
            fs::read(self.point.join(file))
                .and_then(|value| fs::write(group.join(file), value))
                .with_context(|| format!("copy {file} to {}", group.display()))?;
        }
        Ok(())
    }
}

impl Cgroup {
    /// Creates the group in every hierarchy.
    pub fn create(name: &str) -> Result<Self> {
        let cgroup = Self { name: name.to_owned(), hierarchies: Hierarchy::all()? };
        ensure!(!cgroup.hierarchies.is_empty(), "no cgroups are mounted at {ROOT}: mount cgroup2 there");
        for hierarchy in &cgroup.hierarchies {
            if hierarchy.version == Version::V2 {
                pass_controllers_on(&hierarchy.point)?;
            }
            let group = hierarchy.point.join(name);
            hierarchy.add(&group)?;
            hierarchy.add(&group.join(SYSTEM))?;
        }
        Ok(cgroup)
    }

    /// Finds a group that another process created. That process may have created the group in only some of the
    /// hierarchies.
    pub fn find(name: &str) -> Result<Self> {
        let mut hierarchies = Hierarchy::all()?;
        hierarchies.retain(|hierarchy| hierarchy.point.join(name).is_dir());
        Ok(Self { name: name.to_owned(), hierarchies })
    }

    /// The name of the group, which is the same in all hierarchies.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes `command` start in the Node's top-level groups, which become the roots of the hierarchies in the Node's
    /// cgroup namespace.
    pub(crate) fn hold_roots(&self, command: &mut Command) -> Result<()> {
        self.hold(command, |group| group)
    }

    /// Makes `command` start as one of the Node's own processes.
    pub(crate) fn hold_system(&self, command: &mut Command) -> Result<()> {
        self.hold(command, |group| group.join(SYSTEM))
    }

    /// Moves the calling process into the system group and delegates every controller to the Node's child groups.
    pub(crate) fn divide(&self) -> Result<()> {
        for hierarchy in &self.hierarchies {
            let group = hierarchy.point.join(&self.name);
            let procs = group.join(SYSTEM).join("cgroup.procs");
            fs::write(&procs, "0").with_context(|| format!("write {}", procs.display()))?;
            if hierarchy.version == Version::V2 {
                pass_controllers_on(&group)?;
            }
        }
        Ok(())
    }

    #[expect(unsafe_code, reason = "only a pre_exec hook runs between fork and exec")]
    fn hold(&self, command: &mut Command, group: impl Fn(PathBuf) -> PathBuf) -> Result<()> {
        let open = |hierarchy: &Hierarchy| {
            let procs = group(hierarchy.point.join(&self.name)).join("cgroup.procs");
            File::options().write(true).open(&procs).with_context(|| format!("open {}", procs.display()))
        };
        let files = self.hierarchies.iter().map(open).collect::<Result<Vec<_>>>()?;
        // Writing 0 moves the process that writes.
        let join = move || files.iter().try_for_each(|mut file| file.write_all(b"0"));
        // SAFETY: the hook makes system calls and allocates nothing.
        unsafe {
            command.pre_exec(join);
        }
        Ok(())
    }
}

/// Returns the names of top-level groups that begin with `prefix`.
pub(crate) fn names(prefix: &str) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for hierarchy in Hierarchy::all()? {
        let entries = fs::read_dir(&hierarchy.point).into_iter().flatten().flatten();
        names.extend(entries.filter_map(|it| it.file_name().into_string().ok()).filter(|it| it.starts_with(prefix)));
    }
    Ok(names)
}

/// Removes a group from every hierarchy after its last process has exited.
pub(crate) fn remove(name: &str) -> Result<()> {
    Hierarchy::all()?.iter().try_for_each(|hierarchy| delete(&hierarchy.point.join(name)))
}

/// Removes a group directory and its children after the last process has exited. An absent directory is no error.
pub(crate) fn delete(group: &Path) -> Result<()> {
    let mut last = None;
    poll::until_gone("the removal of a cgroup", REMOVED_WITHIN, || {
        last = remove_tree(group).err();
        last.is_none()
    })
    .with_context(|| format!("remove {}: {last:?}", group.display()))
}

/// Removes the subdirectories of a group directory, and then the directory itself. The kernel removes the control files
/// of a group together with the directory.
fn remove_tree(group: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(group) {
        Err(gone) if gone.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(group)
}

/// Delegates every controller of a cgroup v2 group to its children.
fn pass_controllers_on(group: &Path) -> Result<()> {
    let file = group.join("cgroup.controllers");
    let controllers = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    for controller in controllers.split_whitespace() {
        let written = fs::write(group.join("cgroup.subtree_control"), format!("+{controller}"));
        match written.map_err(|err| (err.raw_os_error().map(Errno::from_raw), err)) {
            Ok(()) => {}
            // The kernel does not delegate the cpu controller while groups other than the root contain real-time
            // processes, and never delegates some controllers to threaded groups, so these errors are ignored.
            Err((Some(Errno::EINVAL | Errno::ENOTSUP), _unavailable)) => {}
            Err((Some(Errno::EBUSY), err)) => {
                return Err(err).with_context(|| {
                    format!(
                        "delegate {controller} to the children of {}: the group itself contains processes",
                        group.display()
                    )
                });
            }
            Err((_, err)) => {
                return Err(err)
                    .with_context(|| format!("delegate {controller} to the children of {}", group.display()));
            }
        }
    }
    Ok(())
}

fn controllers(options: &[String]) -> Vec<String> {
    options
        .iter()
        .filter(|option| !FLAGS.contains(&option.as_str()) && !option.starts_with("release_agent="))
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_flags_are_not_taken_for_controllers() {
        let of = |text: &str| controllers(&text.split(',').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(of("rw,cpu,cpuacct"), ["cpu", "cpuacct"]);
        assert_eq!(of("rw,xattr,release_agent=/lib/systemd/agent,name=systemd"), ["name=systemd"]);
    }
}
