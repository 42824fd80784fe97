// SPDX-License-Identifier: Apache-2.0

use serde_json::{Value, json};

use super::*;
use crate::kube::mock::{MockServer, api_server, refusal};

const URL: &str = "https://192.0.2.1:6443/";

/// Answers the questions of one probe; `denied` is what is not allowed.
async fn review(server: &mut MockServer, denied: &[&str]) -> Vec<Value> {
    let mut asked_for = Vec::new();
    for _ in NEEDED {
        let mut asked = server.asked().await;
        assert_eq!(asked.line, "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews?");
        let attributes = asked.body["spec"]["resourceAttributes"].take();
        let verb = attributes["verb"].as_str().unwrap();
        let resource = attributes["resource"].as_str().unwrap();
        let allowed = !denied.contains(&format!("{verb} {resource}").as_str());
        asked.answer(201, json!({ "metadata": {}, "spec": {}, "status": { "allowed": allowed } }).to_string());
        asked_for.push(attributes);
    }
    asked_for
}

async fn list_nodes(server: &mut MockServer, nodes: &[Value]) {
    let asked = server.asked().await;
    assert_eq!(asked.line, "GET /api/v1/nodes?&fieldSelector=metadata.name%3Dworker-1&limit=1");
    asked.answer(200, json!({ "metadata": {}, "items": nodes }).to_string());
}

async fn access(server: impl AsyncFnOnce(&mut MockServer)) -> Result<(), ConnectError> {
    let (client, mut mock) = api_server();
    let (result, ()) = tokio::join!(wait_for_access(&client, URL, "worker-1"), server(&mut mock));
    result
}

#[tokio::test(start_paused = true)]
async fn every_permission_is_asked_for_by_name() {
    access(async |server: &mut MockServer| {
        let asked = review(server, &[]).await;
        assert_eq!(asked[2], json!({ "verb": "patch", "version": "v1", "resource": "pods", "subresource": "status" }));
        assert_eq!(asked[6], json!({ "verb": "watch", "version": "v1", "resource": "nodes", "name": "worker-1" }));
        list_nodes(server, &[json!({ "metadata": { "name": "worker-1" } })]).await;
    })
    .await
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_not_known_is_waited_for_elsewhere() {
    access(async |server: &mut MockServer| {
        review(server, &[]).await;
        list_nodes(server, &[]).await;
    })
    .await
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn missing_permissions_are_named_with_advice() {
    let result = access(async |server: &mut MockServer| {
        for _ in 0..REFUSALS_TO_BELIEVE {
            review(server, &["list services", "patch pods"]).await;
        }
    });
    assert_eq!(
        result.await.unwrap_err().to_string(),
        "the API server at https://192.0.2.1:6443/ does not let the agent patch pods/status, list services: \
         apply deploy/npl.yaml, which grants it"
    );
}

#[tokio::test(start_paused = true)]
async fn a_refusal_that_is_taken_back_is_forgotten() {
    access(async |server: &mut MockServer| {
        review(server, &["list pods"]).await;
        server.asked().await.answer(401, refusal(401, "Unauthorized", "Unauthorized"));
        review(server, &[]).await;
        list_nodes(server, &[]).await;
    })
    .await
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn credentials_that_are_not_accepted_end_the_start() {
    let result = access(async |server: &mut MockServer| {
        for _ in 0..REFUSALS_TO_BELIEVE {
            server.asked().await.answer(401, refusal(401, "Unauthorized", "Unauthorized"));
        }
    });
    let err = result.await.unwrap_err();
    assert!(matches!(err, ConnectError::Unauthorized { .. }), "{err}");
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_is_down_is_waited_for() {
    access(async |server: &mut MockServer| {
        for _ in 0..10 {
            server.asked().await.break_connection();
        }
        server.asked().await.answer(503, "");
        let _held = server.asked().await.keep_waiting();
        review(server, &[]).await;
        list_nodes(server, &[]).await;
    })
    .await
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn where_permissions_may_not_be_asked_for_the_watches_find_out() {
    access(async |server: &mut MockServer| {
        for _ in NEEDED {
            server.asked().await.answer(403, refusal(403, "Forbidden", "no"));
        }
        list_nodes(server, &[]).await;
    })
    .await
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_kubeconfig_that_cannot_be_read_is_named() {
    let err = load(Some(Path::new("/nonexistent/kubeconfig"))).await.unwrap_err();
    assert_eq!(
        err.to_string(),
        "use kubeconfig /nonexistent/kubeconfig: failed to read kubeconfig from '\"/nonexistent/kubeconfig\"': \
         No such file or directory (os error 2); give --kubeconfig a readable file with a current context"
    );
}
