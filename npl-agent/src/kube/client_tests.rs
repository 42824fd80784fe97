// SPDX-License-Identifier: Apache-2.0

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject as _};

use super::*;
use crate::{
    kube::{
        mock::{MockServer, api_server, refusal},
        transport::tests::tls,
    },
    process::telemetry::tests::Written,
};

const URL: &str = "https://192.0.2.1:6443/";

/// Answers the access reviews that one check of permissions sends, and returns the reviews' attributes. The permissions
/// in `denied` are denied.
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

/// Authorities and their certificates for 127.0.0.1, created by `openssl x509 -req -sha512`. The first authority has a
/// P-521 key. The second authority has signed its certificate with a P-256 key and SHA-512.
const UNSUPPORTED: [(&str, &[u8], &[u8]); 2] = [
    ("P-521", include_bytes!("certificates/p521-authority.pem"), include_bytes!("certificates/p521.pem")),
    (
        "P-256 with SHA-512",
        include_bytes!("certificates/p256-sha512-authority.pem"),
        include_bytes!("certificates/p256-sha512.pem"),
    ),
];

/// The TLS alert (record type 21) with level 2 (fatal) and description 40 (`handshake_failure`). A TLS server sends
/// this alert if the client does not support the kind of key in the server's certificate, for example a P-521 key.
const HANDSHAKE_FAILURE: [u8; 7] = [21, 3, 3, 0, 2, 2, 40];

/// Returns the log of the agent's first attempt to connect. The second attempt has begun when this function returns, so
/// the result does not depend on the speed of the machine.
async fn log_of_first_attempt(authority: Option<&[u8]>, answer: impl AsyncFnOnce(TcpStream)) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}/", listener.local_addr().unwrap());
    let mut config = Config::new(url.parse().unwrap());
    config.root_cert = authority.map(|pem| vec![CertificateDer::from_pem_slice(pem).unwrap().to_vec()]);
    let client = transport::build(config, LIVENESS).unwrap();
    let log = Written::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let _until_the_end = tracing::subscriber::set_default(subscriber);
    let attempts = async {
        let (first, _client) = listener.accept().await.unwrap();
        answer(first).await;
        listener.accept().await.unwrap()
    };
    tokio::select! {
        result = wait_for_access(&client, &url, "worker-1") => panic!("the check has ended: {result:?}"),
        _second = attempts => {}
    }
    log.text()
}

#[tokio::test]
async fn an_unverifiable_certificate_is_named_at_the_first_attempt() {
    for (name, authority, certificate) in UNSUPPORTED {
        let certificate = CertificateDer::from_pem_slice(certificate).unwrap();
        let log = log_of_first_attempt(Some(authority), async |socket| {
            tls(certificate).accept(socket).await.map(drop).unwrap_err();
        });
        let log = log.await;
        assert_eq!(log.matches("the API server's certificate cannot be verified").count(), 1, "{name}: {log}");
        assert!(log.contains("UnsupportedSignatureAlgorithm"), "the test checks a different error than {name}: {log}");
    }
}

#[tokio::test]
async fn a_certificate_whose_key_is_unsupported_is_named_at_the_first_attempt() {
    let log = log_of_first_attempt(None, async |mut socket| {
        let mut hello = [0; 4096];
        assert!(socket.read(&mut hello).await.unwrap() > 0);
        socket.write_all(&HANDSHAKE_FAILURE).await.unwrap();
    });
    let log = log.await;
    assert_eq!(log.matches("as if its certificate had an ECDSA P-521 key").count(), 1, "{log}");
}

#[test]
fn other_errors_are_not_attributed_to_the_certificate() {
    assert!(silence("Connection refused (os error 111)").contains("does not answer"));
}
