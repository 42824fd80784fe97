// SPDX-License-Identifier: Apache-2.0
//! Tests that the DNS server answers or refuses random bytes, changed queries and random names, and that no task
//! panics.

use hickory_server::proto::rr::RecordType;
use proptest::{prelude::*, sample::Index};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::watch,
    time::timeout,
};

use super::{
    tests::{HTTP, PATIENCE, by_tcp, by_udp, many, name, pods, query, server_for, zone},
    *,
};
use crate::{core::tests::snapshot, panics};

/// Names of all kinds that the zone has, and a name of another zone.
const NAMES: [&str; 7] = [
    HTTP,
    "npl.internal.",
    "_tcp.web.default.npl.internal.",
    "web.default.npl.internal.",
    "61000.192-0-2-1.ip.npl.internal.",
    "192-0-2-1.ip.npl.internal.",
    "_http._tcp.web.default.example.",
];

fn bytes(most: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..most)
}

/// A valid query with any name, type, class and size of UDP answers.
fn valid_query() -> impl Strategy<Value = Vec<u8>> {
    let edns = prop_oneof![Just(None), any::<u16>().prop_map(Some)];
    let class = prop_oneof![3 => Just(DNSClass::IN), 1 => any::<u16>().prop_map(DNSClass::from)];
    let kind = prop_oneof![Just(RecordType::SRV), Just(RecordType::ANY), any::<u16>().prop_map(RecordType::from)];
    (prop::sample::select(NAMES.to_vec()), edns, kind, class).prop_map(|(name, edns, kind, class)| {
        let mut message = query(name, edns);
        message.queries[0].set_query_type(kind);
        message.queries[0].set_query_class(class);
        message.to_vec().unwrap()
    })
}

/// A valid query with up to three replaced bytes. Some of these queries are cut and continued with random bytes.
fn changed_query() -> impl Strategy<Value = Vec<u8>> {
    let replaced = prop::collection::vec((any::<Index>(), any::<u8>()), 0..4);
    let end = prop_oneof![2 => Just(None), 1 => (any::<Index>(), bytes(20)).prop_map(Some)];
    (valid_query(), replaced, end).prop_map(|(mut query, replaced, end)| {
        for (place, byte) in replaced {
            let place = place.index(query.len());
            query[place] = byte;
        }
        if let Some((place, rest)) = end {
            query.truncate(place.index(query.len()));
            query.extend(rest);
        }
        query
    })
}

fn any_query() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![1 => bytes(80), 3 => changed_query()]
}

proptest! {
    /// Every message with the header of a query gets one answer with the same ID, which can be decoded and is not
    /// larger than the client accepts.
    #[test]
    fn every_query_is_answered(queries in prop::collection::vec(any_query(), 1..20), count in 0..40_u16) {
        panics::run_without(async {
            let (_publisher, published) = watch::channel(Some(Arc::new(many(count))));
            let handler = Handler { zone: zone(), allowed: Arc::default(), published, status: Arc::default() };
            for query in queries {
                for protocol in [Protocol::Udp, Protocol::Tcp] {
                    let answer = handler.respond(&query, "192.0.2.99:4000".parse().unwrap(), protocol);
                    let is_query = query.len() >= 12 && query[2] & 0x80 == 0;
                    assert_eq!(answer.is_some(), is_query, "{query:?}");
                    let Some(answer) = answer else { continue };
                    let decoded = Message::from_vec(&answer).unwrap();
                    assert_eq!(decoded.metadata.id.to_be_bytes(), query[..2]);
                    assert_eq!(decoded.metadata.message_type, MessageType::Response);
                    let most = if protocol == Protocol::Udp { LARGEST_DATAGRAM } else { u16::MAX };
                    assert!(answer.len() <= usize::from(most), "{} bytes", answer.len());
                }
            }
        });
    }

    /// A name with labels of any bytes gets a negative answer, unless the zone contains the name.
    #[test]
    fn every_name_has_an_answer(
        labels in prop::collection::vec(prop_oneof![
            prop::collection::vec(any::<u8>(), 1..=63),
            "[_0-9a-z-]{1,12}".prop_map(String::into_bytes),
            prop::sample::select(vec!["_http", "_tcp", "web", "default", "ip", "192-0-2-1", "61000"])
                .prop_map(|label| label.as_bytes().to_vec()),
        ], 0..6),
        is_below in prop::bool::weighted(0.9),
        kind in any::<u16>(),
    ) {
        let Ok(mut asked) = Name::from_labels(labels.iter().map(Vec::as_slice)) else { return Ok(()) };
        if is_below {
            let Ok(below) = asked.append_domain(&name("npl.internal.")) else { return Ok(()) };
            asked = below;
        }
        let ask = |kind| zone().answer(&snapshot(pods()), &asked, kind, usize::from(u16::MAX));
        let has_records = |kind| !ask(kind).answers.is_empty();
        for kind in [RecordType::from(kind), RecordType::SRV, RecordType::A, RecordType::ANY, RecordType::AXFR] {
            let answer = ask(kind);
            if !is_below || matches!(kind, RecordType::AXFR | RecordType::IXFR) {
                prop_assert_eq!(answer.code, ResponseCode::Refused);
            } else if answer.code == ResponseCode::NoError {
                prop_assert_eq!(answer.answers.is_empty(), !answer.authority.is_empty());
            } else {
                prop_assert_eq!(answer.code, ResponseCode::NXDomain);
                prop_assert_eq!((answer.answers.len(), answer.authority.len()), (0, 1));
            }
            prop_assert!(has_records(RecordType::ANY) || !has_records(kind), "{} {}", asked, kind);
        }
    }
}

/// Sends a frame of DNS by TCP, ends the connection's sending direction, and reads until the server closes the
/// connection. The announced length may differ from the length of the frame.
async fn send_frame(address: SocketAddr, length: u16, frame: &[u8]) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // Errors are ignored, because the server may have closed the connection already.
    drop(stream.write_all(&[&length.to_be_bytes()[..], frame].concat()).await);
    drop(stream.shutdown().await);
    let mut answers = Vec::new();
    drop(timeout(PATIENCE, stream.read_to_end(&mut answers)).await.expect("the server has not closed the connection"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Any bytes by UDP, and any bytes by TCP in frames with right and wrong lengths, cause no panic in a task of the
    /// server. Afterwards, the server answers a valid query.
    #[test]
    fn random_datagrams_and_frames_do_not_disturb_the_server(
        queries in prop::collection::vec((any_query(), prop_oneof![3 => Just(None), 1 => any::<u16>().prop_map(Some)]), 1..20)
    ) {
        panics::run_without(async {
            let (address, _publisher, task) = server_for(&[], Arc::default(), Some(many(1))).await;
            let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            for (bytes, length) in &queries {
                socket.send_to(bytes, address).await.unwrap();
                let length = length.unwrap_or_else(|| u16::try_from(bytes.len()).unwrap());
                send_frame(address, length, bytes).await;
            }
            let good = query(HTTP, Some(1232)).to_vec().unwrap();
            for answer in [by_udp(address, &good).await, by_tcp(address, &good).await] {
                assert_eq!(Message::from_vec(&answer).unwrap().answers.len(), 1);
            }
            assert!(!task.is_finished());
            task.abort();
        });
    }
}
