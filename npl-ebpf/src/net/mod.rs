// SPDX-License-Identifier: GPL-2.0-only
//! Packet formats: headers, parsing, IPv4, IPv6, ICMP and SCTP. This layer imports only `base`, and accesses no map.

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
