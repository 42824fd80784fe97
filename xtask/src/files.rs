// SPDX-License-Identifier: Apache-2.0
//! Copies files and directories, and writes programs.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};

/// Copies a file with its permissions, or all files of a directory. Creates the directories of the copies, but no empty
/// directories.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    if from.is_dir() {
        for entry in from.read_dir().with_context(|| format!("list {}", from.display()))? {
            let entry = entry.with_context(|| format!("list {}", from.display()))?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    }
    fs::copy(from, to).with_context(|| format!("copy {} to {}", from.display(), to.display())).map(drop)
}

/// Writes a program.
pub(crate) fn write_executable(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    make_executable(path)
}

/// Makes a file executable for all users.
pub(crate) fn make_executable(path: &Path) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("make {} executable", path.display()))
}
