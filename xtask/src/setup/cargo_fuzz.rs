// SPDX-License-Identifier: Apache-2.0
//! Builds cargo-fuzz, which compiles the fuzz targets with coverage counters.

use std::path::PathBuf;

use anyhow::Result;

use super::cargo_tool;

const VERSION: &str = "0.13.2";

/// Returns the path of cargo-fuzz in the cache, and compiles cargo-fuzz if it is missing there.
pub(crate) fn obtain() -> Result<PathBuf> {
    cargo_tool::obtain("cargo-fuzz", VERSION, &[VERSION.as_bytes()], "the builder of fuzz targets once, about a minute")
}
