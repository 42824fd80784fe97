// SPDX-License-Identifier: Apache-2.0
//! Environment variables with which a developer changes how much a test does.

use std::env;

use anyhow::{Context as _, Result};

/// Returns the number in an environment variable; `None` if the variable is not set.
///
/// # Errors
///
/// If the value is not a number.
pub fn number(variable: &str) -> Result<Option<u64>> {
    let Ok(value) = env::var(variable) else { return Ok(None) };
    value.parse().map(Some).with_context(|| format!("{variable} must be a number, not `{value}`"))
}
