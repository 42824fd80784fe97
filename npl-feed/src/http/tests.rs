// SPDX-License-Identifier: Apache-2.0

use std::{collections::BTreeSet, time::Duration};

use axum::body::to_bytes;
use boon::{Compiler, Schemas};
use serde_json::{Value, json};
use tokio::{sync::watch, time::timeout};
use tower::ServiceExt as _;

use super::*;
use crate::{
    core::{
        model::{Change, Pod},
        state::State as Cluster,
        tests::{annotation, cluster, pod, service},
    },
    follow::Publisher,
};

struct Scene {
    router: Router,
    publisher: Publisher,
    cluster: Cluster,
    status: Arc<Status>,
}

fn pods() -> Vec<Pod> {
    let mut pods = vec![
        pod("a", "n1", &annotation(8080, "192.0.2.1", 61000)),
        pod("b", "n2", &annotation(8080, "192.0.2.2", 61000)),
        pod("c", "n2", &annotation(8080, "192.0.2.2", 61001)),
    ];
    pods[1].is_ready = false;
    pods[2].object.is_terminating = true;
    pods
}

impl Scene {
    fn new(token: Option<&str>) -> Self {
        Self::with(Interfaces { xds: true, zone: Some("npl.internal.".parse().unwrap()) }, token)
    }

    fn with(interfaces: Interfaces, token: Option<&str>) -> Self {
        let (publisher, published) = watch::channel(None);
        let status = Arc::new(Status::default());
        let router = router(published, Arc::clone(&status), interfaces, token.map(Token::fixed));
        let mut scene = Self { router, publisher, cluster: cluster(pods()), status };
        scene.publish();
        scene
    }

    fn publish(&mut self) {
        let snapshot = self.cluster.refresh().unwrap();
        self.publisher.send_replace(Some(Arc::new(snapshot)));
    }

    fn ready_b(&mut self) {
        let mut changed = pods().remove(1);
        changed.is_ready = true;
        self.cluster.apply(Change::Pod(Box::new(changed)), 0);
        self.publish();
    }

    async fn send(&self, request: Request) -> Response {
        timeout(Duration::from_mins(1), self.router.clone().oneshot(request)).await.unwrap().unwrap()
    }

    async fn get(&self, path: &str) -> Response {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }

    async fn json(&self, path: &str) -> Value {
        let response = self.get(path).await;
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        serde_json::from_str(&text(response).await).unwrap()
    }
}

async fn text(response: Response) -> String {
    String::from_utf8(to_bytes(response.into_body(), usize::MAX).await.unwrap().to_vec()).unwrap()
}

fn header_of(response: &Response, name: &str) -> String {
    response.headers()[name].to_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_port_has_its_members_with_their_state() {
    let body = Scene::new(None).json("/v1/members/default/web/http").await;
    assert_eq!((&body["service"], &body["port"], &body["name"]), (&json!("web"), &json!(80), &json!("http")));
    let first = json!({ "address": "192.0.2.1", "family": "IPv4", "port": 61000, "pod": "a", "node": "n1", "zone": "west",
                        "ready": true, "draining": false, "weight": 1 });
    assert_eq!(body["members"][0], first);
    let states: Vec<_> = body["members"].as_array().unwrap().iter().map(|it| (&it["ready"], &it["draining"])).collect();
    let (yes, no) = (json!(true), json!(false));
    assert_eq!(states, [(&yes, &no), (&no, &no), (&no, &yes)]);
}

#[tokio::test]
async fn the_members_of_a_service_have_names_in_each_interface() {
    let body = Scene::new(None).json("/v1/members/default/web").await;
    let read: npl_agent::core::members::ServiceMembers = serde_json::from_value(body).unwrap();
    let names = &read.ports[0].names;
    assert_eq!(names.xds.as_deref(), Some("web.default:http"));
    assert_eq!(names.dns.as_deref(), Some("_http._tcp.web.default.npl.internal"));
    let scene = Scene::new(None);
    assert_eq!(scene.json(&names.http).await["members"].as_array().unwrap().len(), read.ports[0].members.len());
}

/// Sends a request for a path of the description that causes an answer with this status code.
async fn provoke(path: &str, status: &str) -> Response {
    let existing = existing(path);
    let scene = Scene::new((status == "401").then_some("secret"));
    match status {
        "200" | "401" => scene.get(&existing).await,
        "304" => {
            let etag = header_of(&scene.get(&existing).await, "etag");
            scene.send(Request::get(existing).header("if-none-match", etag).body(Body::empty()).unwrap()).await
        }
        "400" => scene.get(&format!("{existing}?wait=soon")).await,
        "403" => {
            let router = probes(scene.publisher.subscribe(), Arc::default());
            router.oneshot(Request::get(existing).body(Body::empty()).unwrap()).await.unwrap()
        }
        "404" => scene.get(&existing.replace("web", "none")).await,
        "503" => {
            scene.publisher.send_replace(None);
            scene.get(&existing).await
        }
        _ => panic!("{path}: this test cannot provoke an answer with the status code {status}"),
    }
}

/// If a part of the description is a reference, returns the part to which the reference points; otherwise returns the
/// part itself.
fn resolved<'a>(description: &'a Value, part: &'a Value) -> &'a Value {
    let place = part["$ref"].as_str().map(|reference| reference.trim_start_matches('#'));
    place.map_or(part, |place| description.pointer(place).unwrap())
}

/// Checks a value against a schema of the description.
fn expect_valid(description: &Value, schema: &Value, value: &Value, request: &str) {
    let mut schema = schema.clone();
    schema["components"] = description["components"].clone();
    let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
    compiler.add_resource("answer.json", schema).unwrap();
    let index = compiler.compile("answer.json", &mut schemas).unwrap();
    let valid = schemas.validate(value, index);
    assert!(valid.is_ok(), "{request}: {value}: {valid:?}");
}

/// The headers that need no description, because HTTP itself defines these headers for all answers.
const GENERAL_HEADERS: [&str; 3] = ["content-type", "content-length", "www-authenticate"];

/// Checks the headers and the body of an answer against `response`, a part of the `OpenAPI` description. The answer has
/// exactly the described headers.
async fn expect_described(description: &Value, response: &Value, answer: Response, request: &str) {
    let response = resolved(description, response);
    let mut described = BTreeSet::new();
    for (name, header) in response["headers"].as_object().into_iter().flatten() {
        let value = json!(header_of(&answer, name));
        expect_valid(description, &resolved(description, header)["schema"], &value, &format!("{request}, {name}"));
        described.insert(name.to_lowercase());
    }
    let names = answer.headers().keys().map(ToString::to_string);
    let sent: BTreeSet<String> = names.filter(|name| !GENERAL_HEADERS.contains(&name.as_str())).collect();
    assert_eq!(sent, described, "{request}");
    let Some(contents) = response["content"].as_object() else {
        return assert_eq!(text(answer).await, "", "{request}: the description has no content");
    };
    let (kind, content) = contents.iter().next().unwrap();
    assert!(header_of(&answer, "content-type").starts_with(kind.as_str()), "{request}");
    let body = text(answer).await;
    let value = if kind == "application/json" { serde_json::from_str(&body).unwrap() } else { json!(body) };
    expect_valid(description, &content["schema"], &value, request);
}

/// The schemas permit no properties that they do not name, so this test also checks that answers contain no other
/// properties.
#[tokio::test]
async fn every_answer_conforms_to_the_openapi_description() {
    let description: Value = serde_json::from_str(OPENAPI).unwrap();
    let mut seen = BTreeSet::new();
    for (path, item) in description["paths"].as_object().unwrap() {
        for (status, response) in item["get"]["responses"].as_object().unwrap() {
            let answer = provoke(path, status).await;
            assert_eq!(answer.status().as_str(), status, "{path}");
            expect_described(&description, response, answer, &format!("{path}, {status}")).await;
            seen.insert(status.as_str());
        }
    }
    assert_eq!(seen, BTreeSet::from(["200", "304", "400", "401", "403", "404", "503"]));
}

/// Returns the path of the description with names that exist.
fn existing(path: &str) -> String {
    let names = [("{name}", "web.default"), ("{namespace}", "default"), ("{service}", "web"), ("{port}", "80")];
    names.iter().fold(path.to_owned(), |path, (name, value)| path.replace(name, value))
}

#[tokio::test]
async fn head_has_the_headers_of_get_and_no_body() {
    let (description, scene): (Value, _) = (serde_json::from_str(OPENAPI).unwrap(), Scene::new(None));
    for (path, item) in description["paths"].as_object().unwrap() {
        assert!(item["head"].is_object(), "{path}");
        let head = scene.send(Request::head(existing(path)).body(Body::empty()).unwrap()).await;
        let get = scene.get(&existing(path)).await;
        // The metrics count the answers, so the two answers with metrics may have different lengths.
        let mut headers = [head.headers().clone(), get.headers().clone()];
        if path == "/metrics" {
            for headers in &mut headers {
                headers.remove("content-length");
            }
        }
        assert_eq!((head.status(), &headers[0]), (get.status(), &headers[1]), "{path}");
        assert_eq!(text(head).await, "", "{path}");
        assert_ne!(text(get).await, "", "{path}");
    }
}

#[tokio::test]
async fn other_methods_are_not_allowed() {
    let (description, scene): (Value, _) = (serde_json::from_str(OPENAPI).unwrap(), Scene::new(None));
    for path in description["paths"].as_object().unwrap().keys() {
        for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
            let request = Request::builder().method(method).uri(existing(path)).body(Body::empty()).unwrap();
            let answer = scene.send(request).await;
            assert_eq!(answer.status(), StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
            let described = &description["components"]["responses"]["MethodNotAllowed"];
            expect_described(&description, described, answer, &format!("{method} {path}")).await;
        }
    }
}

/// All error answers have the same form, including the answers to requests that axum itself rejects.
#[tokio::test]
async fn malformed_requests_are_answered_as_described() {
    let (description, scene): (Value, _) = (serde_json::from_str(OPENAPI).unwrap(), Scene::new(None));
    for (path, request) in [
        ("/v1/members", "/v1/members?wait=soon".to_owned()),
        ("/v1/members", "/v1/members?wait=1s&wait=2s".to_owned()),
        ("/v1/members", format!("/v1/members?index={}", "1".repeat(65))),
        ("/traefik", "/traefik?index=1&index=2".to_owned()),
        ("/v1/members/{namespace}/{service}", "/v1/members/%ff/web".to_owned()),
        ("/v1/members/{namespace}/{service}", format!("/v1/members/{}/web", "x".repeat(1000))),
        ("/v1/health/service/{name}", "/v1/health/service/%c0".to_owned()),
        ("/v1/health/service/{name}", "/v1/health/service/web.default?passing=maybe".to_owned()),
    ] {
        let answer = scene.get(&request).await;
        assert_eq!(answer.status(), StatusCode::BAD_REQUEST, "{request}");
        let described = &description["paths"][path]["get"]["responses"]["400"];
        expect_described(&description, described, answer, &request).await;
    }
}

/// Returns the locations in a schema at which objects may have properties that the schema does not name.
fn open_objects(schema: &Value, place: &str) -> Vec<String> {
    let is_open = schema["type"] == "object" && schema.get("additionalProperties").is_none_or(|it| *it == true);
    let own = is_open.then(|| place.to_owned());
    let parts: Vec<(String, &Value)> = match schema {
        Value::Object(fields) => fields.iter().map(|(key, part)| (key.clone(), part)).collect(),
        Value::Array(items) => items.iter().enumerate().map(|(index, part)| (index.to_string(), part)).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
    };
    own.into_iter()
        .chain(parts.into_iter().flat_map(|(key, part)| open_objects(part, &format!("{place}/{key}"))))
        .collect()
}

#[test]
fn the_schemas_of_the_description_are_closed() {
    let description: Value = serde_json::from_str(OPENAPI).unwrap();
    assert_eq!(open_objects(&description["components"]["schemas"], ""), Vec::<String>::new());
}

#[tokio::test]
async fn routes_and_description_name_the_same_paths() {
    let description: Value = serde_json::from_str(OPENAPI).unwrap();
    let described: BTreeSet<&str> = description["paths"].as_object().unwrap().keys().map(String::as_str).collect();
    let source = include_str!("mod.rs");
    // The routes are collected in a set, because the source contains the probes' paths twice: the router `probes`
    // serves them to clients outside the allow list.
    let routes: BTreeSet<&str> = source.split(".route(\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert_eq!(routes, described);
}

#[tokio::test]
async fn a_version_that_the_client_has_is_not_sent_again() {
    let mut scene = Scene::new(None);
    for path in ["/v1/members", "/v1/members/default/web", "/v1/members/default/web/80", "/traefik", "/v1/http_sd"] {
        let etag = header_of(&scene.get(path).await, "etag");
        let known = || Request::get(path).header("if-none-match", &etag).body(Body::empty()).unwrap();
        let response = scene.send(known()).await;
        assert_eq!((response.status(), header_of(&response, "etag")), (StatusCode::NOT_MODIFIED, etag.clone()));
        let other = Request::get(path).header("if-none-match", "\"0\", W/\"1\"").body(Body::empty()).unwrap();
        assert_eq!(scene.send(other).await.status(), StatusCode::OK);
    }
    for path in ["/v1/catalog/services", "/v1/health/service/web.default"] {
        let index = header_of(&scene.get(path).await, "x-consul-index");
        let any = Request::get(path).header("if-none-match", "*").body(Body::empty()).unwrap();
        let response = scene.send(any).await;
        assert_eq!((response.status(), header_of(&response, "x-consul-index")), (StatusCode::NOT_MODIFIED, index));
    }
    let etag = header_of(&scene.get("/v1/members/default/web/80").await, "etag");
    let lines =
        Request::get("/v1/members/default/web/80").header("if-none-match", "\"0\"").header("if-none-match", &etag);
    assert_eq!(scene.send(lines.body(Body::empty()).unwrap()).await.status(), StatusCode::NOT_MODIFIED);
    scene.ready_b();
    assert_ne!(header_of(&scene.get("/v1/members/default/web/80").await, "etag"), etag);
}

/// Feeds with other interfaces have other names in their answers. A client must not keep an answer of one feed because
/// another feed has the same members.
#[tokio::test]
async fn an_etag_names_the_representation() {
    let zone = |text: &str| Some(text.parse().unwrap());
    let mut etags = BTreeSet::new();
    for (xds, zone) in [(true, zone("npl.internal.")), (true, zone("example.com.")), (true, None), (false, None)] {
        let scene = Scene::with(Interfaces { xds, zone }, None);
        let response = scene.get("/v1/members").await;
        assert!(etags.insert(header_of(&response, "etag")));
        let version: Value = serde_json::from_str(&text(response).await).unwrap();
        assert_eq!(version["version"], Scene::new(None).json("/v1/members").await["version"]);
    }
    let again = Scene::new(None).get("/v1/members").await;
    assert!(etags.contains(&header_of(&again, "etag")), "replicas with the same options have the same ETag");
}

/// `If-None-Match: *` names no version, so there is no version whose change the feed could wait for.
#[tokio::test(start_paused = true)]
async fn a_long_poll_with_any_etag_does_not_wait() {
    let scene = Scene::new(None);
    let started = tokio::time::Instant::now();
    let any = Request::get("/v1/members?wait=40s").header("if-none-match", "*").body(Body::empty()).unwrap();
    assert_eq!(scene.send(any).await.status(), StatusCode::NOT_MODIFIED);
    assert!(started.elapsed() < Duration::from_secs(40));
}

/// A client may wait with the `ETag`, with the version in the body, or with Consul's index.
#[tokio::test(start_paused = true)]
async fn a_long_poll_waits_with_each_form_of_the_version() {
    let scene = Scene::new(None);
    let path = "/v1/health/service/web.default";
    let response = scene.get(path).await;
    let port = scene.json("/v1/members/default/web/80").await["version"].as_str().unwrap().to_owned();
    let etag = header_of(&response, "etag");
    for (path, index) in [
        (path, etag.replace('"', "")),
        (path, header_of(&response, "x-consul-index")),
        ("/v1/members/default/web/80", port),
    ] {
        let started = tokio::time::Instant::now();
        assert_eq!(scene.get(&format!("{path}?index={index}&wait=40s")).await.status(), StatusCode::OK);
        assert!(started.elapsed() >= Duration::from_secs(40), "{path} {index}");
    }
}

#[tokio::test]
async fn a_long_poll_waits_for_the_next_version() {
    let mut scene = Scene::new(None);
    let path = "/v1/members/default/web/80";
    let version = header_of(&scene.get(path).await, "etag").replace('"', "");
    let router = scene.router.clone();
    let request = Request::get(format!("{path}?index={version}")).body(Body::empty()).unwrap();
    let waiting = tokio::spawn(router.oneshot(request));
    tokio::task::yield_now().await;
    // A change of the Service `api` does not end the client's long poll of `web`.
    scene.cluster.apply(Change::Service(Box::new(service("api", 9090))), 0);
    scene.publish();
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished());
    scene.ready_b();
    let response = timeout(Duration::from_mins(1), waiting).await.unwrap().unwrap().unwrap();
    assert_ne!(header_of(&response, "etag").replace('"', ""), version);
}

#[tokio::test(start_paused = true)]
async fn a_long_poll_ends_after_its_wait() {
    let scene = Scene::new(None);
    let path = "/v1/members/default/web/80";
    let etag = header_of(&scene.get(path).await, "etag");
    let version = etag.replace('"', "");
    let started = tokio::time::Instant::now();
    let request = Request::get(format!("{path}?index={version}&wait=40s")).header("if-none-match", etag);
    let response = scene.router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::NOT_MODIFIED);
    assert!(started.elapsed() >= Duration::from_secs(40));
    let response =
        scene.router.clone().oneshot(Request::get(format!("{path}?index={version}")).body(Body::empty()).unwrap());
    assert_eq!(response.await.unwrap().status(), StatusCode::OK);
    assert!(started.elapsed() >= Duration::from_secs(340));
}

#[tokio::test]
async fn consul_clients_see_health_and_an_index() {
    let scene = Scene::new(None);
    let response = scene.get("/v1/health/service/http.web.default").await;
    let index: u64 = header_of(&response, "x-consul-index").parse().unwrap();
    assert!(index > 0);
    let all: Value = serde_json::from_str(&text(response).await).unwrap();
    let states: Vec<_> = all.as_array().unwrap().iter().map(|it| it["Checks"][0]["Status"].as_str().unwrap()).collect();
    assert_eq!(states, ["passing", "critical", "critical"]);
    let passing = scene.json("/v1/health/service/web.default?passing=true").await;
    assert_eq!((passing.as_array().unwrap().len(), &passing[0]["Service"]["Port"]), (1, &json!(61000)));
    for (parameter, count) in
        [("passing", 1), ("passing=", 1), ("passing=1", 1), ("passing=false", 3), ("passing=0", 3)]
    {
        let members = scene.json(&format!("/v1/health/service/web.default?{parameter}")).await;
        assert_eq!(members.as_array().unwrap().len(), count, "{parameter}");
    }
    assert_eq!(scene.json("/v1/health/service/none.default").await, json!([]));
    assert_eq!(scene.json("/v1/catalog/services").await, json!({ "web.default": [], "http.web.default": [] }));
}

#[tokio::test]
async fn traefik_gets_ready_members_and_prometheus_all() {
    let scene = Scene::new(None);
    let traefik = scene.json("/traefik").await;
    let servers = |kind: &str| traefik[kind]["services"]["web.default.http"]["loadBalancer"]["servers"].clone();
    assert_eq!(servers("http"), json!([{ "url": "http://192.0.2.1:61000" }]));
    assert_eq!(servers("tcp"), json!([{ "address": "192.0.2.1:61000" }]));
    assert_eq!(traefik.get("udp"), None, "Traefik refuses an empty element");
    let targets = scene.json("/v1/http_sd").await;
    assert_eq!(targets.as_array().unwrap().len(), 3);
    assert_eq!(targets[0]["labels"]["__meta_npl_pod"], json!("a"));
    assert_eq!(targets[2]["labels"]["__meta_npl_condition"], json!("draining"));
}

#[tokio::test]
async fn all_paths_except_the_probes_require_the_token() {
    let scene = Scene::new(Some("secret"));
    for path in ["/v1/members", "/traefik", "/metrics", "/openapi.json"] {
        assert_eq!(scene.get(path).await.status(), StatusCode::UNAUTHORIZED, "{path}");
        for (value, expected) in [
            ("Bearer secret", StatusCode::OK),
            ("bearer secret", StatusCode::OK),
            ("BEARER  secret", StatusCode::OK),
            ("Basic secret", StatusCode::UNAUTHORIZED),
            ("Bearer other", StatusCode::UNAUTHORIZED),
            ("secret", StatusCode::UNAUTHORIZED),
        ] {
            let request = Request::get(path).header("authorization", value).body(Body::empty()).unwrap();
            assert_eq!(scene.send(request).await.status(), expected, "{path} {value}");
        }
    }
    for path in ["/healthz", "/readyz"] {
        assert_eq!(scene.get(path).await.status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn the_feed_stays_ready_during_an_outage_and_names_the_watch() {
    use npl_agent::{
        kube::watch_health::WatchObserver as _,
        metrics::{FailureKind, WatchedResource},
    };
    let scene = Scene::new(None);
    assert_eq!(text(scene.get("/readyz").await).await, "ok\n");
    scene.status.record_failure(WatchedResource::Pods, FailureKind::Unreachable, "connection refused");
    let response = scene.get("/readyz").await;
    assert_eq!(response.status(), StatusCode::OK);
    assert!(text(response).await.contains("the watch of pods (unreachable) is interrupted"));
    let metrics = text(scene.get("/metrics").await).await;
    assert!(metrics.contains("npl_feed_watch_failing{subject=\"pods\"} 1\n"), "{metrics}");
    scene.publisher.send_replace(None);
    let response = scene.get("/readyz").await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(scene.get("/v1/members").await.status(), StatusCode::SERVICE_UNAVAILABLE);
    scene.status.record_success(WatchedResource::Pods);
    assert!(text(scene.get("/readyz").await).await.contains("are not listed yet"));
}
