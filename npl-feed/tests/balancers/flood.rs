// SPDX-License-Identifier: Apache-2.0
//! A client floods the DNS interface of the program `npl-feed`, or opens idle connections to all interfaces. The feed's
//! memory stays bounded, and the feed answers other clients.

use std::{
    io::Write as _,
    net::{TcpStream, UdpSocket},
};

use tokio::{net::TcpSocket, runtime::Runtime};

use crate::{
    api_server::{self, FEED},
    dns,
    memory::{DNS, LIMIT, LargeCluster, XDS},
    network, slow,
};

/// The number of connections with incomplete queries that the client opens, more than the feed keeps open.
const CONNECTIONS: usize = 3000;
/// The number of connections on which the client sends queries and reads no answer, more than the feed keeps open.
const SILENT: usize = 400;
/// The number of queries that the client sends over UDP. The client does not read the answers.
const DATAGRAMS: usize = 100_000;
/// The upper limit of the memory that the feed needs for all queries, answers and connections of the flood, in KiB.
const FLOOD_LIMIT: u64 = 24 * 1024;

const WEB: &str = "_http._tcp.web-001.production.npl.internal.";

/// The hard limit of open files of a feed, and the number of idle connections that the test opens to each interface of
/// the feed. If the feed kept all connections to one interface, these connections would use up the feed's file
/// descriptors.
const FEW_FILES: usize = 400;

/// A query for the members of `WEB`.
fn query() -> Vec<u8> {
    let labels = WEB.split_terminator('.').flat_map(|label| {
        let length = u8::try_from(label.len()).unwrap();
        [&[length], label.as_bytes()].concat()
    });
    // The DNS header of a query with one question. After it: the labels of the name, the root label, the type SRV (33)
    // and the class IN (1).
    let header = [0, 7, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    header.into_iter().chain(labels).chain([0, 0, 33, 0, 1]).collect()
}

/// Opens a connection whose small receive window is full after few answers.
pub(crate) async fn connect_with_small_window(address: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let stream = socket.connect(address.parse().unwrap()).await.unwrap().into_std().unwrap();
    stream.set_nonblocking(false).unwrap();
    stream
}

#[test]
fn a_flood_of_dns_queries_takes_bounded_memory_and_other_clients_are_answered() {
    let test = "flood::a_flood_of_dns_queries_takes_bounded_memory_and_other_clients_are_answered";
    network::inside(test, || {
        let cluster = LargeCluster::start();
        cluster.wait_for_memory(LIMIT);
        let answered = |transport: &str| {
            let answer = dns::ask_at(DNS, "dig", &format!("{transport} SRV {WEB}"));
            assert_eq!(answer.answers.len(), 100, "{}", answer.text);
        };
        answered("+tcp");
        let connections: Vec<TcpStream> = (0..CONNECTIONS)
            .map(|_| {
                let mut stream = TcpStream::connect(DNS).unwrap();
                // Sends only the beginning of a query. An error is ignored, because the feed may have closed the
                // connection.
                drop(stream.write_all(&[0x0f, 0xff, 0]));
                stream
            })
            .collect();
        answered("+tcp");
        let (query, datagrams) = (query(), UdpSocket::bind("127.0.0.1:0").unwrap());
        let length = u16::try_from(query.len()).unwrap().to_be_bytes();
        let queries = [&length[..], &query].concat().repeat(20);
        let runtime = Runtime::new().unwrap();
        let silent: Vec<TcpStream> = (0..SILENT)
            .map(|_| {
                let mut stream = runtime.block_on(connect_with_small_window(DNS));
                // An error is ignored: the feed stops reading queries while the client does not read the answers, and
                // may close the connection.
                drop(stream.write_all(&queries));
                stream
            })
            .collect();
        answered("+tcp");
        for number in 0..DATAGRAMS {
            datagrams.send_to(&query, DNS).unwrap();
            if number % (DATAGRAMS / 4) == 0 {
                answered("+tcp");
                answered("+bufsize=1232");
            }
        }
        cluster.wait_for_memory(LIMIT + FLOOD_LIMIT);
        drop((connections, silent));
        answered("+tcp");
    });
}

/// The container runtime may set a hard limit of open files below the number of connections that the feed accepts by
/// default. Even then, idle connections to one interface must not prevent other clients or the kubelet's probes from
/// being answered on any interface.
#[test]
fn idle_connections_at_a_low_limit_of_open_files_do_not_exclude_other_clients() {
    let test = "flood::idle_connections_at_a_low_limit_of_open_files_do_not_exclude_other_clients";
    network::inside(test, || {
        npl_testkit::process::allow_open_files(4 * FEW_FILES as u64).unwrap();
        let cluster = LargeCluster::with_open_files(&format!("{FEW_FILES}:{FEW_FILES}"));
        let mut idle = Vec::new();
        for address in [XDS, FEED, DNS] {
            idle.extend((0..FEW_FILES).map(|_| TcpStream::connect(address).unwrap()));
            assert_eq!(api_server::get("/readyz").unwrap().0, 200, "after idle connections to {address}");
            let answer = dns::ask_at(DNS, "dig", &format!("+tcp SRV {WEB}"));
            assert_eq!(answer.answers.len(), 100, "{}", answer.text);
            Runtime::new().unwrap().block_on(slow::expect_client_is_served());
        }
        let metrics = api_server::get("/metrics").unwrap().1;
        for interface in ["http", "xds", "dns"] {
            let refused =
                format!("npl_feed_refused_connections_total{{interface=\"{interface}\",reason=\"connections\"}}");
            assert!(metrics.contains(&refused), "{interface}: {metrics}");
        }
        drop(idle);
        let log = cluster.log();
        assert!(!log.contains("accept() failed"), "{log}");
    });
}
