// SPDX-License-Identifier: Apache-2.0
//! The NodePortLocal agent.

pub mod core;
