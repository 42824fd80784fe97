// SPDX-License-Identifier: GPL-2.0-only
//! This layer rewrites the headers of translated packets, and redirects the packets to other devices. The layer imports
//! `base`, `net` and `state`.

pub mod redirect;
pub mod rewrite;
