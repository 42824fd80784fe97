// SPDX-License-Identifier: Apache-2.0
//! What the kernel below the tests knows, and what it runs on.

use std::fs;
use std::io::{self, Write as _};

use anyhow::{Context as _, Result, ensure};

use crate::netns::Netns;

/// Whether the processor is the emulator's, which takes its time.
pub fn is_emulated() -> Result<bool> {
    let text = fs::read_to_string("/proc/cpuinfo").context("read what the processor is")?;
    Ok(text.contains("QEMU"))
}

/// Makes a device of `kind` by a line of `ip`. Where the kernel was built without that kind it says so, and there is no
/// device.
///
/// # Errors
/// When it is not made though `is_required`, or on an emulated machine, whose kernel has all kinds.
pub fn make_device(netns: &Netns, kind: &str, line: &str, is_required: bool) -> Result<bool> {
    let made = netns.ip(line);
    ensure!(made.is_ok() || !(is_required || is_emulated()?), "{kind}: {made:?}");
    if made.is_err() {
        // Past what a test's output is kept in, which nobody sees of one that passes.
        let said = format!("this kernel was built without {kind}: nothing is tested of it here\n");
        io::stderr().write_all(said.as_bytes()).context("say what is not tested")?;
    }
    Ok(made.is_ok())
}
