// SPDX-License-Identifier: Apache-2.0
//! The built agent against a real API server, under the rights that `deploy/npl.yaml` gives it, with real traffic.
//! Needs root, the binaries of `cargo xtask setup`, and the agent of `cargo xtask build`.

#![expect(clippy::unwrap_used, reason = "what fails here ends the test")]

mod bad_input;
mod bond;
mod changes;
mod clock;
mod contract;
mod devices;
mod doctor;
mod events;
mod families;
mod faults;
mod formats;
mod guard;
mod life;
mod local;
mod main_job;
mod redirect;
mod refusals;
mod restart;
mod sources;
mod views;
mod world;
