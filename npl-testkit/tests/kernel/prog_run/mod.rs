// SPDX-License-Identifier: Apache-2.0
//! Runs the shipped programs on single packets with `BPF_PROG_TEST_RUN`, and tests the verdict, every output byte and
//! every counter.
//!
//! The kernel treats a frame as addressed to another host unless its destination is the loopback device's address,
//! which is all zeros.

mod batch_writes;
mod checksum_complete;
mod direct_connections;
mod displacement;
pub(crate) mod errors;
pub(crate) mod extensions;
mod flows;
pub(crate) mod forged;
mod forged_datagrams;
mod forged_errors;
mod forged_fragments;
mod forged_paths;
mod forged_phases;
mod forged_sctp;
pub(crate) mod fragments;
mod host_connection;
mod l3;
mod lookup_cache;
mod offload;
mod packet_trace;
mod reasons;
pub(crate) mod redirect;
mod replies;
mod reply_cache;
mod requests;
mod round_trip;
pub(crate) mod scene;
mod sctp;
mod sctp_flows;
mod sctp_fragments;
mod sctp_recovery;
mod sources;
mod sweep;
mod unmapped;
mod untouched;
mod xdp;
