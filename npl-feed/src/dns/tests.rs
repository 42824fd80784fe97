// SPDX-License-Identifier: Apache-2.0

use std::{
    str::FromStr as _,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use hickory_server::proto::{
    op::Query,
    rr::{RData, RecordType},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::watch,
    time::timeout,
};

use super::{zone::Section, *};
use crate::{
    connection_limits::ConnectionLimits,
    core::{
        model::{Change, Pod},
        snapshot::Snapshot,
        tests::{annotation, cluster, node, pod, service, snapshot},
        work::{self, Operation},
    },
};

pub(super) const HTTP: &str = "_http._tcp.web.default.npl.internal.";

pub(super) fn zone() -> Zone {
    Zone::new(&name("npl.internal."))
}

pub(super) fn name(text: &str) -> Name {
    Name::from_str(text).unwrap()
}

fn ask(snapshot: &Snapshot, text: &str, kind: RecordType) -> (ResponseCode, Vec<String>, Vec<String>, bool) {
    let answer = zone().answer(snapshot, &name(text), kind, usize::from(u16::MAX));
    let texts = |section: &Section| section.iter().map(|record| record.data.to_string()).collect();
    let has_soa = answer.authority.iter().any(|record| matches!(record.data, RData::SOA(_)));
    (answer.code, texts(&answer.answers), texts(&answer.additional), has_soa)
}

pub(super) fn pods() -> Vec<Pod> {
    let mut pods = vec![
        pod("a", "n1", &annotation(8080, "192.0.2.1", 61000)),
        pod("b", "n1", &annotation(8080, "192.0.2.1", 61001)),
        pod("c", "n2", &annotation(8080, "192.0.2.2", 61000)),
        pod("d", "n2", &annotation(8080, "192.0.2.2", 61001)),
    ];
    pods[2].is_ready = false;
    pods[3].object.is_terminating = true;
    pods
}

#[test]
fn ready_members_have_srv_records_and_the_addresses_of_their_nodes() {
    for text in [HTTP, "_80._TCP.Web.default.NPL.Internal."] {
        let (code, answers, additional, has_soa) = ask(&snapshot(pods()), text, RecordType::SRV);
        assert_eq!((code, has_soa), (ResponseCode::NoError, false));
        assert_eq!(
            answers,
            ["0 1 61000 61000.192-0-2-1.ip.npl.internal.", "0 1 61001 61001.192-0-2-1.ip.npl.internal."]
        );
        assert_eq!(additional, ["192.0.2.1", "192.0.2.1"]);
    }
}

#[test]
fn a_port_whose_name_is_the_number_of_another_port_is_found_by_its_name() {
    let both = r#"[{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp"},
                   {"podPort":9090,"nodeIP":"192.0.2.1","nodePort":61001,"protocol":"tcp"}]"#;
    let mut state = cluster(vec![pod("a", "n1", both)]);
    let mut service = service("web", 8080);
    let mut named = crate::core::tests::service("web", 9090).ports.remove(0);
    (named.name, named.number) = (Some("80".into()), 8443);
    service.ports.push(named);
    state.apply(Change::Service(Box::new(service)), 0);
    state.refresh();
    let snapshot = state.snapshot();
    let answers = ask(&snapshot, "_80._tcp.web.default.npl.internal.", RecordType::SRV).1;
    assert_eq!(answers, ["0 1 61001 61001.192-0-2-1.ip.npl.internal."]);
    assert_eq!(snapshot.port("default", "web", "80").unwrap().members[0].port, 61001);
    assert!(ask(&snapshot, "_80._udp.web.default.npl.internal.", RecordType::SRV).1.is_empty());
}

#[test]
fn addresses_of_members_resolve_and_others_do_not_exist() {
    let mut state =
        cluster(vec![pod("a", "n1", r#"[{"podPort":8080,"nodeIP":"2001:db8::1","nodePort":61000,"protocol":"tcp"}]"#)]);
    let mut six = node("n1", "2001:db8::1", "");
    six.object.internal_ips.push("192.0.2.1".parse().unwrap());
    state.apply(Change::Node(six), 0);
    let mut service = service("web", 8080);
    service.object.families = vec![npl_agent::core::model::Family::V6];
    state.apply(Change::Service(Box::new(service)), 0);
    state.refresh();
    let snapshot = state.snapshot();
    let target = "61000.2001-db8-0-0-0-0-0-1.ip.npl.internal.";
    assert_eq!(ask(&snapshot, HTTP, RecordType::SRV).1, [format!("0 1 61000 {target}")]);
    let additional = zone().answer(&snapshot, &name(HTTP), RecordType::SRV, usize::from(u16::MAX)).additional;
    let shown: Vec<_> = additional.iter().map(|it| (&it.name, it.record_type(), it.data.to_string())).collect();
    assert_eq!(shown, [(&name(target), RecordType::AAAA, "2001:db8::1".to_owned())]);
    assert_eq!(
        ask(&snapshot, target, RecordType::AAAA),
        (ResponseCode::NoError, vec!["2001:db8::1".to_owned()], vec![], false)
    );
    assert_eq!(ask(&snapshot, target, RecordType::A), (ResponseCode::NoError, vec![], vec![], true), "NODATA");
    assert_eq!(ask(&snapshot, "2001-db8-0-0-0-0-0-1.ip.npl.internal.", RecordType::AAAA).1, ["2001:db8::1"]);
    for absent in [
        "192-0-2-9.ip.npl.internal.",
        "61001.2001-db8-0-0-0-0-0-1.ip.npl.internal.",
        "1.2.ip.npl.internal.",
        // The member's name, written in another way.
        "061000.2001-db8-0-0-0-0-0-1.ip.npl.internal.",
        "61000.2001-0db8-0-0-0-0-0-1.ip.npl.internal.",
        "2001-db8-0-0-0-0--1.ip.npl.internal.",
    ] {
        assert_eq!(ask(&snapshot, absent, RecordType::A).0, ResponseCode::NXDomain);
    }
    // hickory's text parser rejects this name, so the test builds the name from labels.
    let signed = ["+61000", "2001-db8-0-0-0-0-0-1", "ip", "npl", "internal"].map(str::as_bytes);
    let answer = zone().answer(&snapshot, &Name::from_labels(signed).unwrap(), RecordType::AAAA, 512);
    assert_eq!(answer.code, ResponseCode::NXDomain);
}

#[test]
fn names_without_records_are_nodata_and_others_do_not_exist() {
    let snapshot = snapshot(pods());
    for text in [
        "npl.internal.",
        "ip.npl.internal.",
        "default.npl.internal.",
        "web.default.npl.internal.",
        "_tcp.web.default.npl.internal.",
        HTTP,
    ] {
        let (code, answers, _, has_soa) = ask(&snapshot, text, RecordType::TXT);
        assert_eq!((code, answers.len(), has_soa), (ResponseCode::NoError, 0, true), "{text}");
    }
    for text in [
        "other.npl.internal.",
        "api.default.npl.internal.",
        "_udp.web.default.npl.internal.",
        "_http._udp.web.default.npl.internal.",
        "_https._tcp.web.default.npl.internal.",
        "http._tcp.web.default.npl.internal.",
        "a._http._tcp.web.default.npl.internal.",
    ] {
        let (code, answers, _, has_soa) = ask(&snapshot, text, RecordType::SRV);
        assert_eq!((code, answers.len(), has_soa), (ResponseCode::NXDomain, 0, true), "{text}");
    }
    assert_eq!(ask(&snapshot, "npl.example.", RecordType::SRV).0, ResponseCode::Refused);
    assert!(ask(&snapshot, "npl.internal.", RecordType::SOA).1[0].starts_with("ns.npl.internal."));
    assert_eq!(ask(&snapshot, "npl.internal.", RecordType::NS).1, ["ns.npl.internal."]);
    assert!(ask(&snapshot, "npl.internal.", RecordType::ANY).1[0].starts_with("ns.npl.internal."));
    for (kind, text) in
        [(RecordType::AXFR, "npl.internal."), (RecordType::IXFR, "npl.internal."), (RecordType::AXFR, HTTP)]
    {
        assert_eq!(ask(&snapshot, text, kind), (ResponseCode::Refused, vec![], vec![], false), "{kind} {text}");
    }
}

/// DNS compares only ASCII letters without regard to case. The lower case of U+212A (Kelvin sign) is the ASCII letter
/// k.
#[test]
fn a_label_with_a_letter_outside_of_ascii_is_another_name() {
    let mut state = cluster(pods());
    state.apply(Change::Service(Box::new(service("kiwi", 8080))), 0);
    state.refresh();
    let snapshot = state.snapshot();
    let code = |first: &str| {
        let labels = ["_http", "_tcp", first, "default", "npl", "internal"].map(str::as_bytes);
        zone().answer(&snapshot, &Name::from_labels(labels).unwrap(), RecordType::SRV, 4096).code
    };
    assert_eq!(
        ["kiwi", "KIWI", "\u{212a}iwi"].map(code),
        [ResponseCode::NoError, ResponseCode::NoError, ResponseCode::NXDomain]
    );
}

/// A client can forge the source address of a query by UDP. The cost of a query must not depend on the number of
/// members, even if the answer is truncated.
#[test]
fn the_cost_of_a_query_does_not_depend_on_the_number_of_members() {
    let snapshot = many(1000);
    let built = |text: &str, kind| {
        let mut is_truncated = false;
        let count = work::during(Operation::Record, || {
            let answer = zone().answer(&snapshot, &name(text), kind, usize::from(LARGEST_DATAGRAM));
            is_truncated = answer.is_truncated;
        });
        (is_truncated, count)
    };
    let (is_truncated, count) = built(HTTP, RecordType::SRV);
    assert!(is_truncated && count < 30, "{count} records");
    let listed = work::during(Operation::Listing, || {
        for port in 61_000..61_900 {
            assert_eq!(built(&format!("{port}.192-0-2-1.ip.npl.internal."), RecordType::A), (false, 1));
            assert_eq!(built(&format!("{port}.192-0-2-2.ip.npl.internal."), RecordType::A), (false, 1));
        }
    });
    assert_eq!(listed, 1, "the addresses of a snapshot are collected once");
    let listed = work::during(Operation::Listing, || {
        for text in [
            "default.npl.internal.",
            "none.npl.internal.",
            "web.default.npl.internal.",
            "_tcp.web.default.npl.internal.",
        ] {
            built(text, RecordType::A);
        }
    });
    assert_eq!(listed, 0, "names of namespaces and Services must not list all Service ports");
}

/// Starts a DNS server on loopback, and returns its address, the sender of its snapshots, and its task.
async fn server(snapshot: Option<Snapshot>) -> (SocketAddr, crate::follow::Publisher, tokio::task::JoinHandle<()>) {
    server_for(&[], Arc::default(), snapshot).await
}

pub(super) async fn server_for(
    allowed: &'static [&'static str],
    status: Arc<Status>,
    snapshot: Option<Snapshot>,
) -> (SocketAddr, crate::follow::Publisher, tokio::task::JoinHandle<()>) {
    let allowed: Vec<IpNet> = allowed.iter().map(|range| range.parse().unwrap()).collect();
    let sockets = Sockets::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = sockets.address().unwrap();
    let (publisher, published) = watch::channel(snapshot.map(Arc::new));
    let task = tokio::spawn(async move {
        serve(sockets, name("npl.internal."), &allowed, published, status, ConnectionLimits::LARGEST.dns)
            .await
            .unwrap();
    });
    (address, publisher, task)
}

#[tokio::test]
async fn port_zero_selects_a_port_that_is_free_for_udp_and_tcp() {
    let occupied = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let in_use = occupied.local_addr().unwrap();
    let rounds = AtomicUsize::new(0);
    let bind_udp = async |address| {
        // The kernel selects a port that is free for UDP, and may be in use for TCP. The test simulates this case: the
        // first attempt binds the UDP socket to the port of the TCP socket `occupied`.
        let is_first = rounds.fetch_add(1, Ordering::Relaxed) == 0;
        UdpSocket::bind(if is_first { in_use } else { address }).await
    };
    let sockets = Sockets::bind_with("127.0.0.1:0".parse().unwrap(), bind_udp).await.unwrap();
    assert_ne!(sockets.address().unwrap(), in_use);
    assert_eq!(sockets.address().unwrap(), sockets.tcp.local_addr().unwrap());
    let error = Sockets::bind(in_use).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "a port that a user chose is not replaced");
    drop(occupied);
}

pub(super) fn query(text: &str, edns: Option<u16>) -> Message {
    let mut message = Message::query();
    message.add_query(Query::query(name(text), RecordType::SRV));
    if let Some(size) = edns {
        let mut edns = Edns::new();
        edns.set_max_payload(size);
        message.set_edns(edns);
    }
    message
}

pub(super) const PATIENCE: Duration = Duration::from_secs(30);

pub(super) async fn by_udp(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.send_to(bytes, address).await.unwrap();
    let mut buffer = vec![0; 65_535];
    let length = timeout(PATIENCE, socket.recv(&mut buffer)).await.unwrap().unwrap();
    buffer.truncate(length);
    buffer
}

pub(super) async fn by_tcp(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_u16(u16::try_from(bytes.len()).unwrap()).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let length = timeout(PATIENCE, stream.read_u16()).await.unwrap().unwrap();
    let mut answer = vec![0; usize::from(length)];
    stream.read_exact(&mut answer).await.unwrap();
    answer
}

pub(super) fn many(count: u16) -> Snapshot {
    snapshot(many_pods(count))
}

fn many_pods(count: u16) -> Vec<Pod> {
    (0..count).map(|it| pod(&format!("p{it}"), "n1", &annotation(8080, "192.0.2.1", 61000 + it))).collect()
}

#[tokio::test]
async fn an_answer_fits_the_clients_size_or_makes_the_client_repeat_the_query_by_tcp() {
    let (address, _publisher, task) = server(Some(many(20))).await;
    for (size, is_truncated) in
        [(None, true), (Some(0), true), (Some(512), true), (Some(1232), false), (Some(u16::MAX), false)]
    {
        let answer = by_udp(address, &query(HTTP, size).to_vec().unwrap()).await;
        let most = size.unwrap_or_default().clamp(512, 1232);
        assert!(answer.len() <= usize::from(most), "{} bytes", answer.len());
        let answer = Message::from_vec(&answer).unwrap();
        assert_eq!(answer.metadata.truncation, is_truncated, "{size:?}");
        assert_eq!(
            answer.answers.len(),
            if is_truncated { 0 } else { 20 },
            "the answer must contain all members or none"
        );
        // The server announces the size that the server accepts, not the client's size (RFC 6891).
        assert_eq!(answer.edns.map(|edns| edns.max_payload()), size.map(|_| 1232));
    }
    let answer = Message::from_vec(&by_tcp(address, &query(HTTP, None).to_vec().unwrap()).await).unwrap();
    assert_eq!((answer.metadata.truncation, answer.answers.len(), answer.additionals.len()), (false, 20, 20));
    assert!(answer.metadata.authoritative && answer.answers.iter().all(|record| record.ttl == 1));
    task.abort();
}

/// If not all SRV records fit into an answer, the answer contains none of them. The test tries many numbers of members,
/// because hickory compresses only the first 120 names of a message, so later records are longer.
#[tokio::test]
async fn an_answer_has_all_members_or_none() {
    let (address, publisher, task) = server(None).await;
    let udp = query(HTTP, Some(1232)).to_vec().unwrap();
    let mut complete = [0, 0];
    for count in (1..140).chain((600..1000).step_by(20)) {
        publisher.send_replace(Some(Arc::new(many(count))));
        let answers = [by_udp(address, &udp).await, by_tcp(address, &udp).await];
        for ((answer, complete), is_tcp) in answers.iter().zip(&mut complete).zip([false, true]) {
            let answer = Message::from_vec(answer).unwrap();
            let (code, is_truncated) = (answer.metadata.response_code, answer.metadata.truncation);
            let is_too_large = if is_tcp { code == ResponseCode::ServFail } else { is_truncated };
            let members = if is_too_large { 0 } else { count };
            assert_eq!(answer.answers.len(), usize::from(members), "of {count} members");
            assert!(is_too_large || code == ResponseCode::NoError && !is_truncated, "{code}");
            *complete = members.max(*complete);
        }
    }
    // docs/load-balancers.md states these numbers of members for an answer by UDP and by TCP.
    assert!(complete[0] >= 20 && complete[1] >= 700, "{complete:?}");
    task.abort();
}

/// The size of an answer depends on the length of the Service's name, because the owner name of each SRV record
/// contains the Service's name.
#[tokio::test]
async fn an_answer_by_udp_has_all_members_or_none_whatever_the_length_of_the_name() {
    let peer = "192.0.2.99:4000".parse().unwrap();
    for length in (1..=63).step_by(6) {
        let service_name = "s".repeat(length);
        let asked = format!("_http._tcp.{service_name}.default.npl.internal.");
        for count in 3..27 {
            let mut state = cluster(many_pods(count));
            state.apply(Change::Service(Box::new(service(&service_name, 8080))), 0);
            state.refresh();
            let (_publisher, published) = watch::channel(Some(Arc::new(state.snapshot())));
            let handler = Handler { zone: zone(), allowed: Arc::default(), published, status: Arc::default() };
            for size in [None, Some(1232)] {
                let bytes = handler.respond(&query(&asked, size).to_vec().unwrap(), peer, Protocol::Udp).unwrap();
                let answer = Message::from_vec(&bytes).unwrap();
                let members = if answer.metadata.truncation { 0 } else { usize::from(count) };
                assert_eq!(answer.answers.len(), members, "{length} letters, {count} members, {size:?}");
                assert_eq!(answer.edns.is_some(), size.is_some());
            }
        }
    }
}

#[tokio::test]
async fn before_the_first_snapshot_the_server_fails_so_that_resolvers_ask_another_one() {
    let (address, publisher, task) = server(None).await;
    let bytes = query(HTTP, None).to_vec().unwrap();
    let answer = Message::from_vec(&by_udp(address, &bytes).await).unwrap();
    assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    publisher.send_replace(Some(Arc::new(many(1))));
    let answer = Message::from_vec(&by_udp(address, &bytes).await).unwrap();
    assert_eq!((answer.metadata.response_code, answer.answers.len()), (ResponseCode::NoError, 1));
    task.abort();
}

/// A client that has connected its UDP socket, such as nginx, receives only datagrams from the address to which it has
/// sent the query. By default, the kernel sends an answer to 127.0.0.1 from 127.0.0.1, even if the query was sent to
/// 127.0.0.2.
#[tokio::test]
async fn an_answer_by_udp_comes_from_the_address_that_the_client_has_asked() {
    for wildcard in ["0.0.0.0:0", "[::]:0"] {
        let bound = crate::listen::bind_with(wildcard.parse().unwrap(), &Once::new(), Sockets::bind).await;
        let sockets = bound.unwrap();
        let port = sockets.address().unwrap().port();
        let (_publisher, published) = watch::channel(Some(Arc::new(many(1))));
        let served = serve(sockets, name("npl.internal."), &[], published, Arc::default(), 1);
        let ask = async {
            for asked in ["127.0.0.1", "127.0.0.2"] {
                let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
                client.connect((asked, port)).await.unwrap();
                client.send(&query(HTTP, None).to_vec().unwrap()).await.unwrap();
                let mut buffer = vec![0; 512];
                let received = timeout(PATIENCE, client.recv(&mut buffer)).await;
                let length = received.unwrap_or_else(|_| panic!("no answer from {asked} with {wildcard}")).unwrap();
                assert_eq!(Message::from_vec(&buffer[..length]).unwrap().answers.len(), 1);
            }
        };
        tokio::select! {
            _ = served => panic!("the server has ended"),
            () = ask => {}
        }
    }
}

#[tokio::test]
async fn an_answer_copies_the_do_bit() {
    let (address, _publisher, task) = server(Some(many(1))).await;
    for dnssec_ok in [false, true] {
        let mut message = query(HTTP, Some(1232));
        message.edns.as_mut().unwrap().set_dnssec_ok(dnssec_ok);
        let answer = Message::from_vec(&by_udp(address, &message.to_vec().unwrap()).await).unwrap();
        assert_eq!(answer.edns.unwrap().flags().dnssec_ok, dnssec_ok);
    }
    task.abort();
}

#[tokio::test]
async fn other_operations_classes_and_versions_are_refused() {
    let (address, _publisher, task) = server(Some(many(1))).await;
    let mut update = query(HTTP, None);
    update.metadata.op_code = OpCode::Notify;
    let mut chaos = Message::query();
    let mut question = Query::query(name(HTTP), RecordType::SRV);
    question.set_query_class(DNSClass::CH);
    chaos.add_query(question);
    let mut newer = query(HTTP, Some(1232));
    if let Some(edns) = &mut newer.edns {
        edns.set_version(1);
    }
    for (message, code) in
        [(update, ResponseCode::NotImp), (chaos, ResponseCode::Refused), (newer, ResponseCode::BADVERS)]
    {
        let answer = Message::from_vec(&by_udp(address, &message.to_vec().unwrap()).await).unwrap();
        // The test compares numbers, because BADVERS and BADSIG have the same number, which hickory decodes as BADSIG.
        assert_eq!(u16::from(answer.metadata.response_code), u16::from(code));
        assert!(answer.answers.is_empty());
    }
    task.abort();
}
