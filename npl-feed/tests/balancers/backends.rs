// SPDX-License-Identifier: Apache-2.0
//! HTTP servers that stand in for Pods and answer with the name of their Pod.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{Router, routing::any};
use tokio::{
    io::AsyncReadExt as _,
    net::{TcpListener, TcpStream},
    runtime::Handle,
    sync::oneshot,
    task::JoinHandle,
};

/// The running servers by the name of their Pod.
pub(crate) struct Backends {
    runtime: Handle,
    running: BTreeMap<String, Server>,
}

/// The address of a server, a sender whose drop stops the server, and the task of the server.
type Server = (SocketAddr, oneshot::Sender<()>, JoinHandle<()>);

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
            let router = Router::new().route("/", any(|| async move { name }));
            // For Prometheus, which scrapes the Pods: an empty list of metrics.
            let router = router.route("/metrics", any(|| async {}));
            let ended = async {
                // The receiver's error is ignored: it only means that the sender was dropped, which stops the server.
                drop(stopped.await);
            };
            axum::serve(listener, router).with_graceful_shutdown(ended).await.unwrap();
        });
        self.running.insert(pod.to_owned(), (address, stop, task));
    }

    /// Stops the server of a Pod as a process stops on SIGTERM: the server accepts no further connections, and answers
    /// the requests in progress. Returns the server's address.
    pub(crate) fn stop(&mut self, pod: &str) -> SocketAddr {
        let (address, stop, task) = self.running.remove(pod).unwrap();
        drop(stop);
        self.runtime.block_on(task).unwrap();
        address
    }

    /// Replaces the server of a Pod by one that resets connections, as in [`Self::start_crashing`].
    pub(crate) fn crash(&mut self, pod: &str) {
        let address = self.stop(pod);
        self.start_crashing(pod, address);
    }

    /// Starts a server that accepts connections, and resets each of them when a request arrives, as the kernel does
    /// with the connections of a process that crashes. Returns the counter of the requests that have arrived.
    pub(crate) fn start_crashing(&mut self, pod: &str, address: SocketAddr) -> Arc<AtomicUsize> {
        let (stop, stopped) = oneshot::channel();
        let received = Arc::<AtomicUsize>::default();
        let counter = Arc::clone(&received);
        let listener = self.runtime.block_on(TcpListener::bind(address)).unwrap();
        let task = self.runtime.spawn(async move {
            tokio::select! {
                () = reset_all(&listener, &counter) => {}
                _dropped = stopped => {}
            }
        });
        self.running.insert(pod.to_owned(), (address, stop, task));
        received
    }
}

#[expect(clippy::infinite_loop, reason = "the future is dropped")]
async fn reset_all(listener: &TcpListener, received: &Arc<AtomicUsize>) {
    loop {
        let (stream, _client) = listener.accept().await.unwrap();
        tokio::spawn(reset_after_request(stream, Arc::clone(received)));
    }
}

async fn reset_after_request(mut stream: TcpStream, received: Arc<AtomicUsize>) {
    let mut request = [0; 1024];
    // A connection without a request comes from a health check, and is closed without a reset.
    if stream.read(&mut request).await.is_ok_and(|length| length > 0) {
        received.fetch_add(1, Ordering::SeqCst);
        stream.set_zero_linger().unwrap();
    }
}
