// SPDX-License-Identifier: Apache-2.0
//! The client of the API server: watches, patches of Pods, and Kubernetes Events.
//!
//! ```text
//! watch ──► objects ──► convert ──► Change ──► (main loop) ──► PodWrite ──► patch ──► Pod
//!                                                  └──────────► Problem ──► events ──► Event
//! ```
//!
//! This module makes no decisions about mappings; only the module `core` decides about mappings. An unreachable API
//! server does not end the agent. The watches retry and, until they succeed, the agent uses the objects that it
//! received last.

pub mod backoff;
pub mod client;
pub mod confinement;
pub mod contacts;
pub mod convert;
pub mod events;
pub mod failure;
mod limit;
pub mod objects;
pub mod patch;
mod renewal;
pub mod retire;
pub mod source;
mod streaming;
mod token;
mod transport;
pub mod watch;
pub mod watch_health;
pub mod watched;
pub mod writes;

use std::path::PathBuf;

use ::kube::Client;
pub use convert::AnnotationKeys;
use futures::{FutureExt as _, future::BoxFuture};
use k8s_openapi::jiff::Timestamp;
use tokio::{sync::mpsc::Sender, task::JoinSet};
pub use watch::WatchedObjects;

use self::{client::ConnectError, confinement::ConfinementResult, contacts::WatchContacts, watch_health::Observers};
use crate::{
    core::model::snapshot::Change,
    metrics::{Metrics, WatchedResource},
};

/// The client of the API server, a future that resolves only if the API server denies the agent access, and the tasks
/// of the watches.
pub type Connection = (Client, BoxFuture<'static, ConnectError>, JoinSet<WatchedResource>);

/// Creates a client and starts the watches on separate tasks, so that the agent can load its programs at the same time.
/// The watches start before the check of permissions has ended.
///
/// # Errors
///
/// The returned task returns an error if the kubeconfig or the service account is unusable.
pub fn connect_and_watch(
    kubeconfig: Option<PathBuf>,
    watched: WatchedObjects,
    keys: &AnnotationKeys,
    metrics: &Metrics,
    contacts: &WatchContacts,
    confinement: &ConfinementResult,
    changes: Sender<Change>,
) -> JoinSet<Result<Connection, ConnectError>> {
    let (keys, confinement) = (keys.clone(), confinement.clone());
    let observers = Observers { metrics: metrics.clone(), contacts: contacts.clone(), namespace: None };
    let mut connecting = JoinSet::new();
    connecting.spawn(async move {
        let (client, url) = client::open(kubeconfig.as_deref(), "npl-agent").await?;
        let watches = watch::spawn(&client, &watched, &keys, &observers, &changes);
        let refusal = client::refusal(client.clone(), url, watched.node_name, confinement);
        Ok((client, refusal.boxed(), watches))
    });
    connecting
}

/// Returns the time of the wall clock, which is used only for timestamps in Events and conditions. Decisions use the
/// monotonic clock, because an operator or NTP may set the wall clock back.
#[expect(clippy::disallowed_methods, reason = "the timestamp is only displayed in Events and conditions")]
fn wall_clock() -> Timestamp {
    Timestamp::now()
}

#[cfg(test)]
mod mock;
