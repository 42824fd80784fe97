// SPDX-License-Identifier: Apache-2.0
//! The entry points of the fuzz targets in the folder `fuzz/` of the repository. A target passes the bytes that the
//! fuzzer generates to one of these functions, and the function panics if a property does not hold.
//!
//! The module is compiled for unit tests and with the feature `fuzzing`, which no program of NPL enables. A function
//! that needs private parsers is in the module of the parsers. The unit test below runs the functions on the stored
//! inputs (`fuzz/corpus/`), so that every run of the unit tests repeats all former faults.

mod annotation;
mod cluster;

pub use self::{annotation::annotation, cluster::cluster};
pub use crate::{
    config::fuzzing::command_line, datapath::fuzzing::pinned_maps, netlink::fuzzing::netlink,
    nft_guard::fuzzing::nftables,
};

/// A fuzz target: its name, which is also the name of the folder with its stored inputs, and its function.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The name of the target.
    pub name: &'static str,
    /// Checks the properties for one input.
    pub check: fn(&[u8]),
}

/// All targets of this crate.
pub const TARGETS: [Target; 6] = [
    Target { name: "annotation", check: annotation },
    Target { name: "cluster", check: cluster },
    Target { name: "command_line", check: command_line },
    Target { name: "netlink", check: netlink },
    Target { name: "nftables", check: nftables },
    Target { name: "pinned_maps", check: pinned_maps },
];

/// Reads values from the bytes of an input. After the end of the input, every byte is zero.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub(crate) fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// The next `N` bytes.
    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        for (to, from) in array.iter_mut().zip(self.next(N)) {
            *to = *from;
        }
        array
    }

    /// The next `count` bytes, or all remaining bytes if fewer remain.
    pub(crate) fn next(&mut self, count: usize) -> &'a [u8] {
        let (next, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        next
    }

    /// All remaining bytes.
    pub(crate) const fn rest(self) -> &'a [u8] {
        self.0
    }

    /// All remaining bytes as text.
    pub(crate) fn text(self) -> String {
        String::from_utf8_lossy(self.0).into_owned()
    }
}

/// Asserts that a text can be shown in one line: of a terminal, of a log, or of an Event.
pub(crate) fn assert_is_one_line(text: &str) {
    let breaks = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    assert!(!text.is_empty() && !text.contains(breaks), "not one line of text: {text:?}");
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        fs,
        path::{Path, PathBuf},
    };

    use super::{TARGETS, assert_is_one_line};

    fn fuzz_folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz")
    }

    #[test]
    fn the_stored_inputs_of_every_target_pass() {
        for target in TARGETS {
            let folder = fuzz_folder().join("corpus").join(target.name);
            let inputs: BTreeSet<PathBuf> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
            assert!(!inputs.is_empty(), "{} is empty", folder.display());
            for input in inputs {
                // If the target panics, the test prints this line.
                println!("{}", input.display());
                (target.check)(&fs::read(&input).unwrap());
            }
        }
    }

    #[test]
    fn every_target_passes_without_input() {
        for target in TARGETS {
            (target.check)(&[]);
        }
    }

    #[test]
    fn a_text_with_a_line_break_is_not_one_line() {
        assert_is_one_line("port range \"a\\nb\" is not START-END");
        for text in ["", "a\nb", "a\u{2028}b", "\u{1b}[31m"] {
            assert!(std::panic::catch_unwind(|| assert_is_one_line(text)).is_err(), "{text:?}");
        }
    }
}
