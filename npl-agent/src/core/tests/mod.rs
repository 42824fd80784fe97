// SPDX-License-Identifier: Apache-2.0
//! Tests of the core through its public interface: scenarios as text, and properties of random event sequences.

mod chaos;
mod check;
mod namespaces;
mod one_pod;
mod properties;
mod races;
mod script;
mod stories;
mod usage;
mod view;
mod why;
mod world;
