// SPDX-License-Identifier: Apache-2.0
//! What happens, told line by line.

mod antrea;
mod life;
mod meddling;
mod restart;
mod selection;
mod sources;
