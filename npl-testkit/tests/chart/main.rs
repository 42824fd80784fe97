// SPDX-License-Identifier: Apache-2.0
//! Tests of the Helm chart: each value has its effect, Helm rejects wrong values, a real API server accepts each
//! profile, and each alert fires only on the fault that it describes. Also tests the package of the kubectl plug-in.
//! `cargo xtask test` builds Helm, krew, the API server and etcd, and downloads Prometheus.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod alerts;
mod feed;
mod groups;
mod krew;
mod objects;
mod profiles;
mod refusals;
mod values;
