// SPDX-License-Identifier: Apache-2.0
//! Tests watches that receive their first objects by a streaming list.

use tracing::Level;

use super::*;
use crate::{kube::mock::end_of_initial_events as end, process::telemetry::tests::Written};

fn added(name: &str, version: u64) -> Value {
    json!({ "type": "ADDED", "object": pod(name, version) })
}

fn watching_pods() -> Scene {
    watching::<PodObject>(Some("spec.nodeName=worker-1"))
}

/// Waits for the request for a streaming list, and answers with these events.
async fn stream(scene: &mut Scene, initial: &[Value]) {
    let request = scene.server.next_request().await;
    assert_eq!(request.line, STREAMED_PODS);
    events(request, initial);
}

/// Waits for the request for a list of the Pods, and answers with these Pods.
async fn listed(scene: &mut Scene, pods: &[Value]) {
    let request = scene.server.next_request().await;
    assert_eq!(request.line, "GET /api/v1/pods?&fieldSelector=spec.nodeName%3Dworker-1");
    list(request, pods);
}

#[tokio::test(start_paused = true)]
async fn a_streaming_list_is_one_change_and_its_watch_continues() {
    let mut scene = watching_pods();
    let initial = [added("a", 1), added("b", 2), json!({ "type": "DELETED", "object": pod("b", 9) }), end("10")];
    let later = [added("c", 11), json!({ "type": "DELETED", "object": pod("a", 12) })];
    stream(&mut scene, &[&initial[..], &later[..]].concat()).await;
    assert_eq!(names(&scene.change().await), ["list a"]);
    assert_eq!(names(&scene.change().await), ["set c"]);
    assert_eq!(names(&scene.change().await), ["gone a a"]);
    // The next watch begins after the last event, without another list.
    newest(scene.server.next_request().await, 12);
    let next = scene.server.next_request().await;
    assert!(next.line.ends_with("&resourceVersion=12") && !next.line.contains("sendInitialEvents"), "{}", next.line);
}

#[tokio::test(start_paused = true)]
async fn an_incomplete_streaming_list_is_discarded() {
    let mut scene = watching_pods();
    stream(&mut scene, &[added("a", 1)]).await;
    // Pods that the interrupted streaming list has not sent are in the first change, so they do not count as deleted.
    listed(&mut scene, &[pod("a", 1), pod("b", 2)]).await;
    assert_eq!(names(&scene.change().await), ["list a", "list b"]);
    assert!(scene.counts(r#"npl_watch_errors_total{subject="pods",kind="unreachable"} 1"#));
    // The API server may support streaming lists, so the agent requests a streaming list again after the watch's
    // resource version has expired.
    let status = json!({ "kind": "Status", "status": "Failure", "code": 410, "reason": "Expired" });
    events(scene.server.next_request().await, &[json!({ "type": "ERROR", "object": status })]);
    stream(&mut scene, &[added("c", 20), end("20")]).await;
    assert_eq!(names(&scene.change().await), ["list c"]);
}

#[tokio::test(start_paused = true)]
async fn an_api_server_without_streaming_lists_receives_one_request_for_them() {
    let mut scene = watching_pods();
    let started = Instant::now();
    let refused = scene.server.next_request().await;
    assert_eq!(refused.line, STREAMED_PODS);
    refused.answer(422, refusal(422, "Invalid", "sendInitialEvents: Forbidden"));
    listed(&mut scene, &[pod("a", 1)]).await;
    assert_eq!(names(&scene.change().await), ["list a"]);
    assert_eq!(started.elapsed(), Duration::ZERO, "the list must not be delayed");
    assert!(!scene.metrics.encode(Format::OpenMetrics).unwrap().contains(r#"npl_watch_errors_total{subject="pods""#));
    scene.server.next_request().await.answer(410, refusal(410, "Expired", "too old resource version"));
    listed(&mut scene, &[pod("b", 20)]).await;
    assert_eq!(names(&scene.change().await), ["list b"]);
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_ignores_the_parameters_of_a_streaming_list_is_noticed() {
    // An old API server sends all Pods, and later a bookmark without the annotation.
    let mut scene = watching_pods();
    stream(&mut scene, &[added("a", 1), bookmark("5", &json!({}))]).await;
    listed(&mut scene, &[pod("a", 1), pod("b", 2)]).await;
    assert_eq!(names(&scene.change().await), ["list a", "list b"]);

    // Without a bookmark, the agent waits for a limited time.
    let mut scene = watching_pods();
    let opened = open_watch(scene.server.next_request().await, &added("a", 1));
    listed(&mut scene, &[pod("a", 1), pod("b", 2)]).await;
    assert!(opened.elapsed() <= Duration::from_secs(30), "{:?}", opened.elapsed());
    assert_eq!(names(&scene.change().await), ["list a", "list b"]);
}

/// Answers the next request, which must be for a streaming list, that there are too many requests. Returns the time of
/// the answer.
async fn throttle(scene: &mut Scene, seconds: &str) -> Instant {
    let request = scene.server.next_request().await;
    assert_eq!(request.line, STREAMED_PODS);
    request.answer_with_headers(429, &[("retry-after", seconds)], "Too many requests, please try again later.");
    Instant::now()
}

#[tokio::test(start_paused = true)]
async fn a_streaming_list_that_is_throttled_is_requested_again_after_the_requested_time() {
    let mut scene = watching_pods();
    let answered = throttle(&mut scene, "25").await;
    stream(&mut scene, &[added("a", 1), end("10")]).await;
    assert!(answered.elapsed() >= Duration::from_secs(25), "{:?}", answered.elapsed());
    assert_eq!(names(&scene.change().await), ["list a"]);
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_throttles_every_streaming_list_is_asked_for_a_list() {
    let mut scene = watching_pods();
    for _ in 0..STREAMING_ATTEMPTS {
        throttle(&mut scene, "1").await;
    }
    listed(&mut scene, &[pod("a", 1)]).await;
    assert_eq!(names(&scene.change().await), ["list a"]);
}

/// The API server sends this error as an event of the accepted watch.
#[tokio::test(start_paused = true)]
async fn an_outdated_watch_cache_leads_to_a_list_without_a_warning() {
    let written = Written::default();
    let writer = written.clone();
    let log = tracing_subscriber::fmt().with_max_level(Level::WARN).with_writer(move || writer.clone()).finish();
    let _guard = tracing::subscriber::set_default(log);
    let mut scene = watching_pods();
    let details = json!({ "retryAfterSeconds": 1, "causes": [{ "reason": "ResourceVersionTooLarge" }] });
    let status = json!({ "kind": "Status", "status": "Failure", "code": 504, "reason": "Timeout",
                         "message": "Too large resource version: 20, current: 10", "details": details });
    let answered = Instant::now();
    stream(&mut scene, &[json!({ "type": "ERROR", "object": status })]).await;
    listed(&mut scene, &[pod("a", 1)]).await;
    assert!((1..=2).contains(&answered.elapsed().as_secs()), "{:?}", answered.elapsed());
    assert_eq!(names(&scene.change().await), ["list a"]);
    assert!(scene.counts(r#"npl_watch_errors_total{subject="pods",kind="unavailable"} 1"#));
    assert_eq!(written.text(), "");
}

#[tokio::test(start_paused = true)]
async fn a_restored_store_is_listed_without_a_streaming_list() {
    let mut scene = watching_pods();
    stream(&mut scene, &[added("a", 7), end("250")]).await;
    assert_eq!(names(&scene.change().await), ["list a"]);
    newest(scene.server.next_request().await, 60);
    listed(&mut scene, &[pod("c", 61)]).await;
    assert_eq!(scene.change().await, Change::StoreRestored);
    assert_eq!(names(&scene.change().await), ["list c"]);
    // The watch cache of an API server that was not restarted has no events after version 61, and still contains Pod
    // `a`.
    scene.server.next_request().await.answer(410, refusal(410, "Expired", "too old resource version: 61 (250)"));
    listed(&mut scene, &[pod("d", 62)]).await;
    assert_eq!(names(&scene.change().await), ["list d"]);
}

#[tokio::test(start_paused = true)]
async fn a_streaming_list_without_the_bookmark_that_is_due_is_replaced() {
    let mut scene = watching_pods();
    let opened = open_watch(scene.server.next_request().await, &end("10"));
    assert_eq!(names(&scene.change().await), [""; 0]);
    newest(scene.server.next_request().await, 10);
    assert!((76..=100).contains(&opened.elapsed().as_secs()), "{:?}", opened.elapsed());
}
