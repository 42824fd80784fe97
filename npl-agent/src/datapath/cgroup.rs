// SPDX-License-Identifier: Apache-2.0
//! Finds the cgroup that holds all processes of the Node.

use std::{
    fs,
    path::{Path, PathBuf},
};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use super::error::DatapathError;

/// The mounts that this process sees.
const MOUNTS: &str = "/proc/self/mountinfo";
/// Where systemd mounts the cgroup v2 hierarchy beside those of version 1.
const BESIDE_VERSION_1: &str = "unified";

/// `--cgroup`: the clients whose sockets may use mappings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CgroupSelection {
    /// All processes: the root of the cgroup v2 hierarchy.
    Auto,
    /// None.
    None,
    /// The processes of this cgroup and all below it.
    Directory(PathBuf),
}

/// The directory of the selected cgroup.
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

/// Where the root of the cgroup v2 hierarchy is mounted, or else the largest part of it.
pub fn hierarchy() -> Option<PathBuf> {
    let table = fs::read_to_string(MOUNTS).unwrap_or_default();
    roots(&table).into_iter().find(|candidate| is_cgroup2(candidate))
}

/// Another mount may hide this one, so the path is checked too.
fn is_cgroup2(path: &Path) -> bool {
    statfs(path).is_ok_and(|stat| stat.filesystem_type() == CGROUP2_SUPER_MAGIC)
}

/// The mount points of the cgroup v2 hierarchy, those of its largest parts first.
///
/// In a container, the kernel shows the root of a mount relative to the container's cgroup: that is `/` for its own,
/// and `/../..` for the Node's.
fn roots(table: &str) -> Vec<PathBuf> {
    let mut found: Vec<(&str, &str)> = table.lines().filter_map(cgroup2_mount).collect();
    let rank = |root: &str| (usize::MAX - root.matches("/..").count(), root.len());
    found.sort_by_key(|(root, _)| rank(root));
    found.into_iter().map(|(_, point)| PathBuf::from(point)).collect()
}

/// Root and mount point of a line, if it is a cgroup v2 mount.
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
    fn hierarchy_beside_version_1_is_found() {
        let table = "31 24 0:27 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
                     32 31 0:28 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n\
                     33 31 0:29 / /sys/fs/cgroup/unified rw,relatime shared:10 - cgroup2 cgroup2 rw\n";
        assert_eq!(points(table), [PathBuf::from("/sys/fs/cgroup/unified")]);
    }

    #[test]
    fn in_a_container_the_nodes_root_comes_before_its_own() {
        let table = "900 890 0:29 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n\
                     901 880 0:29 /../../.. /host/cgroup ro master:4 - cgroup2 cgroup rw\n";
        assert_eq!(points(table), [PathBuf::from("/host/cgroup"), PathBuf::from("/sys/fs/cgroup")]);
    }

    #[test]
    fn a_part_of_the_hierarchy_comes_after_the_whole() {
        let table = "40 30 0:29 /system.slice /mnt/part rw - cgroup2 cgroup2 rw\n\
                     41 30 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(points(table), [PathBuf::from("/sys/fs/cgroup"), PathBuf::from("/mnt/part")]);
    }

    #[test]
    fn version_1_alone_has_none() {
        assert!(points("32 31 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\nno mount\n").is_empty());
    }
}
