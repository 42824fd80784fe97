// SPDX-License-Identifier: Apache-2.0
//! Makes the pins of an agent look like those of an agent of another ABI version.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use npl_common::former_names;
use npl_common::names::{ABI_VERSION, PIN_ROOT};

/// The directory with the pins of an ABI version.
pub fn version(bpffs: &Path, abi: u32) -> PathBuf {
    bpffs.join(PIN_ROOT).join(format!("v{abi}"))
}

/// Renames all pins as if an agent of ABI `abi` had created them.
pub fn pretend_to_be(bpffs: &Path, abi: u32) -> Result<()> {
    let rename =
        |from: PathBuf, to: PathBuf| fs::rename(&from, to).with_context(|| format!("rename {}", from.display()));
    let folder = version(bpffs, abi);
    rename(version(bpffs, ABI_VERSION), folder.clone())?;
    if abi == 1 {
        for (ours, theirs) in former_names::ABI_1 {
            rename(folder.join(ours), folder.join(theirs))?;
        }
    }
    Ok(())
}
