// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! The contract between NPL's kernel programs and everything in user space.
//!
//! Whatever both sides must agree on is here and nowhere else: the keys and values of every map, the reasons that
//! are counted, the names of maps and programs, the ABI version, and the arithmetic of checksums.
//!
//! # Byte order and layout
//!
//! * Addresses are byte arrays in network order, so that a dump reads `[10,0,0,5]`.
//! * Ports are `u16` in **host** order, so that a dump reads `61000`; the kernel programs convert once.
//! * Times are nanoseconds of `CLOCK_MONOTONIC`.
//! * Every type is `#[repr(C)]` with explicit padding that is always zero: the kernel compares keys byte by byte.
//! * A change of any layout, name or discriminant bumps [`names::ABI_VERSION`].

#![cfg_attr(not(test), no_std)]
#![warn(missing_docs)]

#[macro_use]
mod layout;

pub mod config;
pub mod crc;
pub mod csum;
pub mod direct;
pub mod flow;
pub mod fragment;
pub mod hint;
pub mod hold;
pub mod host;
pub mod mapping;
pub mod names;
pub mod offload;
pub mod peer;
pub mod reason;
pub mod stats;
pub mod stray;
pub mod syn;
pub mod traffic;

pub use layout::{LAYOUTS, Layout};
