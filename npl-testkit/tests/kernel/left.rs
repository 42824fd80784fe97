// SPDX-License-Identifier: Apache-2.0
//! BPF file systems that tests before have left: the programs in them are verified, and their maps empty. To verify programs
//! is most of a test's work, by far where the processor is emulated.

use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;

use npl_agent::datapath::Pins;
use npl_common::names::{PINNED_MAPS, PROGRAM_DIR};
use npl_testkit::maps;
use npl_testkit::mounts::PrivateBpffs;

/// Where each of them is mounted, in a mount namespace of its own.
pub(crate) const BPFFS: &str = "/sys/fs/bpf";

/// What tests of one kind leave to each other.
pub(crate) struct Shelf(Mutex<Vec<PrivateBpffs>>);

/// A file system that goes back to its shelf, unless its test fails.
pub(crate) struct Left {
    bpffs: Option<PrivateBpffs>,
    shelf: &'static Shelf,
}

impl Shelf {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// One that was left, or a new one.
    pub(crate) fn take(&'static self) -> Left {
        let left = self.0.lock().unwrap().pop();
        let bpffs = left.unwrap_or_else(|| PrivateBpffs::mount(Path::new(BPFFS)).unwrap());
        Left { bpffs: Some(bpffs), shelf: self }
    }
}

impl Left {
    pub(crate) fn bpffs(&self) -> &PrivateBpffs {
        self.bpffs.as_ref().unwrap()
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        if thread::panicking() {
            return;
        }
        if let Some(bpffs) = self.bpffs.take() {
            bpffs.run(|| forget(&Pins::new(Path::new(BPFFS)))).unwrap();
            self.shelf.0.lock().unwrap_or_else(PoisonError::into_inner).push(bpffs);
        }
    }
}

/// Leaves the programs, and their maps with nothing in them. What else there is are folders, of links and of marks.
fn forget(pins: &Pins) {
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
