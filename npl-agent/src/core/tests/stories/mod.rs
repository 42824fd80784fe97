// SPDX-License-Identifier: Apache-2.0
//! Each test compares the log of a scenario with the expected lines.

mod antrea;
mod life;
mod meddling;
mod restart;
mod node;
mod selection;
mod sources;
