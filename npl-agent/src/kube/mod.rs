// SPDX-License-Identifier: Apache-2.0
//! The API server: watches, patches of Pods, and Events.
//!
//! ```text
//! watch ──► objects ──► convert ──► Change ──► (main loop) ──► PodWrite ──► patch ──► Pod
//!                                                  └──────────► Problem ──► events ──► Event
//! ```
//!
//! This module decides nothing. It does not end the agent when the API server is away: the watches retry, and the last
//! known state is served.

pub mod backoff;
pub mod client;
pub mod convert;
pub mod events;
pub mod failure;
mod limit;
pub mod objects;
pub mod patch;
mod token;
pub mod watch;
pub mod writes;

use std::path::PathBuf;

use ::kube::Client;
pub use convert::AnnotationKeys;
use futures::{FutureExt as _, future::BoxFuture};
use k8s_openapi::jiff::Timestamp;
use tokio::{sync::mpsc::Sender, task::JoinSet};

use self::client::ConnectError;
use crate::{
    core::model::snapshot::Change,
    metrics::{Metrics, WatchedResource},
};

/// The client, a future that returns if permissions are missing, and the watches.
pub type Connection = (Client, BoxFuture<'static, ConnectError>, JoinSet<WatchedResource>);

/// Connects and watches in tasks of their own: loading programs, watches and the check of permissions do not wait for
/// each other.
pub fn connect_and_watch(
    kubeconfig: Option<PathBuf>,
    node_name: &str,
    keys: &AnnotationKeys,
    metrics: &Metrics,
    changes: Sender<Change>,
) -> JoinSet<Result<Connection, ConnectError>> {
    let (node_name, keys, metrics) = (node_name.to_owned(), keys.clone(), metrics.clone());
    let mut connecting = JoinSet::new();
    connecting.spawn(async move {
        let (client, url) = client::open(kubeconfig.as_deref()).await?;
        let watches = watch::spawn(&client, &node_name, &keys, &metrics, &changes);
        let refusal = client::refusal(client.clone(), url, node_name);
        Ok((client, refusal.boxed(), watches))
    });
    connecting
}

/// The wall clock, for users who read it. Decisions use a monotonic clock.
#[expect(clippy::disallowed_methods, reason = "shown to people by Events and conditions, and decides nothing")]
fn shown_time() -> Timestamp {
    Timestamp::now()
}

#[cfg(test)]
mod mock;
