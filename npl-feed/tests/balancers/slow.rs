// SPDX-License-Identifier: Apache-2.0
//! Clients of the program `npl-feed` request all members over xDS and HTTP, and do not read the answers. The feed's
//! memory stays bounded, and the feed answers other clients.

use std::{io::Write as _, net::TcpStream};

use envoy_types::pb::envoy::{
    config::{cluster::v3::Cluster, endpoint::v3::ClusterLoadAssignment},
    service::discovery::v3::{
        DeltaDiscoveryRequest, DiscoveryRequest, aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
    },
};
use futures::StreamExt as _;
use prost::Name as _;
use tokio::runtime::Runtime;
use tonic::{
    Streaming,
    transport::{Channel, Endpoint},
};

use crate::{
    api_server::{self, FEED},
    flood::connect_with_small_window,
    memory::{LargeCluster, SERVICES, XDS},
    network,
};

/// The number of xDS streams whose responses the clients do not read, and the number of streams of one connection.
const STREAMS: usize = 100;
const STREAMS_PER_CONNECTION: usize = 4;
/// The number of requests for all endpoints that each stream sends. The feed computes this many responses for a client
/// that does not read, and further responses only after the client has read.
const RESPONSES: usize = 3;
/// The counter of the successful answers over HTTP.
const ANSWERS: &str = r#"npl_feed_http_answers_total{answer="2xx"}"#;
/// The number of HTTP connections on which all members are requested and not read.
const CONNECTIONS: usize = 300;
/// The upper limit of the resident memory with all these clients, in KiB.
const LIMIT: u64 = 80 * 1024;

pub(crate) type Client = AggregatedDiscoveryServiceClient<Channel>;

/// The names of the endpoints of all Services.
fn names() -> Vec<String> {
    (0..SERVICES).map(|number| format!("web-{number:03}.production:http")).collect()
}

fn endpoint() -> Endpoint {
    Channel::from_shared(format!("http://{XDS}")).unwrap()
}

/// Connects a client with the default settings.
pub(crate) async fn connect() -> Client {
    Client::new(endpoint().connect().await.unwrap())
}

/// Connects a client with small HTTP/2 flow-control windows, so that the feed can send only few bytes before the client
/// reads.
async fn connect_with_small_windows() -> Client {
    let endpoint = endpoint().initial_stream_window_size(1024).initial_connection_window_size(64 * 1024);
    Client::new(endpoint.connect().await.unwrap())
}

/// Requests all endpoints several times. The feed closes the stream when the returned value is dropped.
async fn request_all(client: &mut Client, is_delta: bool) -> Box<dyn Send> {
    let type_url = ClusterLoadAssignment::type_url();
    if is_delta {
        let request =
            DeltaDiscoveryRequest { type_url, resource_names_subscribe: names(), ..DeltaDiscoveryRequest::default() };
        let requests = futures::stream::iter(vec![request; RESPONSES]).chain(futures::stream::pending());
        return Box::new(client.delta_aggregated_resources(requests).await.unwrap());
    }
    let request = DiscoveryRequest { type_url, resource_names: names(), ..DiscoveryRequest::default() };
    let requests = futures::stream::iter(vec![request; RESPONSES]).chain(futures::stream::pending());
    Box::new(client.stream_aggregated_resources(requests).await.unwrap())
}

/// Reads one of the feed's counters. The metrics contain a counter only after the counter's first event, so a missing
/// counter is read as 0. `None` if the feed does not answer.
pub(crate) fn read_count(counter: &str) -> Option<usize> {
    let (200, metrics) = api_server::get("/metrics")? else { return None };
    Some(metrics.lines().find_map(|line| line.strip_prefix(counter)?.trim().parse().ok()).unwrap_or(0))
}

/// Waits until one of the feed's counters is at least `count`.
pub(crate) fn wait_for_count(counter: &str, count: usize) {
    api_server::until(&format!("{count} of {counter}"), || read_count(counter).filter(|value| *value >= count));
}

/// Waits until the feed has answered `requests` requests since the counter of answers had the value `before`. Each read
/// of the counter is also an answered request. The feed counts a read only after it has encoded the counter, so the
/// value that a read returns does not include this read.
fn wait_for_answers(before: usize, requests: usize) {
    let mut reads = 0;
    api_server::until(&format!("{requests} answers"), || {
        let count = read_count(ANSWERS)?;
        reads += 1;
        (count >= before + requests + reads).then_some(count)
    });
}

/// Checks that a client that reads gets all clusters and endpoints.
pub(crate) async fn expect_client_is_served() {
    let mut client = connect().await;
    let clusters = DiscoveryRequest { type_url: Cluster::type_url(), ..DiscoveryRequest::default() };
    let endpoints = DiscoveryRequest {
        type_url: ClusterLoadAssignment::type_url(),
        resource_names: names(),
        ..DiscoveryRequest::default()
    };
    let requests = futures::stream::iter([clusters, endpoints]).chain(futures::stream::pending());
    let mut responses: Streaming<_> = client.stream_aggregated_resources(requests).await.unwrap().into_inner();
    for _ in 0..2 {
        assert_eq!(responses.message().await.unwrap().unwrap().resources.len(), SERVICES);
    }
}

#[test]
fn clients_that_do_not_read_take_bounded_memory_and_others_are_served() {
    network::inside("slow::clients_that_do_not_read_take_bounded_memory_and_others_are_served", || {
        let cluster = LargeCluster::start();
        println!("before: {} KiB", cluster.peak_memory());
        let runtime = Runtime::new().unwrap();
        let mut streams = Vec::new();
        for number in 0..STREAMS / STREAMS_PER_CONNECTION {
            let mut client = runtime.block_on(connect_with_small_windows());
            for _ in 0..STREAMS_PER_CONNECTION {
                streams.push(runtime.block_on(request_all(&mut client, number % 2 == 1)));
            }
        }
        wait_for_count(r#"npl_feed_xds_messages_total{type="eds",event="sent"}"#, STREAMS * RESPONSES);
        wait_for_count("npl_feed_xds_streams", STREAMS);
        println!("{STREAMS} xDS streams: {} KiB", cluster.peak_memory());
        let before = api_server::until("metrics", || read_count(ANSWERS));
        let connections: Vec<TcpStream> = (0..CONNECTIONS)
            .map(|_| {
                let mut stream = runtime.block_on(connect_with_small_window(FEED));
                stream.write_all(b"GET /v1/members HTTP/1.1\r\nHost: feed\r\n\r\n").unwrap();
                stream
            })
            .collect();
        wait_for_answers(before, CONNECTIONS);
        runtime.block_on(expect_client_is_served());
        assert_eq!(api_server::get("/v1/members/production/web-001/http").unwrap().0, 200);
        let peak = cluster.peak_memory();
        println!("{STREAMS} xDS streams and {CONNECTIONS} HTTP clients: {peak} KiB");
        assert!(peak <= LIMIT, "{peak} KiB");
        drop((streams, connections));
    });
}
