// SPDX-License-Identifier: Apache-2.0
//! The kernel object that the build embeds.

use super::error::DatapathError;

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/npl.bpf.o"));

/// The kernel object, as `cargo xtask build-ebpf` left it.
///
/// # Errors
///
/// If the agent was built without one.
pub fn embedded_object() -> Result<&'static [u8], DatapathError> {
    if OBJECT.is_empty() { Err(DatapathError::NoObject) } else { Ok(OBJECT) }
}
