// SPDX-License-Identifier: Apache-2.0
//! Removes all kernel state that agents of any version have created, and no state of other software.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use aya::programs::tc::{self, TcError};
use npl_common::names::{ABI_VERSION, PROGRAMS};

use super::{
    attach::{attach_type, detach_filter},
    error::DatapathError,
    pins::{Direction, Pins, names_in, pin_error, unpin},
};
use crate::{
    netlink::{self, NetlinkError},
    nft_guard,
};

/// The kernel state that the cleanup has removed.
#[derive(Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Removed {
    /// Paths of maps, programs and links that were unpinned.
    pub pins: Vec<PathBuf>,
    /// Names of devices from which NPL's TC filters were removed.
    pub filters: Vec<String>,
    /// Names of devices from which NPL's clsact qdisc was removed.
    pub qdiscs: Vec<String>,
    /// Family and name of each removed nftables table.
    pub tables: Vec<String>,
}

/// Removes XDP links, filters, qdiscs and the nftables table, then every pin of every ABI version. When the pin of a
/// link is removed, the kernel detaches the link's program.
///
/// If a step fails, the following steps are still carried out. Returns the errors of all failed steps.
pub async fn remove_everything(bpffs: &Path) -> (Removed, Vec<CleanupError>) {
    let pins = Pins::new(bpffs);
    let mut removed = Removed::default();
    let mut errors = Vec::new();
    // The XDP program is detached first, because the TC program on egress must translate the replies to requests that
    // the XDP program has translated.
    match pins.xdp_links() {
        Ok(links) => {
            for pin in links.into_iter().map(|ifindex| pins.xdp_link(ifindex)) {
                match unpin(&pin) {
                    Ok(()) => removed.pins.push(pin),
                    Err(error) => errors.push(error.into()),
                }
            }
        }
        Err(error) => errors.push(error.into()),
    }
    match netlink::interfaces().await {
        Ok(interfaces) => {
            for interface in interfaces {
                if detach_filters(&interface.name) {
                    removed.filters.push(interface.name);
                }
            }
        }
        Err(error) => errors.push(error.into()),
    }
    match pins.clsact_marks() {
        Ok(marks) => {
            for ifindex in marks {
                match netlink::remove_unused_clsact(ifindex).await {
                    Ok(Some(name)) => removed.qdiscs.push(name),
                    Ok(None) => {}
                    Err(error) => errors.push(error.into()),
                }
            }
        }
        Err(error) => errors.push(error.into()),
    }
    match nft_guard::remove() {
        Ok(true) => removed.tables.push(nft_guard::TABLE.to_owned()),
        Ok(false) => {}
        Err(error) => errors.push(CleanupError::Guard(error)),
    }
    remove_tree(pins.root(), &mut removed.pins, &mut errors);
    (removed, errors)
}

/// Why a part of NPL's kernel state could not be removed.
#[derive(Debug, thiserror::Error)]
pub enum CleanupError {
    /// A pinned map, program or link could not be removed.
    #[error(transparent)]
    Datapath(#[from] DatapathError),
    /// Devices could not be listed, or a qdisc could not be removed.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The nftables table could not be removed.
    #[error("remove nftables table {}", nft_guard::TABLE)]
    Guard(#[source] io::Error),
}

/// Removes NPL's filters from a device. Finds the filters by the names of their programs, and by the priority and
/// handle that NPL uses. Returns whether the device had filters of NPL.
fn detach_filters(interface: &str) -> bool {
    let mut found = false;
    for direction in Direction::ALL {
        for name in PROGRAMS {
            // The call fails if the device has no clsact qdisc or no filter with a program of this name.
            let result: Result<(), TcError> = tc::qdisc_detach_program(interface, attach_type(direction), name);
            found |= result.is_ok();
        }
        // A program that was loaded without a name can only be found by priority and handle. Each ABI version has its
        // own handle.
        for abi in 1..=ABI_VERSION {
            found |= detach_filter(interface, direction, abi);
        }
    }
    found
}

fn remove_tree(dir: &Path, removed: &mut Vec<PathBuf>, errors: &mut Vec<CleanupError>) {
    let names = match names_in(dir) {
        Ok(names) => names,
        Err(error) => return errors.push(error.into()),
    };
    for name in names {
        let path = dir.join(name);
        if path.is_dir() {
            remove_tree(&path, removed, errors);
        } else {
            match fs::remove_file(&path) {
                Ok(()) => removed.push(path),
                Err(source) => errors.push(pin_error("remove", &path, source).into()),
            }
        }
    }
    use io::ErrorKind::{NotFound, ReadOnlyFilesystem, ResourceBusy};
    match fs::remove_dir(dir) {
        // In the agent's container, NPL's directory of pins is a mount point in a read-only root file system. This
        // directory cannot be removed, so it stays as an empty directory.
        Err(source) if !matches!(source.kind(), NotFound | ResourceBusy | ReadOnlyFilesystem) => {
            errors.push(pin_error("remove", dir, source).into());
        }
        _ => {}
    }
}
