// SPDX-License-Identifier: Apache-2.0
//! Tests the DNS server's limits: for clients outside the allow list, for connections with incomplete queries, and for
//! clients that do not read the answers.

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    time::timeout,
};

use super::{
    tests::{HTTP, PATIENCE, by_tcp, by_udp, many, query, server_for},
    *,
};
use crate::connection_limits::ConnectionLimits;

fn refused(status: &Status, reason: &str, count: usize) -> bool {
    let line = format!("npl_feed_refused_connections_total{{interface=\"dns\",reason=\"{reason}\"}} {count}\n");
    status.encode().unwrap().contains(&line)
}

/// An allow list whose ranges are all of one IP family must not admit clients of the other family.
#[tokio::test]
async fn only_allowed_clients_are_answered() {
    let bytes = query(HTTP, None).to_vec().unwrap();
    for (allowed, is_admitted) in
        [(&[][..], true), (&["127.0.0.0/8"], true), (&["192.0.2.0/24"], false), (&["2001:db8::/32"], false)]
    {
        let status = Arc::<Status>::default();
        let (address, _publisher, task) = server_for(allowed, Arc::clone(&status), Some(many(1))).await;
        let answer = Message::from_vec(&by_udp(address, &bytes).await).unwrap();
        let code = if is_admitted { ResponseCode::NoError } else { ResponseCode::Refused };
        assert_eq!((answer.metadata.response_code, answer.answers.len()), (code, usize::from(is_admitted)));
        let mut stream = TcpStream::connect(address).await.unwrap();
        let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
        // An error is ignored, because the server may have closed the connection already.
        drop(stream.write_all(&[&length[..], &bytes].concat()).await);
        let answered = timeout(PATIENCE, stream.read_u16()).await.unwrap().is_ok();
        assert_eq!((answered, refused(&status, "allow", 2)), (is_admitted, !is_admitted), "{allowed:?}");
        task.abort();
    }
}

/// On each connection, the client announces the length of a query, and sends only the query's first byte. The server
/// has to keep memory for each of these queries until the server closes the connection.
#[tokio::test]
async fn incomplete_queries_on_many_connections_do_not_exclude_other_clients() {
    let status = Arc::<Status>::default();
    let (address, _publisher, task) = server_for(&[], Arc::clone(&status), Some(many(1))).await;
    let mut open = Vec::new();
    for _ in 0..ConnectionLimits::LARGEST.dns {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(&[0x0f, 0xff, 0]).await.unwrap();
        open.push(stream);
    }
    let bytes = query(HTTP, None).to_vec().unwrap();
    for answer in [by_tcp(address, &bytes).await, by_udp(address, &bytes).await] {
        assert_eq!(Message::from_vec(&answer).unwrap().answers.len(), 1);
    }
    assert!(refused(&status, "connections", 1));
    let closed = timeout(PATIENCE, open[0].read(&mut [0; 1])).await.expect("the oldest connection is still open");
    assert!(!matches!(closed, Ok(1..)));
    task.abort();
}

/// If a client reads no answers, the server stops reading the client's queries once the kernel's buffers are full, so
/// the memory for the connection is bounded.
#[tokio::test]
async fn a_flood_of_queries_without_reading_is_stopped_and_other_clients_are_answered() {
    let (address, _publisher, task) = server_for(&[], Arc::default(), Some(many(300))).await;
    let bytes = query(HTTP, None).to_vec().unwrap();
    let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
    let queries = [&length[..], &bytes].concat().repeat(1000);
    let flooding = TcpSocket::new_v4().unwrap();
    // With a small receive buffer, few answers fill the buffers of the kernel.
    flooding.set_recv_buffer_size(4096).unwrap();
    let flooding = flooding.connect(address).await.unwrap();
    let datagrams = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let (mut sent, mut refusals) = (0, 0);
    while refusals < 200 {
        match flooding.try_write(&queries) {
            Ok(count) => (sent, refusals) = (sent + count, 0),
            Err(_full) => refusals += 1,
        }
        assert!(sent < 64 << 20, "the server has read {sent} bytes of queries whose answers are not read");
        datagrams.send_to(&bytes, address).await.unwrap();
        tokio::task::yield_now().await;
    }
    let answer = Message::from_vec(&by_tcp(address, &bytes).await).unwrap();
    assert_eq!(answer.answers.len(), 300);
    assert!(Message::from_vec(&by_udp(address, &bytes).await).unwrap().metadata.truncation);
    task.abort();
}

#[tokio::test]
async fn malformed_queries_by_tcp_end_at_most_their_connection() {
    let (address, _publisher, task) = server_for(&[], Arc::default(), Some(many(1))).await;
    let good = query(HTTP, None).to_vec().unwrap();
    let cut = &good[..good.len() - 3];
    let answer = Message::from_vec(&by_tcp(address, cut).await).unwrap();
    assert_eq!(answer.metadata.response_code, ResponseCode::FormErr);
    // Malformed messages: a query that is shorter than a DNS header, an empty query, and an announced length above the
    // maximum length of a query.
    for bytes in [&[0, 3, 1, 2, 3][..], &[0, 0], &[0xff, 0xff]] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let closed = timeout(PATIENCE, stream.read(&mut [0; 1])).await.expect("the connection is still open");
        assert!(!matches!(closed, Ok(1..)), "{bytes:?}");
    }
    assert_eq!(Message::from_vec(&by_tcp(address, &good).await).unwrap().answers.len(), 1);
    task.abort();
}
