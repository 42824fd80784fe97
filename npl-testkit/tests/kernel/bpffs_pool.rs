// SPDX-License-Identifier: Apache-2.0
//! Reuses the BPF file systems of earlier tests: the pinned maps are emptied, and the pinned programs are kept, because
//! the kernel has already verified these programs. Verification would take the largest part of a test's time,
//! especially on an emulated processor.

use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;

use npl_agent::datapath::Pins;
use npl_common::names::{PINNED_MAPS, PROGRAM_DIR};
use npl_testkit::maps;
use npl_testkit::mounts::PrivateBpffs;

/// Mount point of each bpffs, in a separate mount namespace.
pub(crate) const BPFFS: &str = "/sys/fs/bpf";

/// BPF file systems that no running test uses. The programs that are pinned in the file systems of one pool were all
/// loaded with the same capabilities.
pub(crate) struct BpffsPool(Mutex<Vec<PrivateBpffs>>);

/// A bpffs. When this value is dropped, the bpffs returns to its pool, unless the test has failed.
pub(crate) struct PooledBpffs {
    bpffs: Option<PrivateBpffs>,
    pool: &'static BpffsPool,
}

impl BpffsPool {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Returns an unused bpffs, or mounts a new one.
    pub(crate) fn take(&'static self) -> PooledBpffs {
        let unused = self.0.lock().unwrap().pop();
        let bpffs = unused.unwrap_or_else(|| PrivateBpffs::mount(Path::new(BPFFS)).unwrap());
        PooledBpffs { bpffs: Some(bpffs), pool: self }
    }
}

impl PooledBpffs {
    pub(crate) fn bpffs(&self) -> &PrivateBpffs {
        self.bpffs.as_ref().unwrap()
    }
}

impl Drop for PooledBpffs {
    fn drop(&mut self) {
        if thread::panicking() {
            return;
        }
        if let Some(bpffs) = self.bpffs.take() {
            bpffs.run(|| clear(&Pins::new(Path::new(BPFFS)))).unwrap();
            self.pool.0.lock().unwrap_or_else(PoisonError::into_inner).push(bpffs);
        }
    }
}

/// Empties the maps and keeps the programs. Everything else in the bpffs is removed: directories of links and of other
/// records.
fn clear(pins: &Pins) {
    for pin in PINNED_MAPS.iter().map(|name| pins.map(name)).filter(|pin| pin.exists()) {
        maps::empty(&pin).unwrap();
    }
    let Ok(entries) = fs::read_dir(pins.version()) else { return };
    for entry in entries.map(Result::unwrap) {
        if entry.path().is_dir() && entry.file_name() != PROGRAM_DIR {
            fs::remove_dir_all(entry.path()).unwrap();
        }
    }
}
