// SPDX-License-Identifier: Apache-2.0
//! The API server: what the agent reads from it, the one thing that it writes, and what it tells users.
//!
//! ```text
//! watch ──► objects ──► convert ──► Change ──► (owner task) ──► PodWrite ──► patch ──► Pod
//!                                                   └─────────► Problem ──► events ──► Event
//! ```
//!
//! Nothing here decides anything, and nothing here ends the agent because the API server is away: the watches go on
//! trying, and the last known state goes on being served.

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

/// A client, the API server's refusal to let the agent do its work, if it comes to that, and the watches.
pub type Connection = (Client, BoxFuture<'static, ConnectError>, JoinSet<WatchedResource>);

/// Watches on tasks of their own: a restart is over when the API server and the kernel have answered, and neither needs
/// to wait for the other, nor the watches for the answer to whether they are allowed.
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

/// When something happened, for those who read it. Whatever is decided is decided by a clock that nobody sets.
#[expect(clippy::disallowed_methods, reason = "shown to people by Events and conditions, and decides nothing")]
fn shown_time() -> Timestamp {
    Timestamp::now()
}

#[cfg(test)]
mod mock;
