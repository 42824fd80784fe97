// SPDX-License-Identifier: Apache-2.0

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use super::{Health, HttpError, Servers};
use crate::metrics::{Counts, DatapathCounters, Metrics};

struct NoCounters;

impl DatapathCounters for NoCounters {
    fn read(&self) -> Counts {
        Counts::default()
    }
}

async fn get(address: SocketAddr, path: &str) -> String {
    get_as(address, path, "*/*").await
}

async fn get_as(address: SocketAddr, path: &str, accept: &str) -> String {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: npl\r\nAccept: {accept}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    timeout(Duration::from_secs(5), exchange).await.unwrap()
}

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

type Server = tokio::task::JoinHandle<std::io::Result<()>>;

/// Starts the server for probes and metrics, and the server for metrics only. Returns the address of the server for
/// probes and metrics, followed by the address of the server for metrics only.
async fn start_servers(health: &Health) -> ([SocketAddr; 2], Server) {
    let servers = Servers::bind(ANY, Some(ANY)).await.unwrap();
    let addresses = [&servers.probes, servers.metrics.as_ref().unwrap()].map(|it| it.local_addr().unwrap());
    (addresses, tokio::spawn(servers.serve(health.clone(), Metrics::new(Arc::new(NoCounters)))))
}

async fn start_server(health: &Health) -> (SocketAddr, Server) {
    let ([address, _], server) = start_servers(health).await;
    (address, server)
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
async fn metrics_are_served_as_plain_text_or_as_openmetrics_by_the_accept_header() {
    let (address, server) = start_server(&Health::new()).await;
    let plain = get(address, "/metrics").await;
    assert!(plain.contains("content-type: text/plain; version=0.0.4; charset=utf-8"), "{plain}");
    assert!(plain.contains("# TYPE process_cpu_seconds_total counter\n") && !plain.contains("# EOF"), "{plain}");
    // The `Accept` header that Prometheus 2.42 sends.
    let accept = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                  text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
    let answer = get_as(address, "/metrics", accept).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert!(answer.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"), "{answer}");
    assert!(answer.contains("npl_build_info{") && answer.ends_with("# EOF\n"), "{answer}");
    server.abort();
}

#[tokio::test]
async fn the_server_for_metrics_has_no_probes() {
    let ([_, address], server) = start_servers(&Health::new()).await;
    assert!(get(address, "/metrics").await.contains("\nnpl_ready 0\n"));
    for path in ["/livez", "/readyz", "/startupz", "/"] {
        assert!(get(address, path).await.starts_with("HTTP/1.1 404 "), "{path}");
    }
    server.abort();
}

#[tokio::test]
async fn a_port_in_use_is_reported_with_a_remedy() {
    let first = Servers::bind(ANY, None).await.unwrap();
    let address = first.probes.local_addr().unwrap();
    let err = Servers::bind(ANY, Some(address)).await.unwrap_err();
    assert!(matches!(err, HttpError::InUse { .. }), "{err}");
    assert_eq!(
        err.to_string(),
        format!(
            "listen on {address}: the port is in use; stop the other process or choose another port with --metrics-listen"
        )
    );
}
