// SPDX-License-Identifier: GPL-2.0-only
//! Actions on a translated packet: rewriting its bytes and forwarding it. Imports `base`, `net` and `state`.

pub mod redirect;
pub mod rewrite;
