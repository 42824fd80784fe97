// SPDX-License-Identifier: Apache-2.0
//! Finds the cgroup v2 directory whose processes are served as local clients.

use std::{
    fs,
    path::{Path, PathBuf},
};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use super::error::DatapathError;

/// The mount table of this process.
const MOUNTS: &str = "/proc/self/mountinfo";
/// The directory, below `/sys/fs/cgroup`, in which systemd mounts the cgroup v2 hierarchy if it also mounts the
/// hierarchies of version 1.
const BESIDE_VERSION_1: &str = "unified";

/// The cgroup whose processes are served as local clients. The socket programs connect the sockets of these processes
/// to Pods directly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CgroupSelection {
    /// The root of the cgroup v2 hierarchy, and therefore all processes of the Node. The agent finds the mount point.
    Auto,
    /// No cgroup: local clients are not served.
    None,
    /// The processes in this cgroup and its descendants.
    Directory(PathBuf),
}

/// Which processes of the selected cgroup are served: the value of `--local-clients`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ClientScope {
    /// All processes, in every network namespace.
    #[default]
    All,
    /// Processes in the host's network namespace: the Node's own processes, and processes of Pods on the host network.
    Host,
}

/// The directory of the selected cgroup; `None` if no local clients are selected.
pub(super) fn locate(selection: &CgroupSelection) -> Result<Option<PathBuf>, DatapathError> {
    match selection {
        CgroupSelection::None => Ok(None),
        CgroupSelection::Directory(directory) => {
            let candidates = [directory.clone(), directory.join(BESIDE_VERSION_1)];
            let found = candidates.into_iter().find(|candidate| is_cgroup2(candidate));
            found.map(Some).ok_or_else(|| DatapathError::NotCgroup2(directory.clone()))
        }
        CgroupSelection::Auto => hierarchy().map(Some).ok_or(DatapathError::NoCgroup2),
    }
}

/// The mount point under which the largest part of the cgroup v2 hierarchy is visible; `None` if no part is mounted.
pub fn hierarchy() -> Option<PathBuf> {
    let table = fs::read_to_string(MOUNTS).unwrap_or_default();
    roots(&table).into_iter().find(|candidate| is_cgroup2(candidate))
}

/// Whether the file system at the path is cgroup v2. The mount table is not sufficient for this check, because another
/// mount on the same path may hide a mount that the table lists.
fn is_cgroup2(path: &Path) -> bool {
    statfs(path).is_ok_and(|stat| stat.filesystem_type() == CGROUP2_SUPER_MAGIC)
}

/// The mount points of the cgroup v2 hierarchy. Mounts that show a larger part of the hierarchy come first.
///
/// In a container, the kernel reports the root of a mount relative to the container's cgroup: `/` is the container's
/// cgroup itself, and `/../..` is the root of the Node's hierarchy if the container's cgroup is two levels below that
/// root.
fn roots(table: &str) -> Vec<PathBuf> {
    let mut found: Vec<(&str, &str)> = table.lines().filter_map(cgroup2_mount).collect();
    let rank = |root: &str| (usize::MAX - root.matches("/..").count(), root.len());
    found.sort_by_key(|(root, _)| rank(root));
    found.into_iter().map(|(_, point)| PathBuf::from(point)).collect()
}

/// The root and the mount point in a line of the mount table; `None` if the line is not a cgroup v2 mount.
fn cgroup2_mount(line: &str) -> Option<(&str, &str)> {
    let (left, right) = line.split_once(" - ")?;
    let mut fields = left.split(' ').skip(3);
    (right.split(' ').next() == Some("cgroup2")).then_some((fields.next()?, fields.next()?))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::roots;

    fn points(table: &str) -> Vec<PathBuf> {
        roots(table)
    }

    #[test]
    fn a_hierarchy_next_to_version_1_is_found() {
        let table = "31 24 0:27 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
                     32 31 0:28 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n\
                     33 31 0:29 / /sys/fs/cgroup/unified rw,relatime shared:10 - cgroup2 cgroup2 rw\n";
        assert_eq!(points(table), [PathBuf::from("/sys/fs/cgroup/unified")]);
    }

    #[test]
    fn in_a_container_the_nodes_root_precedes_the_containers_cgroup() {
        let table = "900 890 0:29 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n\
                     901 880 0:29 /../../.. /host/cgroup ro master:4 - cgroup2 cgroup rw\n";
        assert_eq!(points(table), [PathBuf::from("/host/cgroup"), PathBuf::from("/sys/fs/cgroup")]);
    }

    #[test]
    fn the_whole_hierarchy_precedes_a_part_of_it() {
        let table = "40 30 0:29 /system.slice /mnt/part rw - cgroup2 cgroup2 rw\n\
                     41 30 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(points(table), [PathBuf::from("/sys/fs/cgroup"), PathBuf::from("/mnt/part")]);
    }

    #[test]
    fn version_1_alone_has_no_version_2_mount() {
        assert!(points("32 31 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\nno mount\n").is_empty());
    }
}
