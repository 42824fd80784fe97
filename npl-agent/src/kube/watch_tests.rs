// SPDX-License-Identifier: Apache-2.0

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tokio::{
    sync::mpsc::{self, Receiver},
    time::Instant,
};

use super::*;
use crate::{
    kube::{
        contacts::WatchContacts,
        mock::{MockServer, ReceivedRequest, api_server, bookmark, metrics, refusal},
    },
    metrics::{Format, Metrics},
};

struct Scene {
    server: MockServer,
    changes: Receiver<Change>,
    tasks: JoinSet<WatchedResource>,
    metrics: Metrics,
    /// Whether [`Scene::list_request`] has refused a streaming list.
    has_refused_streaming: bool,
}

fn observers(metrics: &Metrics, namespaces: &Namespaces) -> Observers {
    Observers { metrics: metrics.clone(), contacts: WatchContacts::new(namespaces), namespace: None }
}

/// Starts a watch of the objects of one kind that match the field selector `fields`, or of all objects of this kind if
/// `fields` is `None`.
fn watching<W: Watched<Change = Change>>(fields: Option<&str>) -> Scene {
    selecting::<W>(fields.map(Selection::of_fields).unwrap_or_default())
}

/// Starts a watch of one kind of object, with a mock server as the API server.
fn selecting<W: Watched<Change = Change>>(selection: Selection) -> Scene {
    let (client, server) = api_server();
    let (sender, changes) = mpsc::channel(16);
    let metrics = metrics();
    let observers = observers(&metrics, &Namespaces::default());
    let watch = Watch::new(&AnnotationKeys::new("nodeportlocal.antrea.io"), Arc::new(observers), &sender);
    drop(sender);
    let mut tasks = JoinSet::new();
    tasks.spawn(watch.follow::<W>(client, selection));
    Scene { server, changes, tasks, metrics, has_refused_streaming: false }
}

impl Scene {
    async fn change(&mut self) -> Change {
        timeout(Duration::from_mins(10), self.changes.recv()).await.unwrap().unwrap()
    }

    /// Returns the next request, which must be for a list. Answers the first request for a streaming list as an API
    /// server does that does not support streaming lists; the agent must not request another one.
    async fn list_request(&mut self) -> ReceivedRequest {
        let mut request = self.server.next_request().await;
        if request.line.contains("sendInitialEvents") && !self.has_refused_streaming {
            self.has_refused_streaming = true;
            request.answer(422, refusal(422, "Invalid", "sendInitialEvents: Forbidden"));
            request = self.server.next_request().await;
        }
        assert!(!request.line.contains("watch=true"), "{}", request.line);
        request
    }

    fn counts(&self, line: &str) -> bool {
        self.metrics.encode(Format::OpenMetrics).unwrap().lines().any(|found| found == line)
    }
}

fn pod(name: &str, version: u64) -> Value {
    json!({ "metadata": { "name": name, "namespace": "default", "uid": name, "resourceVersion": version.to_string() } })
}

fn list(request: ReceivedRequest, items: &[Value]) {
    request.answer(200, json!({ "metadata": { "resourceVersion": "10" }, "items": items }).to_string());
}

fn events(request: ReceivedRequest, events: &[Value]) {
    let lines: Vec<String> = events.iter().map(|event| format!("{event}\n")).collect();
    request.answer(200, lines.concat());
}

fn names(change: &Change) -> Vec<String> {
    match change {
        Change::Pods(pods) => pods.iter().map(|pod| format!("list {}", pod.key.name)).collect(),
        Change::Pod(pod) => vec![format!("set {}", pod.key.name)],
        Change::PodGone(key, uid) => vec![format!("gone {} {uid}", key.name)],
        Change::StoreRestored
        | Change::Services(..)
        | Change::Service(_)
        | Change::ServiceGone(_)
        | Change::Node(_)
        | Change::NodeGone => vec![format!("{change:?}")],
    }
}

/// The first request for the Pods of the Node `worker-1`.
const STREAMED_PODS: &str = "GET /api/v1/pods?&watch=true&timeoutSeconds=240&fieldSelector=spec.nodeName%3Dworker-1\
                             &allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan\
                             &resourceVersion=";

/// Starts the agent's watches, answers the first request of each watch with an empty list, and returns these requests.
async fn first_requests(namespaces: &str, service_selector: Option<&str>) -> BTreeSet<String> {
    let (client, mut server) = api_server();
    let (sender, changes) = mpsc::channel(16);
    let keys = AnnotationKeys::new("nodeportlocal.antrea.io");
    let namespaces: Namespaces = namespaces.parse().unwrap();
    let observers = observers(&metrics(), &namespaces);
    let service_selector = service_selector.map(ToOwned::to_owned);
    let objects = WatchedObjects { node_name: "worker-1".to_owned(), namespaces, service_selector };
    let tasks = spawn(&client, &objects, &keys, &observers, &sender);
    let mut lines = BTreeSet::new();
    for _ in 0..tasks.len() {
        let request = server.next_request().await;
        lines.insert(request.line.clone());
        request.answer(200, json!({ "metadata": { "resourceVersion": "10" }, "items": [] }).to_string());
    }
    drop((changes, tasks));
    lines
}

#[tokio::test(start_paused = true)]
async fn the_watches_select_only_this_node_and_its_pods() {
    let lines = first_requests("", None).await;
    let expected =
        ["GET /api/v1/nodes?&fieldSelector=metadata.name%3Dworker-1", STREAMED_PODS, "GET /api/v1/services?&limit=500"];
    assert!(lines.iter().eq(expected.iter()), "{lines:?}");
}

#[tokio::test(start_paused = true)]
async fn a_selector_limits_the_list_and_the_watch_of_services_only() {
    let lines = first_requests("", Some("tier in (web),!canary")).await;
    let with_labels: Vec<&String> = lines.iter().filter(|line| line.contains("labelSelector")).collect();
    assert_eq!(with_labels, ["GET /api/v1/services?&labelSelector=tier+in+%28web%29%2C%21canary&limit=500"]);

    let (client, mut server) = api_server();
    let selection = Selection { labels: Some("npl=yes".to_owned()), ..Selection::default() };
    let source = Source::<ServiceObject>::new(client, selection);
    let (watch, ()) = tokio::join!(source.watch(WatchStart::After("10"), 240), async {
        let request = server.next_request().await;
        assert!(
            request.line.contains("watch=true") && request.line.contains("labelSelector=npl%3Dyes"),
            "{}",
            request.line
        );
        events(request, &[]);
    });
    assert!(watch.is_ok());
}

#[tokio::test(start_paused = true)]
async fn namespaces_have_a_watch_of_services_each_and_pods_have_one_watch() {
    let lines = first_requests("shop,billing", Some("npl=yes")).await;
    let expected = [
        "GET /api/v1/namespaces/billing/services?&labelSelector=npl%3Dyes&limit=500",
        "GET /api/v1/namespaces/shop/services?&labelSelector=npl%3Dyes&limit=500",
        "GET /api/v1/nodes?&fieldSelector=metadata.name%3Dworker-1",
        STREAMED_PODS,
    ];
    assert!(lines.iter().eq(expected.iter()), "{lines:?}");
}

#[tokio::test(start_paused = true)]
async fn the_watch_of_a_namespace_sends_all_its_requests_to_the_namespace() {
    let mut scene =
        selecting::<ServiceObject>(Selection { namespace: Some("shop".to_owned()), ..Selection::default() });
    list(scene.list_request().await, &[]);
    assert_eq!(scene.change().await, Change::Services(Some("shop".into()), Vec::new()));
    let watch = scene.server.next_request().await;
    assert!(watch.line.starts_with("GET /api/v1/namespaces/shop/services?&watch=true"), "{}", watch.line);
    watch.break_connection();
    // The agent requests the store's newest version after a broken watch.
    let newest = scene.server.next_request().await;
    assert_eq!(newest.line, "GET /api/v1/namespaces/shop/services?&limit=1");
}

#[tokio::test(start_paused = true)]
async fn a_list_is_one_change_and_each_event_another() {
    let mut scene = watching::<PodObject>(Some("spec.nodeName=worker-1"));
    list(scene.list_request().await, &[pod("a", 1), pod("b", 2), json!({ "metadata": {} })]);
    assert_eq!(names(&scene.change().await), ["list a", "list b"]);
    let request = scene.server.next_request().await;
    for part in
        ["GET /api/v1/pods?", "watch=true", "timeoutSeconds=240", "resourceVersion=10", "allowWatchBookmarks=true"]
    {
        assert!(request.line.contains(part), "{} lacks {part}", request.line);
    }
    events(
        request,
        &[
            json!({ "type": "ADDED", "object": pod("c", 11) }),
            bookmark("12", &json!({})),
            json!({ "type": "DELETED", "object": pod("a", 13) }),
        ],
    );
    assert_eq!(names(&scene.change().await), ["set c"]);
    assert_eq!(names(&scene.change().await), ["gone a a"]);
    newest(scene.server.next_request().await, 13);
    let again = scene.server.next_request().await;
    assert!(again.line.contains("watch=true") && again.line.contains("resourceVersion=13"), "{}", again.line);
}

#[tokio::test(start_paused = true)]
async fn an_expired_watch_starts_again_with_a_list() {
    let mut scene = watching::<PodObject>(None);
    list(scene.list_request().await, &[pod("a", 1)]);
    assert_eq!(names(&scene.change().await), ["list a"]);
    events(
        scene.server.next_request().await,
        &[
            json!({ "type": "ERROR", "object": { "kind": "Status", "status": "Failure", "code": 410, "reason": "Expired" } }),
        ],
    );
    list(scene.list_request().await, &[pod("b", 20)]);
    assert_eq!(names(&scene.change().await), ["list b"]);
    assert!(scene.counts(r#"npl_watch_errors_total{subject="pods",kind="expired"} 1"#));
}

#[tokio::test(start_paused = true)]
async fn errors_never_end_a_watch_and_are_counted_by_kind() {
    let mut scene = watching::<ServiceObject>(None);
    scene.server.next_request().await.answer(403, refusal(403, "Forbidden", "services is forbidden"));
    scene.server.next_request().await.answer(401, refusal(401, "Unauthorized", "Unauthorized"));
    scene.server.next_request().await.answer(500, "");
    scene.server.next_request().await.break_connection();
    scene.server.next_request().await.answer(200, "<html>");
    list(scene.list_request().await, &[]);
    assert_eq!(scene.change().await, Change::Services(None, Vec::new()));
    for kind in ["forbidden", "unauthorized", "unavailable", "unreachable", "malformed"] {
        let line = format!(r#"npl_watch_errors_total{{subject="services",kind="{kind}"}} 1"#);
        assert!(scene.counts(&line), "{line}\n{}", scene.metrics.encode(Format::OpenMetrics).unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_without_an_end_is_requested_again() {
    let mut scene = watching::<PodObject>(None);
    let list_begun = r#"{"metadata":{"resourceVersion":"10"},"items":["#;
    scene.list_request().await.answer_without_end(200, list_begun);
    list(scene.list_request().await, &[pod("a", 1)]);
    assert_eq!(names(&scene.change().await), ["list a"]);
    // If the API server refuses a watch, the agent reads the complete error answer. The body of this answer never ends,
    // so the agent stops reading at the time limit and sends the next request.
    scene.server.next_request().await.answer_without_end(403, r#"{"kind":"Status","#);
    let again = scene.server.next_request().await;
    assert!(again.line.starts_with("GET /api/v1/pods?"), "{}", again.line);
    assert!(scene.counts(r#"npl_watch_errors_total{subject="pods",kind="unreachable"} 2"#));
}

#[tokio::test(start_paused = true)]
async fn an_empty_list_of_nodes_means_that_the_node_is_gone() {
    let mut scene = watching::<NodeObject>(Some("metadata.name=worker-1"));
    list(scene.list_request().await, &[]);
    assert_eq!(scene.change().await, Change::NodeGone);
    let node = json!({ "metadata": { "name": "worker-1", "resourceVersion": "11" } });
    events(
        scene.server.next_request().await,
        &[json!({ "type": "ADDED", "object": node }), json!({ "type": "DELETED", "object": node })],
    );
    assert!(matches!(scene.change().await, Change::Node(node) if node.name == "worker-1"));
    assert_eq!(scene.change().await, Change::NodeGone);
}

#[tokio::test(start_paused = true)]
async fn a_watch_ends_when_its_receiver_is_dropped() {
    let mut scene = watching::<PodObject>(None);
    let request = scene.list_request().await;
    drop(scene.changes);
    list(request, &[pod("a", 1)]);
    let ended = timeout(Duration::from_secs(5), scene.tasks.join_next()).await.unwrap();
    assert!(matches!(ended, Some(Ok(WatchedResource::Pods))), "{ended:?}");
}

#[tokio::test(start_paused = true)]
async fn lists_keep_enabled_services_and_node_ports_and_events_report_all() {
    let service = |name: &str, enabled: &str| {
        let annotations = json!({ "nodeportlocal.antrea.io/enabled": enabled });
        let metadata =
            json!({ "name": name, "namespace": "a", "uid": name, "resourceVersion": "1", "annotations": annotations });
        json!({ "metadata": metadata, "spec": { "selector": { "app": "x" } } })
    };
    let mut node_port = service("node", "false");
    node_port["spec"]["ports"] = json!([{ "port": 80, "nodePort": 61000 }]);
    let mut scene = watching::<ServiceObject>(None);
    list(scene.list_request().await, &[service("on", "true"), service("off", "false"), node_port]);
    let Change::Services(None, kept) = scene.change().await else { panic!("no list") };
    assert_eq!(kept.iter().map(|service| &*service.key.name).collect::<Vec<_>>(), ["on", "node"]);
    // Changes of Services that do not request node ports are also sent, so that the agent learns that a Service was
    // disabled.
    events(scene.server.next_request().await, &[json!({ "type": "MODIFIED", "object": service("on", "false") })]);
    assert!(matches!(scene.change().await, Change::Service(service) if !service.is_enabled));
}

/// Answers the request for the newest version of the API server's store.
fn newest(request: ReceivedRequest, version: u64) {
    assert!(request.line.ends_with("limit=1"), "{}", request.line);
    let metadata = json!({ "resourceVersion": version.to_string() });
    request.answer(200, json!({ "metadata": metadata, "items": [pod("other", 3)] }).to_string());
}

#[tokio::test(start_paused = true)]
async fn a_restored_store_is_listed_again_at_the_first_reconnect() {
    let mut scene = watching::<PodObject>(Some("spec.nodeName=worker-1"));
    list(scene.list_request().await, &[pod("a", 7)]);
    assert_eq!(names(&scene.change().await), ["list a"]);
    let request = scene.server.next_request().await;
    events(request, &[json!({ "type": "ADDED", "object": pod("b", 250) })]);
    assert_eq!(names(&scene.change().await), ["set b"]);
    scene.server.next_request().await.break_connection();
    newest(scene.server.next_request().await, 60);
    list(scene.list_request().await, &[pod("c", 61)]);
    assert_eq!(scene.change().await, Change::StoreRestored);
    assert_eq!(names(&scene.change().await), ["list c"]);
    assert!(scene.server.next_request().await.line.contains("resourceVersion=10"));
    assert!(scene.counts(r#"npl_watch_errors_total{subject="pods",kind="restored"} 1"#));
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_ends_on_time_resumes_without_a_version_check() {
    let mut scene = watching::<ServiceObject>(None);
    list(scene.list_request().await, &[]);
    let _list = scene.change().await;
    let open = scene.server.next_request().await;
    tokio::time::advance(Duration::from_secs(u64::from(WATCH_SECONDS))).await;
    events(open, &[]);
    let again = scene.server.next_request().await;
    assert!(again.line.contains("watch=true"), "{}", again.line);
}

fn open_watch(request: ReceivedRequest, event: &Value) -> Instant {
    request.answer_without_end(200, format!("{event}\n"));
    Instant::now()
}

#[tokio::test(start_paused = true)]
async fn a_watch_without_the_bookmark_that_is_due_is_replaced() {
    let mut scene = watching::<PodObject>(None);
    list(scene.list_request().await, &[]);
    let _list = scene.change().await;
    let opened = open_watch(scene.server.next_request().await, &bookmark("12", &json!({})));
    newest(scene.server.next_request().await, 12);
    // The API server sends a bookmark every 60 to 75 s, so a watch must not count as dead during this time.
    assert!((76..=100).contains(&opened.elapsed().as_secs()), "{:?}", opened.elapsed());
    assert!(scene.counts(r#"npl_watch_errors_total{subject="pods",kind="unreachable"} 1"#));
    let again = scene.server.next_request().await;
    assert!(again.line.contains("watch=true") && again.line.contains("resourceVersion=12"), "{}", again.line);
}

#[tokio::test(start_paused = true)]
async fn a_watch_of_an_api_server_without_bookmarks_may_be_silent() {
    let mut scene = watching::<PodObject>(None);
    list(scene.list_request().await, &[]);
    let _list = scene.change().await;
    let opened = open_watch(scene.server.next_request().await, &json!({ "type": "ADDED", "object": pod("a", 11) }));
    assert_eq!(names(&scene.change().await), ["set a"]);
    let again = scene.server.next_request().await;
    assert!(again.line.contains("watch=true"), "{}", again.line);
    assert!(opened.elapsed() >= WATCH_LENGTH, "{:?}", opened.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_always_ends_at_once_is_repeated_with_growing_delays() {
    let mut scene = watching::<ServiceObject>(None);
    list(scene.list_request().await, &[]);
    let _list = scene.change().await;
    let started = Instant::now();
    for round in 0..10 {
        if round > 0 {
            newest(scene.server.next_request().await, 10);
        }
        events(scene.server.next_request().await, &[]);
    }
    assert!(started.elapsed() > Duration::from_secs(15), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn lists_that_never_complete_are_repeated_with_growing_delays() {
    const ANSWER_LIMIT: Duration = Duration::from_mins(2);
    let mut scene = watching::<ServiceObject>(None);
    let mut delays = Vec::new();
    let mut request = scene.server.next_request().await;
    for _ in 0..6 {
        let requested = Instant::now();
        request.answer_without_end(200, r#"{"metadata":{"resourceVersion":"10"},"items":["#);
        request = scene.server.next_request().await;
        delays.push(requested.elapsed().saturating_sub(ANSWER_LIMIT));
    }
    assert!(delays[0] <= Duration::from_millis(500) && delays[5] >= Duration::from_secs(5), "{delays:?}");
}

/// A proxy that ends idle connections after a minute must not delay changes by more than the shortest delay.
#[tokio::test(start_paused = true)]
async fn a_watch_that_was_open_for_a_minute_makes_the_delays_short_again() {
    let mut scene = watching::<ServiceObject>(None);
    let mut request = scene.server.next_request().await;
    for _ in 0..6 {
        request.break_connection();
        request = scene.server.next_request().await;
    }
    list(request, &[]);
    let _list = scene.change().await;
    let open = scene.server.next_request().await;
    tokio::time::advance(Duration::from_mins(1)).await;
    let ended = Instant::now();
    events(open, &[]);
    newest(scene.server.next_request().await, 10);
    assert!(ended.elapsed() <= Duration::from_millis(500), "{:?}", ended.elapsed());
}

fn page(request: ReceivedRequest, next: Option<&str>, name: &str) {
    let annotations = json!({ "nodeportlocal.antrea.io/enabled": "true" });
    let metadata =
        json!({ "name": name, "namespace": "a", "uid": name, "resourceVersion": "1", "annotations": annotations });
    let service = json!({ "metadata": metadata, "spec": { "selector": { "app": "x" } } });
    let list = json!({ "resourceVersion": "10", "continue": next });
    request.answer(200, json!({ "metadata": list, "items": [service] }).to_string());
}

fn service_names(change: &Change) -> Vec<&str> {
    let Change::Services(_, services) = change else { panic!("no list: {change:?}") };
    services.iter().map(|service| &*service.key.name).collect()
}

#[tokio::test(start_paused = true)]
async fn a_list_continues_at_the_page_that_failed() {
    let mut scene = watching::<ServiceObject>(None);
    page(scene.server.next_request().await, Some("token-2"), "one");
    for _ in 0..2 {
        let second = scene.server.next_request().await;
        assert!(second.line.contains("continue=token-2"), "{}", second.line);
        second.answer(429, refusal(429, "TooManyRequests", "slow down"));
    }
    let third = scene.server.next_request().await;
    assert!(third.line.contains("continue=token-2"), "{}", third.line);
    third.break_connection();
    let last = scene.server.next_request().await;
    assert!(last.line.contains("continue=token-2"), "{}", last.line);
    page(last, None, "two");
    assert_eq!(service_names(&scene.change().await), ["one", "two"]);
}

#[tokio::test(start_paused = true)]
async fn a_list_whose_pages_have_expired_is_requested_without_pages() {
    let mut scene = watching::<ServiceObject>(None);
    page(scene.server.next_request().await, Some("token-2"), "one");
    scene.server.next_request().await.answer(410, refusal(410, "Expired", "the continue token is too old"));
    let whole = scene.server.next_request().await;
    assert!(!whole.line.contains("limit=") && !whole.line.contains("continue="), "{}", whole.line);
    page(whole, None, "three");
    assert_eq!(service_names(&scene.change().await), ["three"]);
}

#[tokio::test(start_paused = true)]
async fn lists_and_watches_wait_as_long_as_the_api_server_requests() {
    let mut scene = watching::<ServiceObject>(None);
    let slow_down = |request: ReceivedRequest, seconds: &str| {
        request.answer_with_headers(429, &[("retry-after", seconds)], "Too many requests, please try again later.");
        Instant::now()
    };
    let answered = slow_down(scene.server.next_request().await, "25");
    let second = scene.server.next_request().await;
    assert!(answered.elapsed() >= Duration::from_secs(25), "{:?}", answered.elapsed());
    page(second, None, "one");
    assert_eq!(service_names(&scene.change().await), ["one"]);
    let answered = slow_down(scene.server.next_request().await, "20");
    newest(scene.server.next_request().await, 10);
    assert!(answered.elapsed() >= Duration::from_secs(20), "{:?}", answered.elapsed());
    // The agent waits at most one minute, even if a proxy requests one hour with `Retry-After`.
    let answered = slow_down(scene.server.next_request().await, "3600");
    newest(scene.server.next_request().await, 10);
    assert!(answered.elapsed() <= Duration::from_mins(2), "{:?}", answered.elapsed());
}

#[path = "watch_streaming_tests.rs"]
mod streaming;
