// SPDX-License-Identifier: Apache-2.0
//! Tests mappings with clients on the Node and in its Pods. The processes of the clients are in a cgroup of the test.

mod addresses;
mod lifecycle;
mod peer_address;
mod pods;
mod scene;
mod sources;
