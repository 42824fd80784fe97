// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Defines the ABI between NPL's kernel programs and user space: the keys, values and names of all maps, the names of
//! programs, the reasons under which packets are counted, and the ABI version. The crate also contains the connection
//! tracking state machine and checksum arithmetic.
//!
//! # Byte order and layout
//!
//! * Addresses are byte arrays in network order, so that a dump of a map shows `[10,0,0,5]`.
//! * Ports are `u16` in **host** order, so that a dump of a map shows `61000`. The kernel programs convert a packet's
//!   ports once.
//! * Times are nanoseconds of `CLOCK_MONOTONIC`, units of 2^30 ns (1.07 s, [`fragment::time`]) of this clock, or the
//!   low 32 bits of `jiffies`. The description of each field states the unit.
//! * Every struct that is a map's key or value is `#[repr(C)]`. The struct's padding is explicit and always zero,
//!   because the kernel compares keys byte by byte.
//! * [`names::ABI_VERSION`] must be incremented when the layout of a map changes, or when a number in a map, such as
//!   the number of a reason, gets another meaning. If only a map's name changes, the former name is added to
//!   [`former_names`].

#![cfg_attr(not(test), no_std)]
#![warn(missing_docs)]

#[macro_use]
mod layout;

pub mod catalog;
pub mod config;
pub mod conntrack;
pub mod crc;
pub mod csum;
pub mod flow;
pub mod former_names;
pub mod fragment;
pub mod fragment_buffer;
pub mod half_open;
pub mod hash;
pub mod host_connection;
pub mod lookup_cache;
pub mod mapping;
pub mod names;
pub mod next_hop;
pub mod offload;
pub mod packet_trace;
pub mod reason;
mod sctp_numbers;
pub mod socket_rnat;
pub mod stats;
pub mod traffic;
pub mod unmapped;

pub use layout::{FieldLayout, LAYOUTS, Layout};
