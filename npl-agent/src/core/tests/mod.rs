// SPDX-License-Identifier: Apache-2.0
//! The core as its caller sees it: stories in text, and properties of random worlds.

mod chaos;
mod properties;
mod races;
mod script;
mod stories;
mod world;
