// SPDX-License-Identifier: GPL-2.0-only
//! This layer defines and parses packet headers: IPv4, IPv6, TCP, UDP, SCTP and ICMP. The layer imports only `base`,
//! and accesses no map.

mod extension;
pub mod family;
pub mod headers;
pub mod icmp;
pub mod packet;
pub mod route;
pub mod sctp;
mod v4;
mod v6;

pub use v4::V4;
pub use v6::V6;
