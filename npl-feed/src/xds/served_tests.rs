// SPDX-License-Identifier: Apache-2.0
//! Tests the xDS service over connections: random bytes cause no panic in any task of the server, and rejected
//! responses are counted.

use std::{net::SocketAddr, time::Duration};

use axum::http;
use envoy_types::pb::{
    envoy::{
        config::{cluster::v3::Cluster, endpoint::v3::ClusterLoadAssignment},
        service::discovery::v3::{
            DeltaDiscoveryRequest, DiscoveryRequest, DiscoveryResponse,
            aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
        },
    },
    google::rpc::Status as RpcStatus,
};
use http_body_util::BodyExt as _;
use proptest::{prelude::*, sample::Index};
use prost::{Message as _, Name as _};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::watch,
    task::JoinHandle,
    time::timeout,
};
use tonic::{Code, transport::Channel};
use tower::ServiceExt as _;

use super::{
    tests::{pods, text, url},
    *,
};
use crate::{
    client_memory::ClientMemory,
    connection_limits::ConnectionLimits,
    core::tests::snapshot,
    follow::Publisher,
    listen::{Listener, Shared},
    panics,
    status::Interface,
};

const PATIENCE: Duration = Duration::from_mins(1);
/// The maximum number of names to which all streams of a test may subscribe.
const MOST_NAMES: usize = 1000;
const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

/// A running xDS server, whose snapshot has the Service `web`.
struct Server {
    address: SocketAddr,
    status: Arc<Status>,
    task: JoinHandle<()>,
    _publisher: Publisher,
}

impl Server {
    fn start() -> Self {
        Self::with_names(MOST_NAMES)
    }

    /// Starts a server whose streams may subscribe to this number of names.
    fn with_names(most_names: usize) -> Self {
        let status = Arc::<Status>::default();
        let address = "127.0.0.1:0".parse().unwrap();
        let (memory, limits) = (ClientMemory::default(), ConnectionLimits::LARGEST);
        let shared = Shared { allowed: Arc::default(), tls: None, status: Arc::clone(&status), memory, limits };
        let listener = Listener::bind(address, Interface::Xds, shared).unwrap();
        let address = listener.address().unwrap();
        let (publisher, published) = watch::channel(Some(Arc::new(snapshot(pods()))));
        let task = tokio::spawn(listener.serve(router(published, Arc::clone(&status), most_names), None));
        Self { address, status, task, _publisher: publisher }
    }

    async fn connect(&self) -> Channel {
        Channel::from_shared(format!("http://{}", self.address)).unwrap().connect().await.unwrap()
    }

    /// Sends any bytes as the body of a gRPC request, and reads the answer until the server ends the stream. Returns
    /// the trailers of the answer, or `None` if the server has reset the stream.
    async fn call(&self, method: &str, body: Vec<u8>) -> Option<HeaderMap> {
        let request = http::Request::post(method).header("content-type", "application/grpc").header("te", "trailers");
        let request = request.body(tonic::body::Body::new(Body::from(body))).unwrap();
        let answer = async {
            let response = self.connect().await.oneshot(request).await.unwrap();
            let collected = response.into_body().collect().await.ok()?;
            Some(collected.trailers().cloned().unwrap_or_default())
        };
        timeout(PATIENCE, answer).await.expect("the server does not end its answer")
    }

    /// Sends bytes on a new connection, and reads until the server closes the connection.
    async fn send(&self, bytes: &[u8]) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        // Errors are ignored, because the server may have closed the connection already.
        drop(stream.write_all(bytes).await);
        drop(stream.shutdown().await);
        let mut answer = Vec::new();
        drop(timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("the server keeps the connection open"));
    }

    /// Checks that a client with valid requests gets the cluster.
    async fn expect_valid_client_is_served(&self) {
        let mut client = AggregatedDiscoveryServiceClient::new(self.connect().await);
        let request = DiscoveryRequest { type_url: Cluster::type_url(), ..DiscoveryRequest::default() };
        let requests = stream::iter([request]).chain(stream::pending());
        let mut responses = client.stream_aggregated_resources(requests).await.unwrap().into_inner();
        let response = timeout(PATIENCE, responses.message()).await.unwrap().unwrap().unwrap();
        assert_eq!(response.resources.len(), 1);
        assert!(!self.task.is_finished());
    }

    async fn expect_metric(&self, line: &str) {
        let counted = async {
            while !self.status.encode().unwrap().lines().any(|metric| metric == line) {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, counted).await.unwrap_or_else(|_| panic!("{line}: {}", self.status.encode().unwrap()));
    }
}

fn bytes(most: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..most)
}

/// Generates encoded xDS requests, state-of-the-world (`DiscoveryRequest`) and delta (`DeltaDiscoveryRequest`).
fn request() -> impl Strategy<Value = Vec<u8>> {
    let names = || prop::collection::vec(text(), 0..4);
    (any::<bool>(), url(), names(), names(), "[0-9]{0,3}", any::<bool>()).prop_map(
        |(is_delta, type_url, names, others, response_nonce, is_nack)| {
            let error_detail = is_nack.then(RpcStatus::default);
            if !is_delta {
                let resource_names = names;
                let request =
                    DiscoveryRequest { type_url, resource_names, response_nonce, error_detail, ..Default::default() };
                return request.encode_to_vec();
            }
            let request = DeltaDiscoveryRequest {
                type_url,
                resource_names_subscribe: names,
                resource_names_unsubscribe: others.clone(),
                initial_resource_versions: others.into_iter().map(|name| (name, "x".to_owned())).collect(),
                response_nonce,
                error_detail,
                ..Default::default()
            };
            request.encode_to_vec()
        },
    )
}

/// A gRPC message: random bytes, or a request in which some bytes are replaced. Some messages have a wrong compression
/// flag, or a wrong length.
fn frame() -> impl Strategy<Value = Vec<u8>> {
    let replaced = prop::collection::vec((any::<Index>(), any::<u8>()), 0..3);
    let changed = (request(), replaced).prop_map(|(mut message, replaced)| {
        for (place, byte) in replaced {
            if !message.is_empty() {
                let place = place.index(message.len());
                message[place] = byte;
            }
        }
        message
    });
    let message = prop_oneof![2 => request(), 4 => changed, 1 => bytes(80)];
    let flag = prop_oneof![12 => Just(0), 1 => any::<u8>()];
    let length = prop_oneof![8 => Just(None), 1 => any::<u32>().prop_map(Some), 1 => (0..100_u32).prop_map(Some)];
    (message, flag, length).prop_map(|(message, flag, length)| {
        let length = length.unwrap_or_else(|| u32::try_from(message.len()).unwrap());
        [&[flag][..], &length.to_be_bytes(), &message].concat()
    })
}

/// The bytes of a connection: random bytes, beginnings of TLS and of HTTP/1.1, or HTTP/2 with random frames.
fn connection() -> impl Strategy<Value = Vec<u8>> {
    let http2 = (0..12_u8, any::<u8>(), 0..6_u8, bytes(40)).prop_map(|(kind, flags, stream, payload)| {
        [&[0, 0, u8::try_from(payload.len()).unwrap(), kind, flags, 0, 0, 0, stream][..], &payload].concat()
    });
    let http2 = prop::collection::vec(http2, 0..6).prop_map(|frames| {
        let preface: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        [preface, &SETTINGS, &frames.concat()].concat()
    });
    let start = prop::sample::select(vec![&b"\x16\x03\x01\x02\x00"[..], b"PRI * HTTP/2.0\r\n", b"POST / HTTP/9\r\n"]);
    let others = (start, bytes(40)).prop_map(|(start, rest)| [start, &rest].concat());
    prop_oneof![1 => bytes(80), 1 => others, 2 => http2]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn random_messages_and_connections_do_not_disturb_the_server(
        calls in prop::collection::vec((prop::sample::select(vec![STATE_OF_THE_WORLD, DELTA]), prop::collection::vec(frame(), 0..6)), 1..8),
        connections in prop::collection::vec(connection(), 0..4),
    ) {
        panics::run_without(async {
            let server = Server::start();
            for (method, frames) in calls {
                server.call(method, frames.concat()).await;
            }
            for bytes in connections {
                server.send(&bytes).await;
            }
            server.expect_valid_client_is_served().await;
            server.task.abort();
        });
    }
}

/// A gRPC message with this compression flag and length.
fn grpc(flag: u8, length: usize, message: &[u8]) -> Vec<u8> {
    [&[flag][..], &u32::try_from(length).unwrap().to_be_bytes(), message].concat()
}

/// A malformed message ends its stream with an error status, so that the client logs the cause. With `grpc-status: 0`,
/// the client would open the stream again and again without a log line.
#[tokio::test]
async fn a_malformed_message_ends_the_stream_with_an_error() {
    let server = Server::start();
    let valid = DiscoveryRequest { type_url: Cluster::type_url(), ..DiscoveryRequest::default() }.encode_to_vec();
    let valid = grpc(0, valid.len(), &valid);
    let (mut malformed, internal) = (0, Code::Internal);
    for (method, request) in [(STATE_OF_THE_WORLD, "no DiscoveryRequest"), (DELTA, "no DeltaDiscoveryRequest")] {
        for (message, code, text) in [
            (grpc(0, 3, &[0xff; 3]), internal, request),
            (grpc(0, 2, &[0x0a, 0x7f]), internal, request),
            (grpc(1, 2, &[0, 0]), internal, "compress"),
            (grpc(7, 2, &[0, 0]), internal, "compression flag"),
            (grpc(0, 100, &[0; 4]), internal, "EOF"),
            (grpc(0, request::LARGEST + 1, &[0; 4]), Code::OutOfRange, "too large"),
        ] {
            for body in [message.clone(), [&valid[..], &message].concat()] {
                let trailers = server.call(method, body).await.expect("trailers");
                let status = tonic::Status::from_header_map(&trailers).expect("a status");
                assert_eq!(status.code(), code, "{method} {message:x?}: {status:?}");
                assert!(status.message().contains(text), "{method} {message:x?}: {status:?}");
                malformed += 1;
                let line = format!("npl_feed_xds_messages_total{{type=\"unknown\",event=\"malformed\"}} {malformed}");
                server.expect_metric(&line).await;
            }
        }
        for body in [Vec::new(), valid.clone()] {
            let trailers = server.call(method, body).await.expect("trailers");
            assert_eq!(trailers["grpc-status"], "0", "a client that ends its requests gets no error");
        }
    }
    server.task.abort();
}

#[tokio::test]
async fn an_interrupted_connection_is_no_malformed_message() {
    let status = Arc::<Status>::default();
    let (_publisher, published) = watch::channel(Some(Arc::new(snapshot(pods()))));
    let interrupted = stream::iter([Err::<Bytes, _>(std::io::Error::from(std::io::ErrorKind::ConnectionReset))]);
    let request = http::Request::post(DELTA).body(Body::from_stream(interrupted)).unwrap();
    let client = ClientMemory::default().connect(Interface::Xds, Arc::clone(&status));
    let router = router(published, Arc::clone(&status), MOST_NAMES).layer(Extension(client));
    let response = router.oneshot(request).await.unwrap();
    let trailers =
        timeout(PATIENCE, response.into_body().collect()).await.unwrap().unwrap().trailers().cloned().unwrap();
    assert_ne!(trailers["grpc-status"], "0");
    assert!(!status.encode().unwrap().contains("event=\"malformed\""), "{}", status.encode().unwrap());
}

/// Waits for the end of a stream, and returns its status.
async fn end_of<T>(mut responses: tonic::Streaming<T>) -> tonic::Status {
    let end = async {
        loop {
            if let Err(status) = responses.message().await {
                return status;
            }
        }
    };
    timeout(PATIENCE, end).await.expect("the stream has not ended")
}

#[tokio::test]
async fn above_the_limit_of_names_the_largest_stream_ends_and_others_continue() {
    let server = Server::start();
    let mut client = AggregatedDiscoveryServiceClient::new(server.connect().await);
    let subscribe = |count: usize| DiscoveryRequest {
        type_url: ClusterLoadAssignment::type_url(),
        resource_names: (0..count).map(|number| format!("absent-{number}.default:http")).collect(),
        ..DiscoveryRequest::default()
    };
    // Each stream of requests stays open while `end` exists.
    let (end, _) = tokio::sync::broadcast::channel::<()>(1);
    let open = |count| {
        let mut ended = end.subscribe();
        let open = stream::once(async move { ended.recv().await }).filter_map(async |_ended| None);
        stream::iter([subscribe(count)]).chain(open)
    };
    let resources = async |responses: &mut tonic::Streaming<DiscoveryResponse>| {
        timeout(PATIENCE, responses.message()).await.unwrap().unwrap().unwrap().resources.len()
    };
    let mut kept = client.stream_aggregated_resources(open(10)).await.unwrap().into_inner();
    assert_eq!(resources(&mut kept).await, 10);
    let mut large = client.stream_aggregated_resources(open(MOST_NAMES - 10)).await.unwrap().into_inner();
    assert_eq!(resources(&mut large).await, MOST_NAMES - 10);
    let mut other = client.stream_aggregated_resources(open(11)).await.unwrap().into_inner();
    assert_eq!(resources(&mut other).await, 11);
    let status = end_of(large).await;
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert!(status.message().contains("raise --xds-max-names"), "{status:?}");
    server.expect_metric("npl_feed_xds_names 21").await;
    server.expect_metric("npl_feed_refused_connections_total{interface=\"xds\",reason=\"names\"} 1").await;
    drop((kept, other, end));
    server.expect_metric("npl_feed_xds_names 0").await;
    server.task.abort();
}

#[tokio::test]
async fn a_request_with_too_many_names_ends_its_stream() {
    let server = Server::start();
    let request = DeltaDiscoveryRequest {
        type_url: Cluster::type_url(),
        resource_names_subscribe: vec![String::new(); 4 * session::MOST_NAMES],
        ..DeltaDiscoveryRequest::default()
    };
    let message = request.encode_to_vec();
    let trailers = server.call(DELTA, grpc(0, message.len(), &message)).await.expect("trailers");
    let status = tonic::Status::from_header_map(&trailers).expect("a status");
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    server.task.abort();
}

/// A delta client that connects again sends the names and versions of all its resources. With 15 000 resources, the
/// request has more than 1 MiB.
#[tokio::test]
async fn a_delta_client_with_many_resources_can_connect_again() {
    let server = Server::with_names(100_000);
    let name =
        |number: usize| format!("a-service-with-a-long-name-{number:05}.a-namespace-with-a-long-name:a-long-port");
    let known = (0..15_000).map(|number| (name(number), "0123456789abcdef".repeat(2))).collect();
    let request = DeltaDiscoveryRequest {
        type_url: Cluster::type_url(),
        initial_resource_versions: known,
        ..DeltaDiscoveryRequest::default()
    };
    assert!(request.encoded_len() > 1024 * 1024);
    let message = request.encode_to_vec();
    let trailers = server.call(DELTA, grpc(0, message.len(), &message)).await.expect("trailers");
    assert_eq!(trailers["grpc-status"], "0", "{trailers:?}");
    server.task.abort();
}

#[tokio::test]
async fn requests_up_to_the_maximum_size_are_read() {
    let server = Server::start();
    let mut client = AggregatedDiscoveryServiceClient::new(server.connect().await);
    for (number, size) in [100, 100_000, 1_000_000, request::LARGEST - 100].into_iter().enumerate() {
        let request = DiscoveryRequest { type_url: "x".repeat(size), ..DiscoveryRequest::default() };
        let requests = stream::iter([request]).chain(stream::pending());
        let _responses = timeout(PATIENCE, client.stream_aggregated_resources(requests)).await.unwrap().unwrap();
        let line = format!("npl_feed_xds_messages_total{{type=\"unknown\",event=\"unknown_type\"}} {}", number + 1);
        server.expect_metric(&line).await;
    }
    server.task.abort();
}

/// Names that no resource can have take no memory.
#[tokio::test]
async fn names_that_are_too_long_are_ignored() {
    let server = Server::start();
    let mut client = AggregatedDiscoveryServiceClient::new(server.connect().await);
    let request = DiscoveryRequest {
        type_url: ClusterLoadAssignment::type_url(),
        resource_names: vec!["x".repeat(100_000), "absent.default:http".to_owned()],
        ..DiscoveryRequest::default()
    };
    let requests = stream::iter([request]).chain(stream::pending());
    let mut responses = client.stream_aggregated_resources(requests).await.unwrap().into_inner();
    assert_eq!(timeout(PATIENCE, responses.message()).await.unwrap().unwrap().unwrap().resources.len(), 1);
    server.expect_metric("npl_feed_xds_names 1").await;
    server.task.abort();
}

#[tokio::test]
async fn a_nack_is_counted_in_both_variants() {
    let server = Server::start();
    let (type_url, error_detail) = (Cluster::type_url(), Some(RpcStatus { code: 3, ..RpcStatus::default() }));
    let mut client = AggregatedDiscoveryServiceClient::new(server.connect().await);
    let (sender, requests) = mpsc::channel(1);
    let first = DiscoveryRequest { type_url: type_url.clone(), ..DiscoveryRequest::default() };
    sender.send(first.clone()).await.unwrap();
    let mut responses = client.stream_aggregated_resources(ReceiverStream::new(requests)).await.unwrap().into_inner();
    let response_nonce = timeout(PATIENCE, responses.message()).await.unwrap().unwrap().unwrap().nonce;
    sender.send(DiscoveryRequest { response_nonce, error_detail: error_detail.clone(), ..first }).await.unwrap();
    server.expect_metric(r#"npl_feed_xds_messages_total{type="cds",event="nack"} 1"#).await;

    let (sender, requests) = mpsc::channel(1);
    let first = DeltaDiscoveryRequest { type_url, ..DeltaDiscoveryRequest::default() };
    sender.send(first.clone()).await.unwrap();
    let mut responses = client.delta_aggregated_resources(ReceiverStream::new(requests)).await.unwrap().into_inner();
    let response_nonce = timeout(PATIENCE, responses.message()).await.unwrap().unwrap().unwrap().nonce;
    sender.send(DeltaDiscoveryRequest { response_nonce, error_detail, ..first }).await.unwrap();
    server.expect_metric(r#"npl_feed_xds_messages_total{type="cds",event="nack"} 2"#).await;
    server.expect_metric(r#"npl_feed_xds_messages_total{type="cds",event="sent"} 2"#).await;
    assert!(!server.status.encode().unwrap().contains("event=\"ack\""), "a NACK is not an ACK");
    server.task.abort();
}
