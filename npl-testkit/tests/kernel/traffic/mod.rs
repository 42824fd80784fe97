// SPDX-License-Identifier: Apache-2.0
//! Real connections from a client over the Node to Pods, checked at both ends by what was sent.

mod firewall;
mod foreign;
mod offload;
mod requests;
