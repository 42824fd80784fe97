// SPDX-License-Identifier: Apache-2.0
//! Control groups for Nodes: one child of the root of every hierarchy, whichever versions the machine has mounted.
//!
//! A kubelet believes that it has the whole tree. Each Node has a control group namespace whose root is its own group, so
//! that several kubelets do not meet, and all of a Node is found again by the group's name.

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

/// Where hierarchies are mounted: all of them below, or the only one here.
pub(crate) const ROOT: &str = "/sys/fs/cgroup";

/// The group that a Node's own processes are in, as `system.slice` is elsewhere: beside that of its Pods, each of them
/// would have a share of the processor like all Pods together. In version 2, a group with children has no processes.
const SYSTEM: &str = "system";

/// Groups stay busy for some 100 ms after their last process has ended.
const REMOVED_WITHIN: Duration = Duration::from_secs(15);

/// Mount options of version 1 that are not controllers.
const FLAGS: [&str; 9] =
    ["rw", "ro", "xattr", "clone_children", "noprefix", "cpuset_v2_mode", "favordynmods", "all", "none"];

/// One hierarchy of control groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Where it is mounted.
    pub point: PathBuf,
    /// The version of its interface.
    pub version: Version,
}

/// The version of a hierarchy's interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Version {
    /// With the controllers named in its mount options, or a name of its own.
    V1(Vec<String>),
    /// With all controllers that no hierarchy of version 1 has.
    V2,
}

/// A Node's group in every hierarchy.
#[derive(Clone, Debug)]
pub struct Cgroup {
    name: String,
    hierarchies: Vec<Hierarchy>,
}

impl Hierarchy {
    /// Those of this machine, each once.
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

    /// Adds a group that processes may join.
    fn add(&self, group: &Path) -> Result<()> {
        fs::create_dir(group).with_context(|| format!("create control group {}", group.display()))?;
        let has_cpuset =
            matches!(&self.version, Version::V1(controllers) if controllers.iter().any(|it| it == "cpuset"));
        // Empty at first, and no process may join it then.
        for file in ["cpuset.cpus", "cpuset.mems"].into_iter().filter(|_file| has_cpuset) {
            fs::read(self.point.join(file))
                .and_then(|value| fs::write(group.join(file), value))
                .with_context(|| format!("copy {file} to {}", group.display()))?;
        }
        Ok(())
    }
}

impl Cgroup {
    /// Makes it in every hierarchy.
    pub fn create(name: &str) -> Result<Self> {
        let cgroup = Self { name: name.to_owned(), hierarchies: Hierarchy::all()? };
        ensure!(!cgroup.hierarchies.is_empty(), "no control groups are mounted at {ROOT}: mount cgroup2 there");
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

    /// The group of this name that another process has made, which may have seen fewer hierarchies.
    pub fn find(name: &str) -> Result<Self> {
        let mut hierarchies = Hierarchy::all()?;
        hierarchies.retain(|hierarchy| hierarchy.point.join(name).is_dir());
        Ok(Self { name: name.to_owned(), hierarchies })
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lets `command` start in the groups themselves, to make them the root of a namespace.
    pub(crate) fn hold_roots(&self, command: &mut Command) -> Result<()> {
        self.hold(command, |group| group)
    }

    /// Lets `command` start as one of the Node's own processes.
    pub(crate) fn hold_system(&self, command: &mut Command) -> Result<()> {
        self.hold(command, |group| group.join(SYSTEM))
    }

    /// Moves the calling process out of the way of the Node's children, and lets those have every controller.
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

    #[expect(unsafe_code, reason = "pre_exec is the only place between fork and exec")]
    fn hold(&self, command: &mut Command, group: impl Fn(PathBuf) -> PathBuf) -> Result<()> {
        let open = |hierarchy: &Hierarchy| {
            let procs = group(hierarchy.point.join(&self.name)).join("cgroup.procs");
            File::options().write(true).open(&procs).with_context(|| format!("open {}", procs.display()))
        };
        let files = self.hierarchies.iter().map(open).collect::<Result<Vec<_>>>()?;
        // Zero stands for the process that writes it.
        let join = move || files.iter().try_for_each(|mut file| file.write_all(b"0"));
        // SAFETY: the hook makes system calls and allocates nothing.
        unsafe {
            command.pre_exec(join);
        }
        Ok(())
    }
}

/// The groups right below the roots whose names begin with `prefix`.
pub(crate) fn names(prefix: &str) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for hierarchy in Hierarchy::all()? {
        let entries = fs::read_dir(&hierarchy.point).into_iter().flatten().flatten();
        names.extend(entries.filter_map(|it| it.file_name().into_string().ok()).filter(|it| it.starts_with(prefix)));
    }
    Ok(names)
}

/// Removes a group from every hierarchy, once its last process has ended.
pub(crate) fn remove(name: &str) -> Result<()> {
    Hierarchy::all()?.iter().try_for_each(|hierarchy| delete(&hierarchy.point.join(name)))
}

/// Removes one folder and all below, once the last process has ended; it may be gone already.
pub(crate) fn delete(group: &Path) -> Result<()> {
    let mut last = None;
    poll::until_gone("the end of a control group", REMOVED_WITHIN, || {
        last = remove_tree(group).err();
        last.is_none()
    })
    .with_context(|| format!("remove {}: {last:?}", group.display()))
}

/// Children first; the files in a group go with it.
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

/// Lets the children of a group of version 2 have each controller that it has.
fn pass_controllers_on(group: &Path) -> Result<()> {
    let file = group.join("cgroup.controllers");
    let controllers = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    for controller in controllers.split_whitespace() {
        let written = fs::write(group.join("cgroup.subtree_control"), format!("+{controller}"));
        match written.map_err(|err| (err.raw_os_error().map(Errno::from_raw), err)) {
            Ok(()) => {}
            // A controller that knows real-time processes, or threads, may be had here only.
            Err((Some(Errno::EINVAL | Errno::ENOTSUP), _unavailable)) => {}
            Err((Some(Errno::EBUSY), err)) => {
                return Err(err).with_context(|| {
                    format!("hand {controller} on below {}: processes are in that group itself", group.display())
                });
            }
            Err((_, err)) => {
                return Err(err).with_context(|| format!("hand {controller} on below {}", group.display()));
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
    fn controllers_are_told_from_mount_flags() {
        let of = |text: &str| controllers(&text.split(',').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(of("rw,cpu,cpuacct"), ["cpu", "cpuacct"]);
        assert_eq!(of("rw,xattr,release_agent=/lib/systemd/agent,name=systemd"), ["name=systemd"]);
    }
}
