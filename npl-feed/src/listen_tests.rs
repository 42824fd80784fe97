// SPDX-License-Identifier: Apache-2.0

use axum::{middleware, routing};
use envoy_types::pb::envoy::{
    config::{cluster::v3::Cluster, endpoint::v3::ClusterLoadAssignment},
    service::discovery::v3::{
        DeltaDiscoveryRequest, DiscoveryRequest, aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
    },
};
use futures::StreamExt as _;
use npl_agent::{
    kube::watch_health::WatchObserver as _,
    metrics::{FailureKind, WatchedResource},
};
use prost::{Message as _, Name as _};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, transport::Channel};

use super::*;
use crate::{
    access::Token,
    core::tests::{annotation, pod, snapshot},
    follow::Publisher,
    http, stall, xds,
};

const PATIENCE: Duration = Duration::from_mins(1);
const NAME: &str = "web.default:http";

/// The maximum number of names to which all xDS streams of a test may subscribe.
const MOST_NAMES: usize = 1000;

fn listener(interface: Interface, allowed: Arc<[IpNet]>, status: &Arc<Status>) -> Listener {
    let (status, memory, limits) = (Arc::clone(status), ClientMemory::default(), ConnectionLimits::LARGEST);
    let shared = Shared { allowed, tls: None, status, memory, limits };
    Listener::bind("127.0.0.1:0".parse().unwrap(), interface, shared).unwrap()
}

fn listening(router: Router, allowed: &[&str]) -> (SocketAddr, Arc<Status>, JoinHandle<()>) {
    listening_at(Interface::Http, router, allowed)
}

fn listening_at(interface: Interface, router: Router, allowed: &[&str]) -> (SocketAddr, Arc<Status>, JoinHandle<()>) {
    let status = Arc::new(Status::default());
    let allowed: Vec<IpNet> = allowed.iter().map(|range| range.parse().unwrap()).collect();
    let listener = listener(interface, allowed.into(), &status);
    (listener.address().unwrap(), status, tokio::spawn(listener.serve(router, None)))
}

/// Requests `/`, and returns the answer; if the server closes the connection without an answer, returns an empty text.
async fn get_root(address: SocketAddr) -> String {
    get(address, "/").await
}

async fn get(address: SocketAddr, path: &str) -> String {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        io::Result::Ok(answer)
    };
    timeout(PATIENCE, exchange).await.unwrap().unwrap_or_default()
}

/// The test simulates the kernel's option `ipv6.disable=1`, with which the system call `socket` fails with
/// EAFNOSUPPORT.
#[tokio::test]
async fn without_ipv6_all_addresses_are_those_of_ipv4() {
    let without_ipv6 = async |address: SocketAddr| match address {
        SocketAddr::V6(_) => Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT)),
        SocketAddr::V4(_) => Ok(address),
    };
    let logged = Once::new();
    let bind = async |text: &str| bind_with(text.parse().unwrap(), &logged, without_ipv6).await;
    assert_eq!(bind("127.0.0.1:1").await.unwrap().to_string(), "127.0.0.1:1");
    assert!(!logged.is_completed());
    assert_eq!(bind("[::]:18000").await.unwrap().to_string(), "0.0.0.0:18000");
    assert!(logged.is_completed());
    let chosen = bind("[2001:db8::1]:18000").await.unwrap_err();
    assert_eq!(chosen.raw_os_error(), Some(libc::EAFNOSUPPORT), "an address that a user chose is not replaced");
}

#[tokio::test]
async fn an_address_in_use_is_not_replaced_by_another() {
    let in_use = async |_: SocketAddr| io::Result::<()>::Err(io::Error::from_raw_os_error(libc::EADDRINUSE));
    let error = bind_with("[::]:18000".parse().unwrap(), &Once::new(), in_use).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
}

#[tokio::test]
async fn only_allowed_clients_are_answered() {
    let router = || Router::new().route("/", routing::get(|| async { "here" }));
    for (allowed, is_answered) in [(&[][..], true), (&["127.0.0.0/8"], true), (&["192.0.2.0/24", "::1/128"], false)] {
        let (address, status, task) = listening(router(), allowed);
        assert_eq!(get_root(address).await.ends_with("here"), is_answered, "{allowed:?}");
        let refused = status
            .encode()
            .unwrap()
            .contains("npl_feed_refused_connections_total{interface=\"http\",reason=\"allow\"} 1\n");
        assert_eq!(refused, !is_answered);
        task.abort();
    }
}

/// Clients outside the allow list can query the probes, because the allow list need not contain the address from which
/// the kubelet probes the feed.
#[tokio::test]
async fn other_clients_get_the_probes_and_no_details() {
    let (publisher, published) = watch::channel(None);
    let status = Arc::new(Status::default());
    status.record_failure(WatchedResource::Pods, FailureKind::Unreachable, "");
    let allowed = ["192.0.2.0/24".parse().unwrap()].into();
    let listener = listener(Interface::Http, allowed, &status);
    let address = listener.address().unwrap();
    let router = http::router(published.clone(), Arc::clone(&status), http::Interfaces::default(), None);
    let task = tokio::spawn(listener.serve(router, Some(http::probes(published, Arc::clone(&status)))));
    let code = async |path| {
        let answer = get(address, path).await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(body.is_empty(), "{body}");
        head.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!((code("/healthz").await.as_str(), code("/readyz").await.as_str()), ("200", "503"));
    publish(&publisher, 1);
    assert_eq!(code("/readyz").await, "200");
    assert!(!status.encode().unwrap().contains("npl_feed_refused_connections_total{"));
    for path in ["/v1/members", "/metrics", "/openapi.json", "/"] {
        assert_eq!(code(path).await, "403", "{path}");
    }
    let counted = "npl_feed_refused_connections_total{interface=\"http\",reason=\"allow\"} 4\n";
    assert!(status.encode().unwrap().contains(counted));
    let mut open = Vec::new();
    for _ in 0..2 * ConnectionLimits::LARGEST.probes {
        open.push(TcpStream::connect(address).await.unwrap());
    }
    assert_eq!(code("/healthz").await, "200", "idle connections of other clients must not prevent a probe");
    let closed = timeout(PATIENCE, open[0].read(&mut [0; 1])).await.expect("the oldest connection is still open");
    assert!(!matches!(closed, Ok(1..)));
    drop(open);
    task.abort();
}

/// Connections without a stream do not prevent a client of xDS from connecting, and no new connection ends a stream.
#[tokio::test]
async fn a_new_connection_to_xds_closes_the_oldest_one_without_a_stream() {
    let open_stream = async |Extension(client): Extension<Connection>| {
        let _stream = client.stream();
        std::future::pending::<()>().await;
    };
    let router =
        Router::new().route("/", routing::get(|| async { "here" })).route("/stream", routing::get(open_stream));
    let (address, status, task) = listening_at(Interface::Xds, router, &[]);
    let connect = async || TcpStream::connect(address).await.unwrap();
    let mut idle = connect().await;
    let mut open = Vec::new();
    for _ in 1..ConnectionLimits::LARGEST.xds {
        let mut stream = connect().await;
        stream.write_all(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        open.push(stream);
    }
    // The last connection takes the place of the idle connection.
    let mut last = connect().await;
    let closed = timeout(PATIENCE, idle.read(&mut [0; 1])).await.expect("the idle connection is still open");
    assert!(!matches!(closed, Ok(1..)));
    last.write_all(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let refused = async {
        while get_root(address).await.ends_with("here") {
            // The server had not yet read the last request, so the server closed the connection of this request to make
            // room for the new connection. The test sends the request again.
            last = connect().await;
            last.write_all(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        }
    };
    timeout(PATIENCE, refused).await.expect("a connection is accepted although all have streams");
    let counted = "npl_feed_refused_connections_total{interface=\"xds\",reason=\"connections\"}";
    assert!(status.encode().unwrap().contains(counted));
    drop(open.pop());
    let used_again = async {
        while !get_root(address).await.ends_with("here") {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, used_again).await.unwrap();
    drop((open, last));
    task.abort();
}

/// A closed connection keeps its file descriptor until its task has ended. If the feed did not wait for this end, many
/// new connections at once could need more file descriptors than the limits allow.
#[tokio::test]
async fn a_closed_connection_has_ended_before_another_takes_its_room() {
    let mut open = NewestConnections::new(1);
    let descriptor = Arc::new(());
    for expected in [Room::Free, Room::Made, Room::Made] {
        assert_eq!(open.make_room(|()| true).await, expected);
        assert_eq!(Arc::strong_count(&descriptor), 1, "a connection still has its descriptor");
        let held = Arc::clone(&descriptor);
        open.spawn((), async move {
            std::future::pending::<()>().await;
            drop(held);
        });
    }
}

/// The kubelet probes the HTTP interface. If long polls could occupy all connections, the kubelet would restart the
/// feed.
#[tokio::test]
async fn a_new_connection_to_http_closes_the_oldest_one() {
    let (address, status, task) = listening(Router::new().route("/", routing::get(|| async { "here" })), &[]);
    let mut open = Vec::new();
    for _ in 0..ConnectionLimits::LARGEST.http {
        open.push(TcpStream::connect(address).await.unwrap());
    }
    assert!(get_root(address).await.ends_with("here"));
    let closed = timeout(PATIENCE, open[0].read(&mut [0; 1])).await.expect("the oldest connection is still open");
    assert!(!matches!(closed, Ok(1..)));
    assert!(
        status
            .encode()
            .unwrap()
            .contains("npl_feed_refused_connections_total{interface=\"http\",reason=\"connections\"} 1\n")
    );
    let newest = open.last_mut().unwrap();
    newest.write_all(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    timeout(PATIENCE, newest.read_to_string(&mut answer)).await.unwrap().unwrap();
    assert!(answer.ends_with("here"), "newer connections stay open");
    task.abort();
}

/// If a client reads no answers, the server stops reading requests from this client, so the memory for the connection
/// is bounded.
#[tokio::test]
async fn a_flood_of_requests_without_reading_is_stopped_and_other_clients_are_answered() {
    let body = || async { "x".repeat(100 * 1024) };
    let (address, _status, task) = listening(Router::new().route("/", routing::get(body)), &[]);
    let flooding = TcpStream::connect(address).await.unwrap();
    let requests = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".repeat(1000);
    let mut sent = 0;
    let mut refusals = 0;
    while refusals < 1000 {
        match flooding.try_write(&requests) {
            Ok(count) => (sent, refusals) = (sent + count, 0),
            Err(_full) => refusals += 1,
        }
        assert!(sent < 64 << 20, "the server has read {sent} bytes of requests whose answers are not read");
        tokio::task::yield_now().await;
    }
    assert!(get_root(address).await.ends_with('x'));
    task.abort();
}

/// A client that stops reading must not keep its answer in memory, because many such clients could each keep an answer
/// of a different version in memory. A slow client that still reads keeps its connection.
#[tokio::test(start_paused = true)]
async fn a_connection_ends_when_the_client_stops_reading() {
    const BODY: usize = 10_000;
    let router = Router::new().route("/", routing::get(|| async { "x".repeat(BODY) }));
    let (mut client, server) = tokio::io::duplex(64);
    let mut task = tokio::spawn(requests(
        StallLimit::new(server),
        router,
        ClientMemory::default().connect(Interface::Http, Arc::default()),
    ));
    client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let mut buffer = [0; 64];
    for _ in 0..10 {
        sleep(stall::LIMIT / 2).await;
        client.read_exact(&mut buffer).await.unwrap();
    }
    assert!(!task.is_finished());
    let stopped = tokio::time::Instant::now();
    timeout(PATIENCE, &mut task).await.expect("the connection is still open").unwrap();
    let waited = stopped.elapsed();
    assert!(waited >= stall::LIMIT && waited < stall::LIMIT + Duration::from_secs(1), "{waited:?}");
}

/// An HTTP/2 frame.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A client with closed flow-control windows reads no answer, but reads the TCP connection, so the connection does not
/// stall. The number of answers that the feed keeps for the connection is bounded.
#[tokio::test]
async fn a_connection_with_closed_windows_keeps_a_bounded_number_of_answers() {
    const REQUESTS: u32 = 4 * MOST_STREAMS;
    const REFUSED_STREAM: [u8; 4] = [0, 0, 0, 7];
    let answers = Arc::new(());
    let kept = Arc::clone(&answers);
    let answer = || async move {
        let parts = futures::stream::repeat_with(move || {
            assert!(Arc::strong_count(&kept) > 1, "each answer keeps a reference while its body exists");
            io::Result::Ok(vec![b'x'; SEND_BUFFER])
        });
        axum::body::Body::from_stream(parts)
    };
    let (address, _status, task) = listening(Router::new().route("/", routing::get(answer)), &[]);
    let mut client = TcpStream::connect(address).await.unwrap();
    // The setting 4 is the initial window of each stream.
    let settings = frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]);
    // `GET http://a/`: three elements of HPACK's static table, and the name `a`.
    let header = [0x82, 0x86, 0x84, 0x41, 1, b'a'];
    let requests = (0..REQUESTS).flat_map(|number| frame(1, 5, 2 * number + 1, &header));
    let bytes: Vec<u8> = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".iter().copied().chain(settings).chain(requests).collect();
    client.write_all(&bytes).await.unwrap();
    let (mut answered, mut refused) = (0, 0);
    while answered + refused < REQUESTS {
        let mut head = [0; 9];
        timeout(PATIENCE, client.read_exact(&mut head)).await.expect("some requests got no answer").unwrap();
        let mut payload = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
        timeout(PATIENCE, client.read_exact(&mut payload)).await.unwrap().unwrap();
        match head[3] {
            1 => answered += 1,
            3 if payload == REFUSED_STREAM => refused += 1,
            _ => {}
        }
    }
    assert_eq!((answered, refused), (MOST_STREAMS, REQUESTS - MOST_STREAMS));
    // One reference belongs to this test, and one to the route.
    let of_answers = Arc::strong_count(&answers).saturating_sub(2);
    assert!(of_answers <= usize::try_from(MOST_STREAMS).unwrap() + 1, "{of_answers} answers are kept");
    task.abort();
}

/// Starts an xDS server whose snapshot has two members of `web`, and connects a client to it.
async fn xds(token: Option<Token>) -> (AggregatedDiscoveryServiceClient<Channel>, Publisher, JoinHandle<()>) {
    xds_with(token, Arc::default()).await
}

async fn xds_with(
    token: Option<Token>,
    status: Arc<Status>,
) -> (AggregatedDiscoveryServiceClient<Channel>, Publisher, JoinHandle<()>) {
    let (publisher, published) = watch::channel(None);
    let mut router = xds::router(published, status, MOST_NAMES);
    if let Some(token) = token {
        router = router.layer(middleware::from_fn_with_state(token, Token::check));
    }
    let (address, _status, task) = listening(router, &[]);
    let channel = Channel::from_shared(format!("http://{address}")).unwrap();
    // The HTTP/2 window is small, because the client would buffer dozens of responses with the default size.
    let channel = channel.initial_stream_window_size(64 * 1024).connect().await.unwrap();
    (AggregatedDiscoveryServiceClient::new(channel), publisher, task)
}

fn publish(publisher: &Publisher, pods: u16) {
    let pods = (0..pods).map(|it| pod(&format!("p{it}"), "n1", &annotation(8080, "192.0.2.1", 61000 + it)));
    publisher.send_replace(Some(Arc::new(snapshot(pods.collect()))));
}

fn members(bytes: &[u8]) -> usize {
    let assignment = ClusterLoadAssignment::decode(bytes).unwrap();
    assignment.endpoints.iter().map(|locality| locality.lb_endpoints.len()).sum()
}

#[tokio::test]
async fn a_stream_waits_for_the_first_snapshot_and_pushes_each_change() {
    let (mut client, publisher, task) = xds(None).await;
    let (requests, receiver) = mpsc::channel(4);
    let names = vec![NAME.to_owned()];
    let request =
        DiscoveryRequest { type_url: ClusterLoadAssignment::type_url(), resource_names: names, ..Default::default() };
    requests.send(request).await.unwrap();
    let stream = client.stream_aggregated_resources(ReceiverStream::new(receiver)).await.unwrap();
    let mut responses = stream.into_inner();
    publish(&publisher, 1);
    for count in 1..4 {
        let response = timeout(PATIENCE, responses.message()).await.unwrap().unwrap().unwrap();
        assert_eq!(members(&response.resources[0].value), usize::from(count));
        publish(&publisher, count + 1);
    }
    task.abort();
}

/// While a client reads nothing, the server keeps a bounded number of responses. When the client reads again, the
/// client gets the latest state.
#[tokio::test]
async fn a_client_that_does_not_read_skips_versions() {
    const MEMBERS: u16 = 900;
    const CHANGES: u16 = 60;
    let (mut client, publisher, task) = xds(None).await;
    publish(&publisher, MEMBERS);
    let names = vec![NAME.to_owned()];
    let request =
        DiscoveryRequest { type_url: ClusterLoadAssignment::type_url(), resource_names: names, ..Default::default() };
    let requests = futures::stream::iter([request]).chain(futures::stream::pending());
    let mut responses = client.stream_aggregated_resources(requests).await.unwrap().into_inner();
    for change in 1..=CHANGES {
        publish(&publisher, MEMBERS + change);
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
    let mut received = 0;
    loop {
        let response = timeout(PATIENCE, responses.message()).await.unwrap().unwrap().unwrap();
        received += 1;
        if members(&response.resources[0].value) == usize::from(MEMBERS + CHANGES) {
            break;
        }
    }
    assert!(received <= CHANGES / 4, "{received} responses were kept for the client");
    task.abort();
}

#[tokio::test]
async fn a_stream_that_ends_before_the_first_snapshot_is_closed() {
    let status = Arc::<Status>::default();
    let (mut client, publisher, task) = xds_with(None, Arc::clone(&status)).await;
    let (requests, receiver) = mpsc::channel::<DiscoveryRequest>(1);
    let stream = client.stream_aggregated_resources(ReceiverStream::new(receiver)).await.unwrap();
    let open = async |count: u8| {
        let line = format!("npl_feed_xds_streams {count}\n");
        while !status.encode().unwrap().contains(&line) {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, open(1)).await.unwrap();
    drop((requests, stream));
    timeout(PATIENCE, open(0)).await.unwrap();
    drop(publisher);
    task.abort();
}

#[tokio::test]
async fn a_delta_stream_has_the_clusters_and_requires_the_token() {
    let (mut client, publisher, task) = xds(Some(Token::fixed("secret"))).await;
    publish(&publisher, 1);
    let wildcard = || {
        let request = DeltaDiscoveryRequest { type_url: Cluster::type_url(), ..Default::default() };
        // `pending` keeps the client's stream of requests open.
        futures::stream::iter([request]).chain(futures::stream::pending())
    };
    let refused = client.delta_aggregated_resources(wildcard()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    let mut request = Request::new(wildcard());
    request.metadata_mut().insert("authorization", "Bearer secret".parse().unwrap());
    let mut responses = client.delta_aggregated_resources(request).await.unwrap().into_inner();
    let response = timeout(PATIENCE, responses.message()).await.unwrap().unwrap().unwrap();
    assert_eq!(response.resources.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), [NAME]);
    task.abort();
}
