// SPDX-License-Identifier: Apache-2.0

use serde_json::{Value, json};

use super::*;
use crate::kube::mock::{MockServer, api_server, refusal};

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

#[test]
fn an_unverifiable_certificate_is_named() {
    let cause = "invalid peer certificate: UnsupportedSignatureAlgorithmContext(..)";
    assert!(silence(cause).contains("certificate cannot be verified"), "{}", silence(cause));
    assert!(silence("Connection refused (os error 111)").contains("does not answer"));
}
