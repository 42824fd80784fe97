// SPDX-License-Identifier: Apache-2.0
//! Tests of the core as a whole: scenarios as text, and properties that hold after random sequences of events. The fuzz
//! target `cluster` uses the same model and checks the same properties ([`fuzz`]).

#![expect(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test or a fuzz target reports a fault")]
#![cfg_attr(not(test), expect(dead_code, reason = "some functions of the model are only for tests"))]

mod chaos;
#[cfg(test)]
mod check;
mod events;
pub(crate) mod fuzz;
#[cfg(test)]
mod namespaces;
#[cfg(test)]
mod one_pod;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod races;
#[cfg(test)]
mod script;
#[cfg(test)]
mod stories;
#[cfg(test)]
mod usage;
#[cfg(test)]
mod view;
#[cfg(test)]
mod why;
mod world;
