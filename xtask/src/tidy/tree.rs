// SPDX-License-Identifier: Apache-2.0
//! Reads all text files of the repository.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

/// The directories that are not searched, because they do not belong to the repository, or contain test data that tools
/// write. The fuzz targets write to `artifacts` and read from `corpus`.
const LEFT_OUT: [&str; 5] = [".git", "target", "proptest-regressions", "artifacts", "corpus"];

/// The documents that describe the past, and may therefore contain names that have been changed or removed since.
const HISTORY: [&str; 2] = ["CHANGELOG.md", "docs/design/"];

/// Whether a document describes the past.
pub(super) fn is_history(path: &str) -> bool {
    HISTORY.iter().any(|history| path.starts_with(history))
}

/// Whether a file has the extension `ending`, which is given without the dot.
pub(super) fn has_ending(path: &str, ending: &str) -> bool {
    Path::new(path).extension() == Some(ending.as_ref())
}

/// The text of each file, by the path of the file below the root of the repository.
#[derive(Debug, Default)]
pub(super) struct Tree {
    files: BTreeMap<String, String>,
}

impl Tree {
    pub(super) fn read(root: &Path) -> Result<Self> {
        let mut tree = Self::default();
        tree.add(root, "").with_context(|| format!("read the files of {}", root.display()))?;
        Ok(tree)
    }

    #[cfg(test)]
    pub(super) fn of(files: &[(&str, &str)]) -> Self {
        Self { files: files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect() }
    }

    /// Returns all files, sorted by path.
    pub(super) fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// Returns the files with this ending below a folder, for example `("npl-agent/src/core/", ".rs")`.
    pub(super) fn below(&self, folder: &str, ending: &str) -> impl Iterator<Item = (&str, &str)> {
        self.files().filter(move |(path, _)| path.starts_with(folder) && path.ends_with(ending))
    }

    pub(super) fn text(&self, path: &str) -> Option<&str> {
        self.files.get(path).map(String::as_str)
    }

    /// Whether the tree contains a file or directory with this path.
    pub(super) fn has(&self, path: &str) -> bool {
        path.is_empty() || self.files.contains_key(path) || self.below(&format!("{path}/"), "").next().is_some()
    }

    fn add(&mut self, folder: &Path, prefix: &str) -> Result<()> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if LEFT_OUT.contains(&name.as_str()) {
                continue;
            }
            let path = format!("{prefix}{name}");
            if entry.file_type()?.is_dir() {
                self.add(&entry.path(), &format!("{path}/"))?;
            } else if let Ok(text) = fs::read_to_string(entry.path()) {
                self.files.insert(path, text);
            }
        }
        Ok(())
    }
}
