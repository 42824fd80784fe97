// SPDX-License-Identifier: Apache-2.0

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use super::{Health, HttpError, bind, serve};
use crate::metrics::{Counts, DatapathCounters, Metrics};

struct NoCounters;

impl DatapathCounters for NoCounters {
    fn read(&self) -> Counts {
        Counts::default()
    }
}

async fn get(address: SocketAddr, path: &str) -> String {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: npl\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    timeout(Duration::from_secs(5), exchange).await.unwrap()
}

async fn start_server(health: &Health) -> (SocketAddr, tokio::task::JoinHandle<std::io::Result<()>>) {
    let listener = bind(([127, 0, 0, 1], 0).into()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = serve(listener, health.clone(), Metrics::new(Arc::new(NoCounters)));
    (address, tokio::spawn(server))
}

#[tokio::test]
async fn probes_return_503_until_the_agent_is_ready() {
    let health = Health::new();
    let (address, server) = start_server(&health).await;
    for (path, status) in [("/livez", 200), ("/startupz", 503), ("/readyz", 503)] {
        assert!(get(address, path).await.starts_with(&format!("HTTP/1.1 {status} ")), "{path}");
    }
    health.set_attached(true);
    health.set_synced();
    for path in ["/livez", "/startupz", "/readyz"] {
        assert!(get(address, path).await.starts_with("HTTP/1.1 200 "), "{path}");
    }
    server.abort();
}

#[tokio::test]
async fn the_readiness_metric_follows_the_probe() {
    let health = Health::new();
    let (address, server) = start_server(&health).await;
    assert!(get(address, "/metrics").await.contains("\nnpl_ready 0\n"));
    health.set_attached(true);
    health.set_synced();
    assert!(get(address, "/metrics").await.contains("\nnpl_ready 1\n"));
    health.set_attached(false);
    assert!(get(address, "/metrics").await.contains("\nnpl_ready 0\n"));
    server.abort();
}

#[tokio::test]
async fn metrics_are_served_in_the_openmetrics_format() {
    let (address, server) = start_server(&Health::new()).await;
    let answer = get(address, "/metrics").await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert!(answer.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"), "{answer}");
    assert!(answer.contains("npl_build_info{") && answer.ends_with("# EOF\n"), "{answer}");
    server.abort();
}

#[tokio::test]
async fn a_port_in_use_is_reported_with_a_remedy() {
    let first = bind(([127, 0, 0, 1], 0).into()).await.unwrap();
    let address = first.local_addr().unwrap();
    let err = bind(address).await.unwrap_err();
    assert!(matches!(err, HttpError::InUse(_)), "{err}");
    assert_eq!(
        err.to_string(),
        format!("listen on {address}: the port is in use; stop the other process or choose another port with --listen")
    );
}
