// SPDX-License-Identifier: Apache-2.0
//! Clients on the Node itself and in its Pods, in a cgroup of the test's own.

mod life;
mod names;
mod pods;
mod scene;
mod shown;
mod sources;
