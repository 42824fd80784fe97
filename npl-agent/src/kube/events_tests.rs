// SPDX-License-Identifier: Apache-2.0

use serde_json::{Value, json};
use tokio::sync::watch;

use super::*;
use crate::{
    core::{
        model::{Family, ObjectKey, PodPort, PodUid, Protocol, ServiceUid},
        publish::problem::Cause,
    },
    kube::mock::{MockServer, ReceivedRequest, api_server, metrics, refusal},
    metrics::Format,
};

const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/shop/events";

fn exhausted(pod: &str) -> Problem {
    let cause = Cause::RangeExhausted { pod_port: PodPort(80), protocol: Protocol::Tcp, family: Family::V4 };
    Problem { subject: AffectedObject::Pod(ObjectKey::new("shop", pod), PodUid("u-1".into())), cause }
}

fn unsupported() -> Problem {
    let subject = AffectedObject::Service(ObjectKey::new("shop", "web"), ServiceUid("u-2".into()));
    Problem { subject, cause: Cause::UnsupportedProtocol { protocol: Protocol::Sctp } }
}

/// Runs a recorder of Events on these problems, with `server` as the API server, and returns the recorder's metrics.
async fn recording(problems: Vec<Problem>, server: impl AsyncFnOnce(&mut MockServer)) -> Metrics {
    let (client, mut mock) = api_server();
    let metrics = metrics();
    let (sender, receiver) = watch::channel(Vec::new());
    let recorder = Recorder::new(client, "node-1", metrics.clone());
    let ((), ()) = tokio::join!(recorder.run(receiver), async {
        sender.send_replace(problems);
        server(&mut mock).await;
        drop(sender);
    });
    mock.expect_end().await;
    metrics
}

fn confirm(request: ReceivedRequest) {
    let body = request.body.clone();
    request.answer(200, body.to_string());
}

fn event(series: &Value) -> String {
    json!({ "metadata": { "name": "x", "namespace": "shop" }, "eventTime": null, "series": series }).to_string()
}

fn counts(metrics: &Metrics, outcome: &str) -> bool {
    let line = format!(r#"npl_events_total{{outcome="{outcome}"}} 1"#);
    metrics.encode(Format::OpenMetrics).unwrap().lines().any(|found| found == line)
}

#[tokio::test(start_paused = true)]
async fn a_problem_becomes_an_event_on_the_affected_object() {
    let metrics = recording(vec![exhausted("web-0")], async |server| {
        let request = server.next_request().await;
        assert_eq!(request.line, format!("POST {EVENTS}?"));
        let regarding =
            json!({ "apiVersion": "v1", "kind": "Pod", "namespace": "shop", "name": "web-0", "uid": "u-1" });
        assert_eq!(request.body["regarding"], regarding);
        assert_eq!(request.body["reason"], "PortRangeExhausted");
        assert_eq!(request.body["type"], "Warning");
        assert_eq!(
            request.body["note"],
            "no IPv4 node port is free for pod port 80/tcp: widen the agent's --port-range; see \
             https://github.com/npl-project/npl/blob/main/docs/reference/events.md#portrangeexhausted"
        );
        assert_eq!(request.body["reportingController"], "npl-agent");
        assert_eq!(request.body["reportingInstance"], "node-1");
        assert!(request.body["metadata"]["name"].as_str().unwrap().starts_with("web-0."));
        assert!(request.body["eventTime"].is_string() && request.body["action"].is_string(), "{}", request.body);
        confirm(request);
    })
    .await;
    assert!(counts(&metrics, "created"));
}

#[tokio::test(start_paused = true)]
async fn the_count_of_an_existing_event_is_raised_without_read_permission() {
    for (series, expected) in
        [(Value::Null, 2), (json!({ "count": 7, "lastObservedTime": "2026-01-02T03:04:05.000006Z" }), 8)]
    {
        let metrics = recording(vec![unsupported()], async |server| {
            let request = server.next_request().await;
            assert_eq!(request.body["regarding"]["kind"], "Service");
            let name = request.body["metadata"]["name"].as_str().unwrap().to_owned();
            request.answer(409, refusal(409, "AlreadyExists", "events already exists"));
            let request = server.next_request().await;
            assert_eq!((&request.line, &request.body), (&format!("PATCH {EVENTS}/{name}?"), &json!({})));
            request.answer(200, event(&series));
            let request = server.next_request().await;
            assert_eq!(request.body["series"]["count"], expected);
            assert!(request.body["series"]["lastObservedTime"].is_string());
            request.answer(200, event(&Value::Null));
        })
        .await;
        assert!(counts(&metrics, "repeated"));
    }
}

/// The agent of another Node has created the Event of the Service a moment ago, or incremented its count.
#[tokio::test(start_paused = true)]
async fn the_recent_event_of_another_node_is_not_written() {
    let now = || MicroTime(wall_clock());
    for known in [
        json!({ "metadata": { "name": "x" }, "eventTime": now() }),
        json!({ "metadata": { "name": "x" }, "eventTime": "2026-01-02T03:04:05.000006Z",
                "series": { "count": 7, "lastObservedTime": now() } }),
    ] {
        let metrics = recording(vec![unsupported()], async |server| {
            server.next_request().await.answer(409, refusal(409, "AlreadyExists", "events already exists"));
            let request = server.next_request().await;
            assert_eq!(request.body, json!({}));
            request.answer(200, known.to_string());
        })
        .await;
        assert!(counts(&metrics, "shared"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_event_is_sent_again_a_minute_later() {
    let metrics = recording(vec![exhausted("web-0")], async |server| {
        server.next_request().await.answer(403, refusal(403, "Forbidden", "events is forbidden"));
        let refused = Instant::now();
        confirm(server.next_request().await);
        assert_eq!(refused.elapsed().as_secs(), 60);
    })
    .await;
    assert!(counts(&metrics, "denied") && counts(&metrics, "created"));
}

#[tokio::test(start_paused = true)]
async fn a_terminating_namespace_needs_no_event() {
    let causes = json!([{ "reason": "NamespaceTerminating", "field": "metadata.namespace" }]);
    let body = json!({ "kind": "Status", "code": 403, "reason": "Forbidden", "details": { "causes": causes } });
    let metrics = recording(vec![exhausted("web-0")], async |server| {
        server.next_request().await.answer(403, body.to_string());
    })
    .await;
    assert!(counts(&metrics, "gone"));
}

#[tokio::test(start_paused = true)]
async fn events_beyond_the_burst_are_sent_at_a_limited_rate() {
    let problems: Vec<Problem> = (0..120).map(|number| exhausted(&format!("web-{number}"))).collect();
    let started = Instant::now();
    recording(problems, async |server| {
        for _ in 0..120 {
            confirm(server.next_request().await);
        }
    })
    .await;
    let seconds = started.elapsed().as_secs();
    assert!((10..=12).contains(&seconds), "{seconds}");
}

#[test]
fn a_long_name_is_shortened_to_a_valid_name() {
    assert_eq!(shortened("web-0", 5), "web-0");
    assert_eq!(shortened("web-0", 4), "web");
    assert_eq!(shortened("a.b", 2), "a");
}

#[test]
fn a_long_text_is_cut_and_the_note_ends_with_the_whole_url() {
    let end = format!("; see {}", pages::url("docs/reference/events.md#unreadablesourcerange"));
    let room = NOTE_BYTES - end.len();
    for (text, kept) in [
        ("a".repeat(room), "a".repeat(room)),
        ("a".repeat(room + 1), format!("{}…", "a".repeat(room - 3))),
        // Each ä has 2 bytes, so a cut at a fixed number of bytes would split a character in one of these two texts.
        (format!("b{}", "ä".repeat(room)), format!("b{}…", "ä".repeat((room - 4) / 2))),
        ("ä".repeat(room), format!("{}…", "ä".repeat((room - 3) / 2))),
    ] {
        let subject = AffectedObject::Service(ObjectKey::new("shop", "web"), ServiceUid("u-2".into()));
        let note = note_with_page(&Report { subject, reason: "UnreadableSourceRange", note: text });
        assert_eq!(note, format!("{kept}{end}"));
        assert!(note.len() <= 1024, "{}", note.len());
    }
}
