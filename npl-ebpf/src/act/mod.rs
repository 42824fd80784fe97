// SPDX-License-Identifier: GPL-2.0-only
//! What is done to a translated packet: its bytes are rewritten, and it is forwarded. Imports `base`, `net` and `state`.

pub mod redirect;
pub mod rewrite;
