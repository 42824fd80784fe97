// SPDX-License-Identifier: Apache-2.0
//! Tests of the core as a whole: scenarios as text, and properties that hold after random sequences of events.

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
