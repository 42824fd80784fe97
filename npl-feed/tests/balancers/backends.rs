// SPDX-License-Identifier: Apache-2.0
//! HTTP servers that stand in for Pods and answer with the name of their Pod.

use std::{collections::BTreeMap, net::SocketAddr};

use axum::{Router, routing::get};
use tokio::{net::TcpListener, runtime::Handle, sync::oneshot, task::JoinHandle};

/// The running servers by the name of their Pod.
pub(crate) struct Backends {
    runtime: Handle,
    running: BTreeMap<String, (oneshot::Sender<()>, JoinHandle<()>)>,
}

impl Backends {
    pub(crate) fn new(runtime: &Handle) -> Self {
        Self { runtime: runtime.clone(), running: BTreeMap::new() }
    }

    /// Starts the server of a Pod. The server listens when this function returns.
    pub(crate) fn start(&mut self, pod: &str, address: SocketAddr) {
        let (stop, stopped) = oneshot::channel();
        let name = pod.to_owned();
        let listener = self.runtime.block_on(TcpListener::bind(address)).unwrap();
        let task = self.runtime.spawn(async move {
            let router = Router::new().route("/", get(|| async move { name }));
            let ended = async {
                // A dropped sender stops the server too.
                drop(stopped.await);
            };
            axum::serve(listener, router).with_graceful_shutdown(ended).await.unwrap();
        });
        self.running.insert(pod.to_owned(), (stop, task));
    }

    /// Stops the server of a Pod as a process stops on SIGTERM: the server accepts no further connections, and answers
    /// the requests in progress.
    pub(crate) fn stop(&mut self, pod: &str) {
        let (stop, task) = self.running.remove(pod).unwrap();
        drop(stop);
        self.runtime.block_on(task).unwrap();
    }
}
