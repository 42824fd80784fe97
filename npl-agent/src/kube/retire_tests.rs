// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::kube::mock::{MockServer, api_server, refusal};

const PATH: &str = "/apis/apps/v1/namespaces/default/daemonsets/npl-agent";
const GROUP_PATH: &str = "/apis/apps/v1/namespaces/default/daemonsets/npl-agent-edge";

/// Returns a DaemonSet whose controller has observed the generation `observed`, with these numbers of Nodes, updated
/// Pods and ready Pods.
fn daemon_set(generation: i64, observed: i64, [nodes, updated, ready]: [i32; 3]) -> String {
    json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": { "name": "npl-agent", "generation": generation },
        "status": {
            "observedGeneration": observed, "desiredNumberScheduled": nodes, "updatedNumberScheduled": updated,
            "numberReady": ready, "currentNumberScheduled": nodes, "numberMisscheduled": 0,
        },
    })
    .to_string()
}

/// Retires all Nodes of the DaemonSet `npl-agent`, with `server` as the API server, and returns the result and the
/// reported progress.
async fn retired(server: impl AsyncFnOnce(&mut MockServer)) -> (Result<(), RetireError>, Vec<String>) {
    retired_of(&["npl-agent"], server).await
}

/// Retires all Nodes of these DaemonSets.
async fn retired_of(
    names: &[&str],
    server: impl AsyncFnOnce(&mut MockServer),
) -> (Result<(), RetireError>, Vec<String>) {
    let (client, mut mock) = api_server();
    let target = Target {
        kubeconfig: None,
        namespace: None,
        daemon_sets: names.iter().map(|name| (*name).to_owned()).collect(),
        timeout: Duration::from_secs(20),
    };
    let mut reported = Vec::new();
    let daemon_sets = Api::default_namespaced(client);
    let mut report = |progress: Progress| reported.push(progress.to_string());
    let (result, ()) = tokio::join!(retire(&daemon_sets, &target, &mut report), server(&mut mock));
    (result, reported)
}

#[tokio::test(start_paused = true)]
async fn every_node_is_waited_for() {
    let (result, reported) = retired(async |server: &mut MockServer| {
        let patch = server.next_request().await;
        assert_eq!(patch.line, format!("PATCH {PATH}?"));
        assert_eq!(patch.content_type, "application/strategic-merge-patch+json");
        let container = &patch.body["spec"]["template"]["spec"]["containers"][0];
        assert_eq!(*container, json!({ "name": "npl-agent", "env": [{ "name": "NPL_RETIRE", "value": "true" }] }));
        // The controller has not observed the patch yet: its numbers are those of the earlier template, and look as if
        // all Nodes were retired.
        patch.answer(200, daemon_set(2, 1, [3, 3, 3]));
        for numbers in [[3, 1, 2], [3, 3, 1], [3, 3, 3]] {
            let get = server.next_request().await;
            assert_eq!(get.line, format!("GET {PATH}"));
            get.answer(200, daemon_set(2, 2, numbers));
        }
    })
    .await;
    assert!(result.is_ok(), "{result:?}");
    let expected = [
        "the DaemonSet controller has not seen the change yet",
        "0 of 3 Nodes are retired",
        "1 of 3 Nodes are retired",
        "3 of 3 Nodes are retired",
    ];
    assert_eq!(reported, expected);
}

#[tokio::test(start_paused = true)]
async fn the_nodes_of_every_daemon_set_are_retired_at_the_same_time() {
    let names = ["npl-agent", "npl-agent-edge", "npl-agent-gone"];
    let (result, reported) = retired_of(&names, async |server: &mut MockServer| {
        for (path, numbers) in [(PATH, [3, 0, 3]), (GROUP_PATH, [2, 0, 2])] {
            let patch = server.next_request().await;
            assert_eq!(patch.line, format!("PATCH {path}?"));
            patch.answer(200, daemon_set(2, 2, numbers));
        }
        let missing = refusal(404, "NotFound", "daemonsets.apps \"npl-agent-gone\" not found");
        server.next_request().await.answer(404, &missing);
        // After all Nodes of `npl-agent` are retired, only `npl-agent-edge` is read.
        for (path, numbers) in [(PATH, [3, 3, 3]), (GROUP_PATH, [2, 2, 1]), (GROUP_PATH, [2, 2, 2])] {
            let get = server.next_request().await;
            assert_eq!(get.line, format!("GET {path}"));
            get.answer(200, daemon_set(2, 2, numbers));
        }
    })
    .await;
    assert!(result.is_ok(), "{result:?}");
    assert_eq!(reported, ["0 of 5 Nodes are retired", "4 of 5 Nodes are retired", "5 of 5 Nodes are retired"]);
}

#[tokio::test(start_paused = true)]
async fn without_the_daemon_set_there_is_nothing_to_retire() {
    let missing = refusal(404, "NotFound", "daemonsets.apps \"npl-agent\" not found");
    let (result, reported) =
        retired(async |server: &mut MockServer| server.next_request().await.answer(404, &missing)).await;
    assert!(result.is_ok() && reported.is_empty(), "{result:?}");
}

#[tokio::test(start_paused = true)]
async fn a_restarting_api_server_is_waited_for_and_a_refusal_is_final() {
    let denied = refusal(403, "Forbidden", "daemonsets.apps \"npl-agent\" is forbidden");
    let (result, _) = retired(async |server: &mut MockServer| {
        server.next_request().await.break_connection();
        server.next_request().await.answer(503, "");
        server.next_request().await.answer(403, &denied);
    })
    .await;
    let text = result.unwrap_err().to_string();
    assert!(text.contains("patch DaemonSet npl-agent") && text.contains("is forbidden"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_never_ready_ends_the_command_with_the_numbers() {
    let (result, _) = retired(async |server: &mut MockServer| {
        for _ in 0..20 {
            server.next_request().await.answer(200, daemon_set(2, 2, [5, 5, 4]));
        }
    })
    .await;
    assert!(result.unwrap_err().to_string().starts_with("4 of 5 Nodes are retired after 20s"));
}
