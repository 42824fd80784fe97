// SPDX-License-Identifier: Apache-2.0

use std::io::Write as _;

use flate2::{Compression, write::GzEncoder};
use futures::StreamExt as _;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use super::*;
use crate::kube::{
    mock::{MockServer, api_server, refusal},
    objects::PodObject,
    source::{Page, Selection, Source},
};

const URL: &str = "https://192.0.2.1:6443/";

/// Answers the access reviews of one check, and returns their attributes. `denied` lists the denied permissions.
async fn review(server: &mut MockServer, denied: &[&str]) -> Vec<Value> {
    let mut reviewed = Vec::new();
    for _ in NEEDED {
        let mut request = server.next_request().await;
        assert_eq!(request.line, "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews?");
        let attributes = request.body["spec"]["resourceAttributes"].take();
        let verb = attributes["verb"].as_str().unwrap();
        let resource = attributes["resource"].as_str().unwrap();
        let allowed = !denied.contains(&format!("{verb} {resource}").as_str());
        request.answer(201, json!({ "metadata": {}, "spec": {}, "status": { "allowed": allowed } }).to_string());
        reviewed.push(attributes);
    }
    reviewed
}

async fn list_nodes(server: &mut MockServer, nodes: &[Value]) {
    let request = server.next_request().await;
    assert_eq!(request.line, "GET /api/v1/nodes?&fieldSelector=metadata.name%3Dworker-1&limit=1");
    request.answer(200, json!({ "metadata": {}, "items": nodes }).to_string());
}

async fn access(server: impl AsyncFnOnce(&mut MockServer)) -> Result<(), ConnectError> {
    let (client, mut mock) = api_server();
    let (result, ()) = tokio::join!(wait_for_access(&client, URL, "worker-1"), server(&mut mock));
    result
}

#[tokio::test(start_paused = true)]
async fn every_needed_permission_is_reviewed() {
    access(async |server: &mut MockServer| {
        let request = review(server, &[]).await;
        assert_eq!(
            request[2],
            json!({ "verb": "patch", "version": "v1", "resource": "pods", "subresource": "status" })
        );
        assert_eq!(request[6], json!({ "verb": "watch", "version": "v1", "resource": "nodes", "name": "worker-1" }));
        list_nodes(server, &[json!({ "metadata": { "name": "worker-1" } })]).await;
    })
    .await
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_unknown_node_does_not_end_the_check() {
    access(async |server: &mut MockServer| {
        review(server, &[]).await;
        list_nodes(server, &[]).await;
    })
    .await
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn missing_permissions_are_named_with_a_remedy() {
    let result = access(async |server: &mut MockServer| {
        for _ in 0..REFUSALS_TO_CONFIRM {
            review(server, &["list services", "patch pods"]).await;
        }
    });
    assert_eq!(
        result.await.unwrap_err().to_string(),
        "the API server at https://192.0.2.1:6443/ does not permit the agent to patch pods/status, list services: \
         apply deploy/npl.yaml, which grants the permissions"
    );
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_ignored_if_the_next_check_succeeds() {
    access(async |server: &mut MockServer| {
        review(server, &["list pods"]).await;
        server.next_request().await.answer(401, refusal(401, "Unauthorized", "Unauthorized"));
        review(server, &[]).await;
        list_nodes(server, &[]).await;
    })
    .await
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn repeatedly_refused_credentials_end_the_start() {
    let result = access(async |server: &mut MockServer| {
        for _ in 0..REFUSALS_TO_CONFIRM {
            server.next_request().await.answer(401, refusal(401, "Unauthorized", "Unauthorized"));
        }
    });
    let err = result.await.unwrap_err();
    assert!(matches!(err, ConnectError::Unauthorized { .. }), "{err}");
}

#[tokio::test(start_paused = true)]
async fn the_check_waits_for_an_unreachable_api_server() {
    access(async |server: &mut MockServer| {
        for _ in 0..10 {
            server.next_request().await.break_connection();
        }
        server.next_request().await.answer(503, "");
        let _held = server.next_request().await.keep_waiting();
        review(server, &[]).await;
        list_nodes(server, &[]).await;
    })
    .await
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn refused_access_reviews_count_as_granted() {
    access(async |server: &mut MockServer| {
        for _ in NEEDED {
            server.next_request().await.answer(403, refusal(403, "Forbidden", "no"));
        }
        list_nodes(server, &[]).await;
    })
    .await
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_kubeconfig_is_named() {
    let err = load(Some(Path::new("/nonexistent/kubeconfig"))).await.unwrap_err();
    assert_eq!(
        err.to_string(),
        "use kubeconfig /nonexistent/kubeconfig: failed to read kubeconfig from '\"/nonexistent/kubeconfig\"': \
         No such file or directory (os error 2); give --kubeconfig a readable file with a current context"
    );
}

/// Makes the kernel drop every packet that arrives for the socket, like a firewall that has lost its conntrack entry of
/// the connection.
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
    let liveness = Liveness { idle: second, interval: second, unacknowledged: second };
    let client = build(Config::new(url.parse().unwrap()), liveness).unwrap();
    let mut events = Source::<PodObject>::new(client, Selection::default()).watch("10", 240).await.unwrap();
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

    // The API server of Kubernetes 1.37 and later compresses each event of a watch separately, and the decoder cannot
    // read such a stream.
    let (watch, request) = tokio::join!(source.watch("10", 240), respond_once(&listener, "", b""));
    assert!(watch.is_ok());
    assert!(request.contains("\naccept-encoding: identity\r"), "{request}");
}

#[test]
fn a_dead_connection_is_noticed_within_half_a_minute() {
    let Liveness { idle, interval, unacknowledged } = LIVENESS;
    // The kernel checks the limit for unacknowledged data only when it sends a keep-alive probe.
    assert!(idle + interval <= unacknowledged && unacknowledged + interval <= Duration::from_secs(30));
}

#[test]
fn an_unverifiable_certificate_is_named() {
    let cause = "invalid peer certificate: UnsupportedSignatureAlgorithmContext(..)";
    assert!(silence(cause).contains("certificate cannot be verified"), "{}", silence(cause));
    assert!(silence("Connection refused (os error 111)").contains("does not answer"));
}
