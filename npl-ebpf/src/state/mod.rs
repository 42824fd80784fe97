// SPDX-License-Identifier: GPL-2.0-only
//! This layer keeps the state of the kernel programs between packets: connection tracking, fragment tracking, lookup
//! caches and host connections. The layer imports `base` and `net`.

pub mod conntrack;
pub mod flow_entry;
pub mod fragment;
pub mod fragment_buffer;
pub mod half_open_slots;
pub mod host_connection;
pub mod lookup_cache;
pub mod maps;
pub mod sctp_reassembly;
pub mod socket_peers;
pub mod stack_seen;
pub mod tuple;
pub mod unmapped;
