// SPDX-License-Identifier: Apache-2.0
//! Life cycle of pinned maps, programs and links: the next agent adopts, replaces, repairs or removes them, beside
//! third-party programs.

mod cleanup;
mod filter_order;
mod foreign;
mod ingress_qdisc;
mod instances;
mod map_limits;
mod other_programs;
mod pins;
pub(crate) mod programs;
mod restart;
mod sizes;
mod versions;
mod xdp;
