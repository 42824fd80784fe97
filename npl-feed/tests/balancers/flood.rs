// SPDX-License-Identifier: Apache-2.0
//! A client floods the DNS interface of the program `npl-feed`. The feed's memory stays bounded, and the feed answers
//! other clients.

use std::{
    io::Write as _,
    net::{TcpStream, UdpSocket},
    time::Duration,
};

use crate::{
    dns,
    memory::{DNS, LIMIT, LargeCluster},
    network,
};

/// Connections of the client, more than the feed keeps open.
const CONNECTIONS: usize = 3000;
/// Datagrams of the client, whose answers the client does not read.
const DATAGRAMS: usize = 100_000;
/// The upper limit of the memory for all queries, answers and connections, in KiB. If the feed kept the incomplete queries
/// of all connections, they would take seven times as much.
const FLOOD_LIMIT: u64 = 24 * 1024;

const WEB: &str = "_http._tcp.web-001.production.npl.internal.";

/// A query for the members of `WEB`.
fn query() -> Vec<u8> {
    let labels = WEB.split_terminator('.').flat_map(|label| {
        let length = u8::try_from(label.len()).unwrap();
        [&[length], label.as_bytes()].concat()
    });
    // The header of a query with one question, the name, the root, type SRV, class IN.
    let header = [0, 7, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    header.into_iter().chain(labels).chain([0, 0, 33, 0, 1]).collect()
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
                // The longest query that TCP can announce, without its last bytes. The feed may close the connection.
                stream.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
                drop(stream.write_all(&[0xff].repeat(60_000)));
                stream
            })
            .collect();
        answered("+tcp");
        let (query, datagrams) = (query(), UdpSocket::bind("127.0.0.1:0").unwrap());
        for number in 0..DATAGRAMS {
            datagrams.send_to(&query, DNS).unwrap();
            if number % (DATAGRAMS / 4) == 0 {
                answered("+tcp");
                answered("+bufsize=8192");
            }
        }
        cluster.wait_for_memory(LIMIT + FLOOD_LIMIT);
        drop(connections);
        answered("+tcp");
    });
}
