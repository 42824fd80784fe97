// SPDX-License-Identifier: Apache-2.0

use std::{
    convert::Infallible,
    io::Write as _,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use flate2::{Compression, write::GzEncoder};
use futures::StreamExt as _;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::{rt::TokioIo, server::conn::auto, service::TowerToHyperService};
use kube::api::WatchEvent;
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair},
};
use serde_json::json;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        crypto::ring::{default_provider, sign::any_ecdsa_type},
        pki_types::{CertificateDer, PrivatePkcs8KeyDer},
        sign::{CertifiedKey, SingleCertAndKey},
    },
};

use super::*;
use crate::kube::{
    mock::without_end,
    objects::PodObject,
    source::{Events, OpenWatch, Page, Selection, Source, WatchStart},
};

/// Makes the kernel drop every packet that arrives for the socket, like a stateful firewall that has lost the
/// connection's tracking entry.
fn swallow_packets(socket: &TcpStream) {
    let drop_all = [socket2::SockFilter::new(0x06, 0, 0, 0)]; // BPF_RET | BPF_K: keep 0 bytes
    socket2::SockRef::from(socket).attach_filter(&drop_all).unwrap();
}

#[tokio::test]
async fn a_connection_that_died_silently_fails_soon() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        let (mut socket, _client) = listener.accept().await.unwrap();
        let mut request = [0; 1024];
        assert!(socket.read(&mut request).await.unwrap() > 0);
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
        socket.write_all(head.as_bytes()).await.unwrap();
        socket
    });
    let second = Duration::from_secs(1);
    let liveness = Liveness { idle: second, interval: second, unacknowledged: second, ..LIVENESS };
    let client = build(Config::new(url.parse().unwrap()), liveness).unwrap();
    let source = Source::<PodObject>::new(client, Selection::default());
    let OpenWatch { mut events, .. } = source.watch(WatchStart::After("10"), 240).await.unwrap();
    let socket = server.await.unwrap();
    swallow_packets(&socket);
    let end = timeout(Duration::from_secs(20), events.next()).await.expect("the watch still waits");
    assert!(!matches!(end, Some(Ok(_))), "an event from a dead connection");
}

/// Accepts one connection, sends a response with these headers and this body, and returns the request in lower case.
async fn respond_once(listener: &TcpListener, headers: &str, body: &[u8]) -> String {
    let (mut socket, _client) = listener.accept().await.unwrap();
    let mut request = [0; 4096];
    let length = socket.read(&mut request).await.unwrap();
    let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n", body.len());
    socket.write_all(&[head.as_bytes(), body].concat()).await.unwrap();
    String::from_utf8_lossy(&request[..length]).to_lowercase()
}

#[tokio::test]
async fn lists_are_requested_compressed_and_watches_are_not() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let client = build(Config::new(url.parse().unwrap()), LIVENESS).unwrap();
    let source = Source::<PodObject>::new(client, Selection::default());

    let pods = json!({ "metadata": { "resourceVersion": "10" }, "items": [{ "metadata": { "name": "web-0" } }] });
    let mut compressed = GzEncoder::new(Vec::new(), Compression::fast());
    compressed.write_all(pods.to_string().as_bytes()).unwrap();
    let compressed = compressed.finish().unwrap();
    let page = Page { size: None, token: None };
    let (list, request) =
        tokio::join!(source.page(&page), respond_once(&listener, "content-encoding: gzip\r\n", &compressed));
    let names: Vec<_> = list.unwrap().items.into_iter().map(|pod| pod.metadata.object.name).collect();
    assert_eq!(names, [Some("web-0".to_owned())]);
    assert!(request.contains("\naccept-encoding: gzip\r"), "{request}");

    // A watch must not request compression. The API server of Kubernetes 1.37 and later would compress each event
    // separately, and the decoder cannot read separately compressed events.
    let (watch, request) = tokio::join!(source.watch(WatchStart::After("10"), 240), respond_once(&listener, "", b""));
    assert!(watch.is_ok());
    assert!(request.contains("\naccept-encoding: identity\r"), "{request}");
}

#[test]
fn a_dead_connection_is_noticed_within_half_a_minute() {
    let Liveness { idle, interval, unacknowledged, ping_after, ping_timeout } = LIVENESS;
    // The kernel checks the limit for unacknowledged data only when it sends a keep-alive probe, so the connection
    // fails up to one interval later.
    assert!(idle + interval <= unacknowledged && unacknowledged + interval <= Duration::from_secs(30));
    assert!(ping_after + ping_timeout <= Duration::from_secs(30));
}

const PATIENCE: Duration = Duration::from_secs(20);

/// Returns a TLS server that supports HTTP/1.1 and HTTP/2. The server's key does not belong to the certificate. The
/// tests do not notice this, because their clients reject the certificate first, or verify nothing.
pub(in crate::kube) fn tls(certificate: CertificateDer<'static>) -> TlsAcceptor {
    let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new()).unwrap();
    let key = any_ecdsa_type(&PrivatePkcs8KeyDer::from(pkcs8.as_ref().to_vec()).into()).unwrap();
    let certified = CertifiedKey::new(vec![certificate], key);
    let provider = Arc::new(default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let mut config = config.with_no_client_auth().with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

/// Answers every request with a body that contains one event of a watch and does not end.
async fn serve_watches(listener: TcpListener) {
    let tls = tls(CertificateDer::from(vec![0x30, 0]));
    while let Ok((socket, _client)) = listener.accept().await {
        let tls = tls.clone();
        tokio::spawn(async move {
            let stream = TokioIo::new(tls.accept(socket).await?);
            let answer = tower::service_fn(|_: Request<Incoming>| async {
                let event = r#"{"type":"ADDED","object":{"metadata":{"name":"web-0","resourceVersion":"11"}}}"#;
                Ok::<_, Infallible>(Response::new(without_end(format!("{event}\n"))))
            });
            auto::Builder::new(TokioExecutor::new()).serve_connection(stream, TowerToHyperService::new(answer)).await
        });
    }
}

/// Forwards connections to `server`. The proxy numbers its connections, and discards the data of a connection once
/// `swallowed` exceeds the connection's number. The proxy still reads what client and server send, so that the kernel
/// acknowledges all segments.
async fn proxy(listener: TcpListener, server: SocketAddr, swallowed: Arc<AtomicU64>) {
    for number in 0.. {
        let (client, _peer) = listener.accept().await.unwrap();
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = TcpStream::connect(server).await.unwrap().into_split();
        tokio::spawn(forward(from_client, to_server, number, Arc::clone(&swallowed)));
        tokio::spawn(forward(from_server, to_client, number, Arc::clone(&swallowed)));
    }
}

async fn forward(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    number: u64,
    swallowed: Arc<AtomicU64>,
) {
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        let is_swallowed = number < swallowed.load(Ordering::SeqCst);
        if !is_swallowed && to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}

async fn first_event(source: &Source<PodObject>) -> Events<PodObject> {
    let OpenWatch { mut events, .. } = source.watch(WatchStart::After("10"), 240).await.unwrap();
    let first = timeout(PATIENCE, events.next()).await.unwrap();
    assert!(matches!(first, Some(Ok(WatchEvent::Added(_)))), "{first:?}");
    events
}

#[tokio::test]
async fn a_watch_whose_data_a_proxy_swallows_fails_soon_and_the_next_one_takes_a_new_connection() {
    let (server, outside) =
        (TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let url = format!("https://{}", outside.local_addr().unwrap());
    let swallowed = Arc::new(AtomicU64::new(0));
    tokio::spawn(proxy(outside, server.local_addr().unwrap(), Arc::clone(&swallowed)));
    tokio::spawn(serve_watches(server));

    let liveness =
        Liveness { ping_after: Duration::from_millis(100), ping_timeout: Duration::from_secs(2), ..LIVENESS };
    let mut config = Config::new(url.parse().unwrap());
    config.accept_invalid_certs = true;
    let source = Source::<PodObject>::new(build(config, liveness).unwrap(), Selection::default());
    let mut events = first_event(&source).await;
    swallowed.store(1, Ordering::SeqCst);
    let end = timeout(PATIENCE, events.next()).await.expect("the watch still waits");
    assert!(matches!(end, Some(Err(_))), "{end:?}");
    let _next = first_event(&source).await;
}
