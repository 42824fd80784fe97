// SPDX-License-Identifier: Apache-2.0
//! Tests the built agent with the privileges of `deploy/npl.yaml`, a real API server and real traffic. The tests need
//! root, the binaries of `cargo xtask setup`, and the agent of `cargo xtask build`.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod bad_input;
mod bond;
mod changes;
mod cleanup;
mod clock;
mod contract;
mod credentials;
mod devices;
mod doctor;
mod doctor_agent;
mod doctor_traffic;
mod events;
mod families;
mod fault_points;
mod faults;
mod foreign_changes;
mod formats;
mod from_antrea;
mod guard;
mod host_ports;
mod install;
mod kubectl_plugin;
mod life;
mod lists;
mod local;
mod main_job;
mod monitoring;
mod namespaces;
mod node_networks;
mod packet_trace;
mod recipes;
mod redirect;
mod refusals;
mod requested_ports;
mod restart;
mod selector;
mod soak;
mod sources;
mod takeover;
mod unnumbered;
mod upgrade;
mod views;
mod virtual_machines;
mod world;
