// SPDX-License-Identifier: Apache-2.0
//! The bench.

fn main() {}
