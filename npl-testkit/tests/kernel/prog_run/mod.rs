// SPDX-License-Identifier: Apache-2.0
//! Packets in, verdict and packets out, byte by byte, and every counter: `BPF_PROG_TEST_RUN` over the shipped object.
//!
//! The kernel takes a frame for another machine's unless it is addressed to the loopback device, whose address is zero.

mod complete;
mod direct;
mod errors;
pub(crate) mod extensions;
mod flows;
pub(crate) mod fragments;
mod hints;
mod host;
mod l3;
mod loads;
mod offload;
mod reasons;
mod redirect;
mod replies;
mod reply_hints;
mod requests;
mod round_trip;
mod scene;
mod sctp;
mod sctp_flows;
mod sctp_fragments;
mod sources;
mod strays;
mod sweep;
mod together;
mod untouched;
mod xdp;
