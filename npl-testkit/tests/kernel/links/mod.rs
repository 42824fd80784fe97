// SPDX-License-Identifier: Apache-2.0
//! Tests the life cycle of pinned maps, programs and links. The next agent adopts, replaces, repairs or removes them,
//! and programs of other software on the same hooks are not affected.

mod cleanup;
mod fault_points;
mod filter_order;
mod foreign;
mod foreign_changes;
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
