// SPDX-License-Identifier: Apache-2.0
//! Each test compares the log of a scenario with the expected lines.

mod antrea;
mod gate;
mod life;
mod meddling;
mod node;
mod restart;
mod selection;
mod sources;
