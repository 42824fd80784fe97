// SPDX-License-Identifier: GPL-2.0-only
//! This layer contains the steps of each kind of program: requests, replies, the slow path, XDP, stack observations for
//! offload, and sockets of local clients. The layer imports `base`, `net`, `state` and `act`.

mod fragment;
pub mod hook;
pub mod offload;
pub mod reply;
pub mod request;
pub mod slow_path;
pub mod socket;
mod trace;
pub mod xdp;
