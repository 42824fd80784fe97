// SPDX-License-Identifier: Apache-2.0
//! The life of what is pinned: it outlives the loader, is adopted, replaced, repaired and removed, beside that of others.

mod cleanup;
mod foreign;
mod full;
mod ingress;
mod instances;
mod neighbours;
mod pins;
pub(crate) mod programs;
mod restart;
mod xdp;
