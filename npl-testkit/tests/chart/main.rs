// SPDX-License-Identifier: Apache-2.0
//! The Helm chart: each value has its effect, wrong ones are refused, and a real API server accepts each profile, and each alert
//! fires when it should and only then.
//! `cargo xtask test` builds Helm, the API server and etcd,
//! and downloads Prometheus.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod alerts;
mod objects;
mod profiles;
mod refusals;
mod values;
