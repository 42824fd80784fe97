// SPDX-License-Identifier: Apache-2.0
//! Reads and removes all kernel state that agents of any version have created, and no state of other software.
//! [`crate::core::cleanup`] decides which objects are removed.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use aya::programs::{ProgramError, TcAttachType, TcError, links::Link, tc::SchedClassifierLink, tc::TcHandle};
use npl_common::names::PROGRAMS;

use super::{
    error::DatapathError,
    pins::{Pins, meaning_of, names_in, pin_error, unpin},
};
use crate::{
    core::{
        cleanup::{self, KernelState, PinEntry, PinMeaning, Removal, RemovalTarget, TcFilter},
        devices::attachments::Side,
    },
    netlink::{self, NetlinkError},
    nft_guard,
};

/// The mounts of this process's mount namespace.
const MOUNTS: &str = "/proc/self/mountinfo";

/// Lists everything that the cleanup would remove, in the order of the removal. Changes no state.
///
/// If a part of the kernel state cannot be read, the list contains the other parts. Returns the errors of all unread
/// parts.
pub async fn plan(bpffs: &Path) -> (Vec<Removal>, Vec<CleanupError>) {
    let mut errors = Vec::new();
    let state = read(&Pins::new(bpffs), &mut errors).await;
    (cleanup::plan(&state, PROGRAMS), errors)
}

/// Removes everything that [`plan`] lists.
///
/// If a step fails, the following steps are still carried out. Returns the removed objects, and the errors of all
/// failed steps.
pub async fn remove_everything(bpffs: &Path) -> (Vec<Removal>, Vec<CleanupError>) {
    let (planned, mut errors) = plan(bpffs).await;
    let mut removed = Vec::new();
    for removal in planned {
        match remove(&removal).await {
            Ok(true) => removed.push(removal),
            Ok(false) => {}
            Err(error) => errors.push(error),
        }
    }
    (removed, errors)
}

/// Why a part of NPL's kernel state could not be read or removed.
#[derive(Debug, thiserror::Error)]
pub enum CleanupError {
    /// A pinned map, program or link could not be listed or removed.
    #[error(transparent)]
    Datapath(#[from] DatapathError),
    /// Devices and filters could not be listed, or a qdisc could not be removed.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// A filter could not be removed.
    #[error("remove the TC filter {name} from device {device}")]
    Filter {
        /// The name of the device.
        device: String,
        /// The program, priority and handle of the filter.
        name: String,
        /// The kernel's error.
        #[source]
        source: Box<ProgramError>,
    },
    /// The nftables table could not be read or removed.
    #[error("read or remove nftables table {}", nft_guard::TABLE)]
    Guard(#[source] io::Error),
}

async fn read(pins: &Pins, errors: &mut Vec<CleanupError>) -> KernelState {
    let mut state = KernelState::default();
    let marks = pins.clsact_marks().unwrap_or_else(|error| {
        errors.push(error.into());
        Vec::new()
    });
    // The directories that record NPL's clsact qdiscs on devices whose filters could not be read. These directories
    // stay, because a later cleanup needs them.
    let mut kept = marks.clone();
    match netlink::read_filters().await {
        Ok(read) => {
            kept.retain(|ifindex| read.unread.contains_key(ifindex));
            let is_read = |ifindex: &u32| read.with_clsact.contains(ifindex) && !read.unread.contains_key(ifindex);
            state.own_qdiscs = marks.into_iter().filter(is_read).collect();
            state.own_qdiscs.sort_unstable();
            (state.devices, state.filters) = (read.devices, read.filters);
            errors.extend(read.unread.into_values().map(CleanupError::from));
        }
        Err(error) => errors.push(error.into()),
    }
    match nft_guard::exists() {
        Ok(exists) => state.table = exists.then_some(nft_guard::TABLE),
        Err(error) => errors.push(CleanupError::Guard(error)),
    }
    add_content(pins.root(), &mut Vec::new(), &mut state.pins, errors);
    // In the agent's container, NPL's directory of pins is a mount point in a read-only root file system. This
    // directory cannot be removed, so it stays as an empty directory.
    if pins.root().is_dir() && !is_mount_point(pins.root()) {
        state.pins.push(PinEntry { path: pins.root().to_owned(), meaning: PinMeaning::Directory });
    }
    let kept: Vec<PathBuf> = kept.into_iter().map(|ifindex| pins.clsact_mark(ifindex)).collect();
    state.pins.retain(|entry| !kept.iter().any(|mark| mark.starts_with(&entry.path)));
    state
}

/// Adds all pins and directories below the directory to `entries`. `below` contains the components of the directory's
/// path below NPL's directory.
fn add_content(dir: &Path, below: &mut Vec<String>, entries: &mut Vec<PinEntry>, errors: &mut Vec<CleanupError>) {
    let mut names = match names_in(dir) {
        Ok(names) => names,
        Err(error) => return errors.push(error.into()),
    };
    names.sort_unstable();
    for name in names {
        let path = dir.join(&name);
        let is_dir = path.is_dir();
        below.push(name);
        if is_dir {
            add_content(&path, below, entries, errors);
        }
        let components: Vec<&str> = below.iter().map(String::as_str).collect();
        entries.push(PinEntry { path, meaning: meaning_of(&components, is_dir) });
        below.pop();
    }
}

fn is_mount_point(path: &Path) -> bool {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let table = fs::read_to_string(MOUNTS).unwrap_or_default();
    table.lines().filter_map(mount_point).any(|point| point == path)
}

/// The mount point in a line of the mount table. The kernel writes special characters of the path in octal, such as a
/// space as `\040`.
fn mount_point(line: &str) -> Option<PathBuf> {
    const ESCAPES: [(&str, &str); 4] = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    let point = line.split(' ').nth(4)?.to_owned();
    Some(ESCAPES.iter().fold(point, |point, (escape, character)| point.replace(escape, character)).into())
}

/// Removes an object. Returns `false` if the object no longer exists, or if it must stay because it is a qdisc that
/// other software uses now, or a directory that is a mount point.
async fn remove(removal: &Removal) -> Result<bool, CleanupError> {
    match &removal.target {
        RemovalTarget::Pin(path) => unpin(path)?,
        RemovalTarget::Directory(path) => return remove_directory(path).map_err(CleanupError::from),
        RemovalTarget::Filter(filter) => return remove_filter(filter, removal),
        RemovalTarget::Qdisc(ifindex) => return Ok(netlink::remove_unused_clsact(*ifindex).await?.is_some()),
        RemovalTarget::Table => return nft_guard::remove().map_err(CleanupError::Guard),
    }
    Ok(true)
}

fn remove_directory(path: &Path) -> Result<bool, DatapathError> {
    use io::ErrorKind::{NotFound, ReadOnlyFilesystem, ResourceBusy};
    match fs::remove_dir(path) {
        Ok(()) => Ok(true),
        // The directory no longer exists, or it is a mount point that the mount table does not show.
        Err(source) if matches!(source.kind(), NotFound | ResourceBusy | ReadOnlyFilesystem) => Ok(false),
        Err(source) => Err(pin_error("remove", path, source)),
    }
}

/// Removes a filter. Returns `false` if the filter, its qdisc or its device no longer exists.
fn remove_filter(filter: &TcFilter, removal: &Removal) -> Result<bool, CleanupError> {
    let device = removal.device.clone().unwrap_or_default();
    let attach_type = match filter.side {
        Side::Ingress => TcAttachType::Ingress,
        Side::Egress => TcAttachType::Egress,
    };
    let handle = TcHandle::new(filter.handle.0, filter.handle.1);
    let link = SchedClassifierLink::attached(&device, attach_type, filter.priority, handle, None);
    let removed = link.map_err(ProgramError::IOError).and_then(Link::detach);
    match removed {
        Ok(()) => Ok(true),
        Err(error) if is_of_gone_filter(&error) => Ok(false),
        Err(error) => Err(CleanupError::Filter { device, name: removal.name.clone(), source: Box::new(error) }),
    }
}

fn is_of_gone_filter(error: &ProgramError) -> bool {
    let code = if let ProgramError::NetlinkError(error) | ProgramError::TcError(TcError::NetlinkError(error)) = error {
        error.raw_os_error()
    } else if let ProgramError::IOError(error) = error {
        error.raw_os_error()
    } else {
        None
    };
    // The kernel returns EINVAL if the qdisc does not exist.
    matches!(code, Some(libc::ENODEV | libc::ENXIO | libc::ENOENT | libc::EINVAL))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::mount_point;

    #[test]
    fn the_mount_point_is_the_fifth_field_of_a_line() {
        let line = r"36 35 0:31 /npl /sys/fs/my\040bpf/npl rw,nosuid shared:12 - bpf bpf rw,mode=700";
        assert_eq!(mount_point(line), Some(PathBuf::from("/sys/fs/my bpf/npl")));
        assert_eq!(mount_point("36 35"), None);
    }
}
