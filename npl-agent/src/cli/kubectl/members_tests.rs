// SPDX-License-Identifier: Apache-2.0

use serde_json::json;

use super::*;
use crate::{config::kubectl_args::ServiceName, core::members::ServiceMembers};

fn pod(name: &str, ready: &str, env: &Value) -> Value {
    json!({ "metadata": { "name": name },
            "spec": { "nodeName": "node-1", "containers": [{ "env": env,
                      "ports": [{ "name": "xds", "containerPort": 18000 }, { "name": "http", "containerPort": 8081 }] }] },
            "status": { "conditions": [{ "type": "Ready", "status": ready }] } })
}

fn body(version: &str) -> Value {
    let member = |port: u16, ready: bool, draining: bool| {
        json!({ "address": "192.0.2.10", "family": "IPv4", "port": port, "pod": format!("web-{port}"), "node": "node-1", "zone": "west",
                "ready": ready, "draining": draining, "weight": 1 })
    };
    let names = json!({ "xds": "web.shop:http", "dns": "_http._tcp.web.shop.npl.internal",
                        "http": "/v1/members/shop/web/http" });
    json!({ "version": version, "ports": [{ "namespace": "shop", "service": "web", "port": 80, "name": "http",
            "protocol": "tcp", "version": version, "names": names,
            "members": [member(61000, true, false), member(61001, false, true), member(61002, false, false)] }] })
}

fn members(version: &str) -> ReplicaAnswer {
    ReplicaAnswer::Members(serde_json::from_value::<ServiceMembers>(body(version)).unwrap())
}

fn report_of(port: Option<&str>, answers: &[ReplicaAnswer]) -> anyhow::Result<Report> {
    let service = ServiceName { name: "web".to_owned(), port: port.map(str::to_owned) };
    let args = MembersArgs { service, namespace: None, settle: std::time::Duration::ZERO, output: OutputFormat::Table };
    let names = (0..answers.len()).map(|number| format!("npl-feed-{number}"));
    let replicas: Vec<Replica> = { names }.filter_map(|name| replica(&pod(&name, "True", &json!([])))).collect();
    let mut by_pod = replicas.iter().map(|it| it.pod.clone()).zip(answers.iter().cloned()).collect();
    report("shop", &args, &replicas, &mut by_pod)
}

#[test]
fn a_replica_is_asked_at_its_port_and_by_tls_if_it_has_a_certificate() {
    let plain = replica(&pod("npl-feed-a", "True", &json!([]))).unwrap();
    assert_eq!((plain.proxied.as_str(), plain.is_ready), ("npl-feed-a:8081", true));
    let tls = replica(&pod("npl-feed-a", "False", &json!([{ "name": "NPL_FEED_TLS_CERT" }]))).unwrap();
    assert_eq!((tls.proxied.as_str(), tls.is_ready), ("https:npl-feed-a:8081", false));
    assert_eq!((plain.obstacle(), tls.obstacle()), (None, Some("the replica is not ready")));
    let mut deleted = pod("npl-feed-a", "True", &json!([]));
    deleted["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    assert_eq!(replica(&deleted), None);
}

/// The API server's proxy has no client certificate: a request would fail with the API server's TLS error.
#[test]
fn a_replica_that_requires_a_client_certificate_is_not_asked() {
    let variables = json!([{ "name": "NPL_FEED_TLS_CERT" }, { "name": "NPL_FEED_TLS_CLIENT_CA" }]);
    let mut by_flag = pod("npl-feed-b", "True", &json!([]));
    by_flag["spec"]["containers"][0]["args"] = json!(["--tls-cert=a.pem", "--tls-client-ca=b.pem"]);
    for replica in [replica(&pod("npl-feed-a", "True", &variables)), replica(&by_flag)].map(Option::unwrap) {
        assert!(replica.proxied.starts_with("https:"), "{replica:?}");
        assert!(replica.obstacle().is_some_and(|text| text.contains("requires a client certificate")), "{replica:?}");
    }
}

#[test]
fn errors_of_kubectl_are_told_apart() {
    let failed = |text: &str| answer(Err(anyhow::anyhow!("`kubectl get --raw …`: {text}")));
    assert_eq!(answer(Ok(body("a").to_string())), members("a"));
    let unknown = "Error from server (NotFound): the server could not find the requested resource";
    assert_eq!(failed(unknown), ReplicaAnswer::Unknown);
    assert!(matches!(failed("Error from server (NotFound): pods \"npl-feed-a\" not found"), ReplicaAnswer::Failed(_)));
    let token = failed(
        "error: You must be logged in to the server (the server has asked for the client to provide credentials)",
    );
    assert!(matches!(token, ReplicaAnswer::Failed(text) if text.contains("requires a bearer token")));
    assert!(matches!(answer(Ok("<html>".to_owned())), ReplicaAnswer::Failed(_)));
}

#[test]
fn equal_replicas_are_summed_up_in_a_sentence() {
    let report = report_of(None, &[members("0123456789abcdef"), members("0123456789abcdef")]).unwrap();
    let text = as_text(&report, false);
    for words in [
        "http (80)",
        "192.0.2.10:61000",
        "web.shop:http",
        "_http._tcp.web.shop.npl.internal",
        "/v1/members/shop/web/http",
        "draining",
        "not ready",
        "Replicas of the feed: 2, all with version 0123456789ab.",
    ] {
        assert!(text.contains(words), "`{words}` is missing from\n{text}");
    }
    assert!(as_text(&report, true).contains("npl-feed-1"), "the wide form lists the replicas");
    assert_eq!(exit_code(&report), 0);
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["ports"][0]["members"], body("")["ports"][0]["members"], "the JSON output has all fields");
}

#[test]
fn replicas_that_differ_or_do_not_answer_are_listed() {
    let differ = report_of(None, &[members("a"), members("b")]).unwrap();
    assert!(as_text(&differ, false).contains("The replicas differ."));
    assert_eq!(exit_code(&differ), 1);
    let silent = report_of(None, &[ReplicaAnswer::Failed("no route".to_owned()), members("b")]).unwrap();
    assert!(as_text(&silent, false).contains("no route"));
    assert_eq!((silent.ports.len(), exit_code(&silent)), (1, 2));
}

#[test]
fn what_the_feed_does_not_serve_is_said_in_a_sentence() {
    let error = |port, answers: &[ReplicaAnswer]| report_of(port, answers).unwrap_err().to_string();
    let unknown = error(None, &[ReplicaAnswer::Unknown, ReplicaAnswer::Unknown]);
    assert!(unknown.contains("serves no Service shop/web: `kubectl npl why service/shop/web`"), "{unknown}");
    let silent = error(None, &[ReplicaAnswer::Failed("no route".to_owned()), ReplicaAnswer::Unknown]);
    assert!(silent.contains("npl-feed-0: no route"), "{silent}");
    let other = error(Some("grpc"), &[members("a")]);
    assert!(other.contains("has no port grpc; its ports are http (80)"), "{other}");
    assert_eq!(report_of(Some("80"), &[members("a")]).unwrap().ports.len(), 1);
}
