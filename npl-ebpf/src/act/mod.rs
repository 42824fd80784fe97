// SPDX-License-Identifier: GPL-2.0-only
//! The actions on a translated packet: the rewrite of its headers, and the redirect to another device. This layer
//! imports `base`, `net` and `state`.

pub mod redirect;
pub mod rewrite;
