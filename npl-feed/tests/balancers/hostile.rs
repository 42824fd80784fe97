// SPDX-License-Identifier: Apache-2.0
//! Hostile clients of the program `npl-feed` keep HTTP/2 flow-control windows closed, do not complete requests, and
//! subscribe to as many names as they can. The feed's memory stays bounded, and the feed answers other clients.

use std::{io::Write as _, net::TcpStream, time::Duration};

use envoy_types::pb::envoy::{
    config::endpoint::v3::ClusterLoadAssignment,
    service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest},
};
use futures::StreamExt as _;
use prost::Name as _;
use tokio::{runtime::Runtime, time::timeout};
use tonic::Code;

use crate::{
    api_server::{self, FEED},
    memory::{LIMIT, LargeCluster, SERVICES, XDS},
    network,
    slow::{self, expect_client_is_served, read_count, wait_for_count},
};

/// The number of streams that the feed accepts on one HTTP connection.
const STREAMS: u32 = 16;
/// The number of HTTP connections on which answers are not read, almost as many as the feed accepts.
const UNREAD: usize = 1000;
/// The number of xDS connections on which requests are not completed, and the bytes of each incomplete request.
const INCOMPLETE: usize = 800;
const REQUEST_BYTES: usize = 60_000;
/// The soft limit of open files of the test process, which exceeds the number of sockets of all these clients.
const OPEN_FILES: u64 = 4096;
/// The number of connections on which a client sends one large complete request and keeps the stream open, and the size
/// of the request in bytes.
const COMPLETE: usize = 40;
const LARGE: usize = 4 * 1024 * 1024 - 100;
/// The number of names of each stream, and the default of `--xds-max-names`.
const NAMES: usize = 20_000;
const MOST_NAMES: usize = 100_000;
/// The maximum size in bytes of a response that the test's client accepts; the responses to these streams are smaller.
const LARGEST_RESPONSE: usize = 64 * 1024 * 1024;
/// The length in bytes of the longest name: a Service and a namespace of 63 bytes each, a port of 15 bytes, and two
/// separators.
const LONGEST_NAME: usize = 143;
/// The upper limits of the memory in KiB: for unread answers and incomplete requests; for HTTP connections and streams;
/// for xDS connections and streams; and for xDS subscriptions. The memory limit of the feed's container also covers a
/// flood of DNS queries.
const HELD_LIMIT: u64 = 24 * 1024;
const HTTP_LIMIT: u64 = 88 * 1024;
const XDS_LIMIT: u64 = 32 * 1024;
const NAMES_LIMIT: u64 = 64 * 1024;

const REFUSED: &str = r#"npl_feed_refused_connections_total{interface="xds",reason="memory"}"#;
const STATE_OF_THE_WORLD: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";

/// An HTTP/2 frame.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Returns an HTTP/2 preface with an initial window of 0 bytes (setting 4), so that the feed may not send the body of
/// an answer.
fn preface() -> Vec<u8> {
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(4, 0, 0, &[0, 4, 0, 0, 0, 0])].concat()
}

/// Returns a header block: the method as an element of HPACK's static table (2 is GET, 3 is POST), the scheme `http`,
/// the authority `a` and the path as a literal.
fn header(method: u8, path: &str) -> Vec<u8> {
    let path = [&[0x04, u8::try_from(path.len()).unwrap()][..], path.as_bytes()].concat();
    [&[0x80 | method, 0x86, 0x41, 1, b'a'][..], &path].concat()
}

fn connect(address: &str, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    // An error is ignored, because the feed may have closed the connection.
    drop(stream.write_all(bytes));
    stream
}

/// The paths of all bodies that the feed renders.
fn paths() -> Vec<String> {
    let whole = ["/v1/members", "/traefik", "/v1/http_sd", "/metrics", "/openapi.json"].map(str::to_owned);
    let of_service = (0..SERVICES).flat_map(|number| {
        let name = format!("web-{number:03}");
        [
            format!("/v1/members/production/{name}"),
            format!("/v1/members/production/{name}/http"),
            format!("/v1/health/service/{name}.production"),
            format!("/v1/health/service/http.{name}.production?passing"),
        ]
    });
    whole.into_iter().chain(of_service).collect()
}

/// Requests all bodies on many connections whose windows are closed.
fn leave_answers_unread() -> Vec<TcpStream> {
    let paths = paths();
    let mut next = paths.iter().cycle();
    let mut connection = || {
        let requests = (0..STREAMS).zip(&mut next);
        let requests = requests.flat_map(|(number, path)| frame(1, 5, 2 * number + 1, &header(2, path)));
        connect(FEED, &[preface(), requests.collect()].concat())
    };
    (0..UNREAD).map(|_| connection()).collect()
}

/// Sends the first bytes of large xDS requests.
fn leave_requests_incomplete() -> Vec<TcpStream> {
    let length = u32::try_from(4 * 1024 * 1024).unwrap_or(u32::MAX).to_be_bytes();
    let message = [&[0][..], &length, &vec![0; REQUEST_BYTES]].concat();
    let data: Vec<u8> = message.chunks(16_384).flat_map(|part| frame(0, 0, 1, part)).collect();
    let bytes = [preface(), frame(1, 4, 1, &header(3, STATE_OF_THE_WORLD)), data].concat();
    (0..INCOMPLETE).map(|_| connect(XDS, &bytes)).collect()
}

/// Connects again until `attempt` returns a value. xDS clients connect again in practice too: while other clients
/// occupy more memory, the feed may close the connection of a large request.
async fn reconnect<T>(attempt: impl AsyncFn() -> Option<T>) -> T {
    let attempts = async {
        let mut closed = 0;
        loop {
            if let Some(value) = attempt().await {
                return (value, closed);
            }
            closed += 1;
        }
    };
    let (value, closed) =
        timeout(api_server::LIMIT, attempts).await.expect("the feed closes each connection of the client");
    if closed > 0 {
        println!("the feed closed {closed} connections of one client");
    }
    value
}

/// Opens a stream and sends a complete request of almost the maximum size, to which the feed sends no response.
/// `is_counted` returns whether the feed has read the request. Returns `None` if the feed has closed the connection.
async fn send_large_request(is_counted: impl Fn() -> bool) -> Option<Box<dyn Send>> {
    let mut client = slow::connect().await;
    let request = DiscoveryRequest { type_url: "x".repeat(LARGE), ..DiscoveryRequest::default() };
    let requests = futures::stream::iter([request]).chain(futures::stream::pending());
    let mut responses = client.stream_aggregated_resources(requests).await.ok()?.into_inner();
    while !is_counted() {
        if let Ok(end) = timeout(Duration::from_millis(20), responses.message()).await {
            end.expect_err("the feed answered a request of an unknown type");
            return None;
        }
    }
    Some(Box::new((client, responses)))
}

/// Subscribes to many names on one stream, and waits for the response. Returns `None` if the feed has closed the
/// connection.
async fn subscribe(number: usize) -> Option<impl Send> {
    let mut client = slow::connect().await.max_decoding_message_size(LARGEST_RESPONSE);
    let name = |index| format!("{:x<LONGEST_NAME$}", format!("service-{number:02}-{index:05}.production:http-"));
    let request = DeltaDiscoveryRequest {
        type_url: ClusterLoadAssignment::type_url(),
        resource_names_subscribe: (0..NAMES).map(name).collect(),
        ..DeltaDiscoveryRequest::default()
    };
    let requests = futures::stream::iter([request]).chain(futures::stream::pending());
    let mut responses = client.delta_aggregated_resources(requests).await.ok()?.into_inner();
    match responses.message().await {
        Ok(response) => {
            response.expect("the feed ended a stream within the limit of names");
            Some((client, responses))
        }
        Err(status) => {
            assert_ne!(status.code(), Code::ResourceExhausted, "the names are within the limit");
            None
        }
    }
}

#[test]
fn hostile_clients_take_bounded_memory_and_others_are_served() {
    network::inside("hostile::hostile_clients_take_bounded_memory_and_others_are_served", || {
        npl_testkit::process::allow_open_files(OPEN_FILES).unwrap();
        let cluster = LargeCluster::start();
        cluster.wait_for_memory(LIMIT);
        let runtime = Runtime::new().unwrap();
        let before = cluster.memory();
        let unread = leave_answers_unread();
        wait_for_count(r#"npl_feed_http_answers_total{answer="2xx"}"#, UNREAD * STREAMS as usize);
        println!("{UNREAD} connections with unread answers: {} KiB, {before} KiB before", cluster.memory());
        assert!(cluster.memory() <= before + HELD_LIMIT + HTTP_LIMIT);
        let incomplete = leave_requests_incomplete();
        wait_for_count(REFUSED, 1);
        println!("{INCOMPLETE} connections with incomplete requests: {} KiB", cluster.memory());
        let (subscribers, mut streams) = (Runtime::new().unwrap(), Vec::new());
        let unknown = r#"npl_feed_xds_messages_total{type="unknown",event="unknown_type"}"#;
        let read = || api_server::until("metrics", || read_count(unknown));
        let send_large = |_| {
            let attempt = async || {
                let before = read();
                send_large_request(|| read() > before).await
            };
            subscribers.block_on(reconnect(attempt))
        };
        let large: Vec<_> = (0..COMPLETE).map(send_large).collect();
        println!("{COMPLETE} streams after a large request: {} KiB", cluster.memory());
        for number in 0..MOST_NAMES / NAMES {
            streams.push(subscribers.block_on(reconnect(async || subscribe(number).await)));
        }
        assert_eq!(read_count("npl_feed_xds_names"), Some(MOST_NAMES));
        println!("{MOST_NAMES} names: {} KiB", cluster.memory());
        runtime.block_on(expect_client_is_served());
        assert_eq!(api_server::get("/v1/members/production/web-001/http").unwrap().0, 200);
        let peak = cluster.peak_memory();
        println!("largest memory: {peak} KiB");
        assert!(peak <= LIMIT + HELD_LIMIT + HTTP_LIMIT + XDS_LIMIT + NAMES_LIMIT, "{peak} KiB");
        drop((unread, incomplete, large, streams));
    });
}
