// SPDX-License-Identifier: Apache-2.0
//! Builds cargo-deny, which compares the dependencies with `deny.toml`.

use std::path::PathBuf;

use anyhow::Result;

use super::cargo_tool;

const VERSION: &str = "0.20.2";

/// Returns the path of cargo-deny in the cache, and compiles cargo-deny if it is missing there.
pub(crate) fn obtain() -> Result<PathBuf> {
    cargo_tool::obtain("cargo-deny", VERSION, &[VERSION.as_bytes()], "the check of dependencies once, about 2 minutes")
}
