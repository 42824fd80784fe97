// SPDX-License-Identifier: Apache-2.0
//! Tests scenarios: each test compares the ops that result from a scenario with the expected ops.

mod antrea;
mod gate;
mod life;
mod meddling;
mod node;
mod requests;
mod restart;
mod selection;
mod sources;
