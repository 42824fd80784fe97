// SPDX-License-Identifier: Apache-2.0
//! Clients on the Node and in its Pods. Their processes are in a cgroup of the test.

mod addresses;
mod lifecycle;
mod peer_address;
mod pods;
mod scene;
mod sources;
