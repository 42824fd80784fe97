// SPDX-License-Identifier: Apache-2.0
//! Builds bpf-linker, which links rustc's LLVM bitcode into a kernel object.

use std::path::PathBuf;

use anyhow::Result;

use super::cargo_tool;

/// The version of bpf-linker: the last version that loads the compiler's libLLVM at run time, so that no other LLVM
/// needs to be installed.
const VERSION: &str = "0.10.3";

/// The major version of LLVM whose bitcode [`VERSION`] reads.
pub(crate) const LLVM: u32 = 22;

/// Returns the path of bpf-linker in the cache, and compiles bpf-linker if it is missing there.
pub(crate) fn obtain() -> Result<PathBuf> {
    let made_from: [&[u8]; 2] = [VERSION.as_bytes(), &LLVM.to_le_bytes()];
    cargo_tool::obtain("bpf-linker", VERSION, &made_from, "the linker of the kernel programs once, 1 to 2 minutes")
}
