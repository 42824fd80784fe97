// SPDX-License-Identifier: GPL-2.0-only
//! Actions on a packet that is translated: the rewrite of the headers, and redirect. Imports `base`, `net` and `state`.

pub mod redirect;
pub mod rewrite;
