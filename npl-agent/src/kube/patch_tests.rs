// SPDX-License-Identifier: Apache-2.0

use serde_json::json;

use super::*;
use crate::{
    kube::mock::{MockServer, ReceivedRequest, api_server, metrics, refusal},
    metrics::Format,
};

const LINE: &str = "PATCH /api/v1/namespaces/default/pods/web-0/status?&fieldManager=npl-agent";

/// Applies a write to a Pod, with `server` as the API server. Returns the result of the write, and the metrics.
async fn annotate(
    write: PodWrite,
    server: impl AsyncFnOnce(&mut MockServer),
) -> (Result<Patched, PatchError>, Metrics) {
    let (client, mut mock) = api_server();
    let metrics = metrics();
    let patcher = PodPatcher::new(client, AnnotationKeys::new("nodeportlocal.antrea.io"), metrics.clone());
    let (pod, uid) = (PodKey::new("default", "web-0"), PodUid("u-1".into()));
    let (result, ()) = tokio::join!(patcher.write(&pod, &uid, &write), server(&mut mock));
    drop(patcher);
    mock.expect_end().await;
    (result, metrics)
}

fn set() -> PodWrite {
    PodWrite::Set("[{}]".to_owned())
}

fn answer_with_annotation(request: ReceivedRequest, version: u64, annotations: &Value) {
    let metadata = json!({
        "name": "web-0", "namespace": "default", "uid": "u-1", "resourceVersion": version.to_string(),
        "annotations": annotations,
    });
    request.answer(200, json!({ "kind": "Pod", "apiVersion": "v1", "metadata": metadata }).to_string());
}

async fn failed(status: u16, headers: &[(&str, &str)], body: impl Into<String>) -> PatchError {
    let server = async |mock: &mut MockServer| mock.next_request().await.answer_with_headers(status, headers, body);
    annotate(set(), server).await.0.unwrap_err()
}

#[tokio::test(start_paused = true)]
async fn an_annotation_is_set_by_one_merge_patch_of_the_status() {
    let server = async |mock: &mut MockServer| {
        let request = mock.next_request().await;
        assert_eq!(request.line, LINE);
        assert_eq!(request.content_type, "application/merge-patch+json");
        let expected = json!({ "metadata": { "uid": "u-1", "annotations": { "nodeportlocal.antrea.io": "[{}]" } } });
        assert_eq!(request.body, expected);
        answer_with_annotation(request, 18, &json!({ "nodeportlocal.antrea.io": "[{}]" }));
    };
    let (result, metrics) = annotate(set(), server).await;
    let pod = result.unwrap().pod;
    assert_eq!((pod.resource_version, pod.annotation.as_deref()), (18, Some("[{}]")));
    let text = metrics.encode(Format::OpenMetrics).unwrap();
    assert!(text.contains(r#"npl_annotation_patches_total{outcome="patched"} 1"#), "{text}");
}

#[tokio::test(start_paused = true)]
async fn withdrawing_empties_the_list_before_it_removes_the_annotation() {
    let server = async |mock: &mut MockServer| {
        for (version, value) in [(18, json!("[]")), (19, Value::Null)] {
            let request = mock.next_request().await;
            assert_eq!(request.line, LINE);
            let expected = json!({ "metadata": { "uid": "u-1", "annotations": { "nodeportlocal.antrea.io": value } } });
            assert_eq!(request.body, expected);
            answer_with_annotation(request, version, &json!({}));
        }
    };
    let (result, _) = annotate(PodWrite::Withdraw, server).await;
    let pod = result.unwrap().pod;
    assert_eq!((pod.resource_version, pod.annotation), (19, None));
}

#[tokio::test(start_paused = true)]
async fn a_readiness_gate_is_opened_by_a_patch_that_keeps_other_conditions() {
    let server = async |mock: &mut MockServer| {
        let request = mock.next_request().await;
        assert_eq!(request.line, LINE);
        assert_eq!(request.content_type, "application/strategic-merge-patch+json");
        assert_eq!(request.body["metadata"], json!({ "uid": "u-1" }));
        let conditions = request.body.pointer("/status/conditions").and_then(Value::as_array).unwrap();
        assert_eq!(conditions.len(), 1);
        let parts = ["type", "status", "reason"].map(|field| conditions[0][field].as_str().unwrap());
        assert_eq!(parts, ["nodeportlocal.antrea.io/published", "True", "NoNodePorts"]);
        answer_with_annotation(request, 20, &json!({}));
    };
    let (result, _) = annotate(PodWrite::OpenGate(GateReason::NoNodePorts), server).await;
    assert_eq!(result.unwrap().pod.resource_version, 20);
}

#[tokio::test(start_paused = true)]
async fn the_annotation_is_kept_if_emptying_its_list_fails() {
    let server = async |mock: &mut MockServer| mock.next_request().await.answer(503, "");
    let (result, _) = annotate(PodWrite::Withdraw, server).await;
    assert_eq!(result.unwrap_err().class(), Class::Retry { after: None });
}

#[tokio::test(start_paused = true)]
async fn a_deleted_or_recreated_pod_is_not_patched() {
    assert_eq!(failed(404, &[], refusal(404, "NotFound", "pods \"web-0\" not found")).await.class(), Class::Gone);
    let causes = json!([{ "field": "metadata.uid", "message": "field is immutable" }]);
    let other_uid = json!({ "kind": "Status", "reason": "Invalid", "details": { "causes": causes } });
    assert_eq!(failed(422, &[], other_uid.to_string()).await.class(), Class::Gone);
    let precondition = refusal(409, "Conflict", "Precondition failed: UID in precondition: u-1");
    assert_eq!(failed(409, &[], precondition).await.class(), Class::Gone);
}

#[tokio::test(start_paused = true)]
async fn a_404_of_a_proxy_does_not_mean_that_the_pod_is_gone() {
    let other_reason = refusal(404, "", "no such upstream");
    for body in ["", "404 page not found", "<html>", &other_reason] {
        let err = failed(404, &[], body).await;
        assert!(matches!(err.class(), Class::Retry { .. }), "{body:?}: {err}");
        assert!(err.to_string().contains("proxy"), "{err}");
    }
}

#[tokio::test(start_paused = true)]
async fn other_refusals_are_retried_slowly() {
    for code in [401, 403, 400, 422] {
        let err = failed(code, &[], refusal(code, "", "policy: the UID must not be annotated")).await;
        assert_eq!(err.class(), Class::Denied, "{code}");
        assert!(err.to_string().starts_with("patch pod default/web-0: the API server "), "{err}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_overloaded_api_server_is_retried_after_its_retry_after_header() {
    let after = |seconds| Class::Retry { after: Some(Duration::from_secs(seconds)) };
    assert_eq!(failed(429, &[("Retry-After", "7")], "too many").await.class(), after(7));
    assert_eq!(failed(503, &[("Retry-After", "99999")], "").await.class(), after(60));
    assert_eq!(failed(500, &[("Retry-After", "soon")], "").await.class(), Class::Retry { after: None });
    assert_eq!(failed(409, &[], refusal(409, "Conflict", "try again")).await.class(), Class::Retry { after: None });
}

#[tokio::test(start_paused = true)]
async fn a_patch_on_a_broken_connection_is_retried() {
    let server = async |mock: &mut MockServer| mock.next_request().await.break_connection();
    let (result, metrics) = annotate(set(), server).await;
    assert_eq!(result.unwrap_err().class(), Class::Retry { after: None });
    assert!(
        metrics
            .encode(Format::OpenMetrics)
            .unwrap()
            .contains(r#"npl_annotation_patches_total{outcome="unreachable"} 1"#)
    );
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_not_a_pod_is_an_error() {
    for body in ["", "<html>", "{}", "[]"] {
        let err = failed(200, &[], body).await;
        assert!(matches!(err, PatchError::Malformed { .. }), "{body:?}: {err}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_patch_without_an_answer_fails_at_its_deadline() {
    let (client, mut mock) = api_server();
    let patcher = PodPatcher::new(client, AnnotationKeys::new("nodeportlocal.antrea.io"), metrics());
    let (pod, uid) = (PodKey::new("default", "web-0"), PodUid("u-1".into()));
    let started = Instant::now();
    let write = set();
    let (result, _held) =
        tokio::join!(patcher.write(&pod, &uid, &write), async { mock.next_request().await.keep_waiting() });
    assert!(matches!(result, Err(PatchError::TimedOut { .. })), "{result:?}");
    assert_eq!(started.elapsed().as_secs(), DEADLINE.as_secs());
}

#[tokio::test(start_paused = true)]
async fn patches_of_all_pods_are_sent_at_once_and_an_endless_series_is_limited() {
    let (client, mut mock) = api_server();
    let patcher = PodPatcher::new(client, AnnotationKeys::new("nodeportlocal.antrea.io"), metrics());
    let (pod, uid, write) = (PodKey::new("default", "web-0"), PodUid("u-1".into()), set());
    let mut seconds = [0.0; 2];
    for (count, seconds) in [BURST, 3 * PER_SECOND].into_iter().zip(&mut seconds) {
        let started = Instant::now();
        for _ in 0..count {
            let answer = async { answer_with_annotation(mock.next_request().await, 18, &json!({})) };
            let (result, ()) = tokio::join!(patcher.write(&pod, &uid, &write), answer);
            result.unwrap();
        }
        *seconds = started.elapsed().as_secs_f64();
    }
    assert!(seconds[0] < 0.1 && (2.9..3.1).contains(&seconds[1]), "{seconds:?}");
}
