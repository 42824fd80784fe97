// SPDX-License-Identifier: Apache-2.0
//! Removes everything that any agent has created in the kernel, and nothing else.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use aya::programs::tc::{self, TcError};
use npl_common::names::PROGRAMS;

use super::{
    attach::{attach_type, detach_filter},
    error::DatapathError,
    pins::{Direction, Pins, names_in, pin_error, unpin},
};
use crate::{
    netlink::{self, NetlinkError},
    nft_guard,
};

/// What was removed.
#[derive(Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Removed {
    /// Pinned maps, programs and links.
    pub pins: Vec<PathBuf>,
    /// Devices whose TC filters of NPL were removed.
    pub filters: Vec<String>,
    /// Devices whose clsact qdisc of NPL was empty and removed.
    pub qdiscs: Vec<String>,
    /// nftables tables.
    pub tables: Vec<String>,
}

/// Removes filters and qdiscs, then the pins of every ABI version. The kernel detaches a link whose pin is removed.
///
/// Continues after a failure.
///
/// # Errors
///
/// All failures.
pub async fn remove_everything(bpffs: &Path) -> (Removed, Vec<CleanupError>) {
    let pins = Pins::new(bpffs);
    let mut removed = Removed::default();
    let mut errors = Vec::new();
    // XDP first: no request may be translated whose reply is not.
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

/// Something that could not be removed.
#[derive(Debug, thiserror::Error)]
pub enum CleanupError {
    /// A pin.
    #[error(transparent)]
    Datapath(#[from] DatapathError),
    /// A device.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The nftables table.
    #[error("remove the nftables guard")]
    Guard(#[source] io::Error),
}

/// Detaches NPL's filters from a device, by program name and by handle; returns whether there were any.
fn detach_filters(interface: &str) -> bool {
    let mut found = false;
    for direction in Direction::ALL {
        for name in PROGRAMS {
            // A device without the qdisc or the filter answers with an error.
            let result: Result<(), TcError> = tc::qdisc_detach_program(interface, attach_type(direction), name);
            found |= result.is_ok();
        }
        // A filter of a pinned program may have no name.
        found |= detach_filter(interface, direction);
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
    if dir.exists() {
        errors.extend(fs::remove_dir(dir).map_err(|source| pin_error("remove", dir, source).into()).err());
    }
}
