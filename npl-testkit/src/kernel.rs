// SPDX-License-Identifier: Apache-2.0
//! Features of the running kernel and of the machine.

use std::fs;
use std::io::{self, Write as _};

use anyhow::{Context as _, Result, ensure};

use crate::netns::Netns;

/// Whether the processor is emulated by QEMU, and therefore much slower than a real one.
pub fn is_emulated() -> Result<bool> {
    let text = fs::read_to_string("/proc/cpuinfo").context("read /proc/cpuinfo")?;
    Ok(text.contains("QEMU"))
}

/// An argument in the command line of the kernel of an emulated machine.
const OWN_MACHINE: &str = "npl.guest=1";

/// Whether this is an emulated machine, which `cargo xtask test` has started, so that a test may change settings of the
/// machine.
pub fn is_own_machine() -> Result<bool> {
    let command_line = fs::read_to_string("/proc/cmdline").context("read /proc/cmdline")?;
    Ok(command_line.split_whitespace().any(|word| word == OWN_MACHINE))
}

/// Creates a device of `kind` with an `ip` command. Returns `false` and prints a note if the kernel was built without
/// that kind.
///
/// # Errors
/// Returns an error if the device cannot be created although `is_required` is set or the machine is emulated: emulated
/// kernels have every kind.
pub fn make_device(netns: &Netns, kind: &str, line: &str, is_required: bool) -> Result<bool> {
    let made = netns.ip(line);
    ensure!(made.is_ok() || !(is_required || is_emulated()?), "creating a {kind} device failed: {made:?}");
    if made.is_err() {
        // The test harness hides the output of macros for passing tests, so the note is written to standard error
        // directly.
        let said = format!("this kernel was built without {kind} devices: their tests are skipped\n");
        io::stderr().write_all(said.as_bytes()).context("report the skipped tests")?;
    }
    Ok(made.is_ok())
}
