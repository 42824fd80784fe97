// SPDX-License-Identifier: Apache-2.0
//! Watches all Pods, the Services that `--services` selects, and all Nodes, with the watch loop of the agent's library.
//! The feed keeps only Pods with the annotation.

mod objects;

use std::sync::Arc;

use npl_agent::{
    kube::{
        client::{self, ConnectError},
        convert::AnnotationKeys,
        source::Selection,
        watch::Watch,
    },
    metrics::WatchedResource,
};
use tokio::{sync::mpsc::Sender, task::JoinSet};

use self::objects::{FeedNode, FeedPod, FeedService};
use crate::{config::Config, core::model::Change, status::Status};

/// Starts the three watches. The watches retry after every failure, and run until the receiver of `changes` is dropped.
///
/// # Errors
///
/// Returns an error if the kubeconfig or the service account is unusable.
pub async fn watch(
    config: &Config,
    status: &Arc<Status>,
    changes: &Sender<Change>,
) -> Result<JoinSet<WatchedResource>, ConnectError> {
    let (client, _url) = client::open(config.kubeconfig.as_deref(), "npl-feed").await?;
    let status = Arc::clone(status);
    let watch = Watch::new(&AnnotationKeys::new(&config.annotation_domain), status, changes);
    let services = Selection { labels: config.services.clone(), ..Selection::default() };
    let mut tasks = JoinSet::new();
    tasks.spawn(watch.clone().follow::<FeedPod>(client.clone(), Selection::default()));
    tasks.spawn(watch.clone().follow::<FeedService>(client.clone(), services));
    tasks.spawn(watch.follow::<FeedNode>(client, Selection::default()));
    Ok(tasks)
}
