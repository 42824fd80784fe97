// SPDX-License-Identifier: Apache-2.0
//! Measures the memory and the processor time of the program `npl-feed` in a large cluster. A model of the API server
//! sends the objects, because a real API server would need minutes to store them.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use axum::{Json, Router, body::Body, extract::Query, response::IntoResponse as _, response::Response, routing::get};
use serde_json::{Value, json};
use tokio::{net::TcpListener, runtime::Runtime};

use crate::{
    api_server::{self, FEED, Running},
    network, scene,
};

const MEMBERS: usize = 10_000;
pub(crate) const SERVICES: usize = 100;
const NODES: usize = 100;
/// The upper limit of the resident memory, in KiB.
pub(crate) const LIMIT: u64 = 40 * 1024;
/// The duration for which an idle feed is observed, and the upper limit of its processor time: 1 % of a core.
const OBSERVED: Duration = Duration::from_secs(10);
const IDLE_LIMIT: Duration = OBSERVED.checked_div(100).unwrap();
/// The maximum number of times that the threads of an idle feed may wait within [`OBSERVED`]. The timers of an idle
/// feed are tens of seconds long, so its threads rarely wake up.
const MOST_WAITS: u64 = 20;
pub(crate) const DNS: &str = "127.0.0.1:5353";
pub(crate) const XDS: &str = "127.0.0.1:18000";
const API_SERVER: &str = "127.0.0.1:6443";

/// An object with the metadata that the API server sends and the feed does not use.
fn object(name: &str, namespace: Option<&str>, more: &Value) -> Value {
    let fields = json!({ "f:status": { "f:conditions": { "k:{\"type\":\"Ready\"}": { ".": {}, "f:status": {}, "f:type": {} } } } });
    let manager = |name| {
        json!({ "manager": name, "operation": "Update", "apiVersion": "v1", "time": "2026-01-01T00:00:00Z",
                "fieldsType": "FieldsV1", "fieldsV1": fields, "subresource": "status" })
    };
    let mut metadata = json!({ "name": name, "uid": format!("{name}-0000-4000-8000-000000000000"),
        "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [manager("kube-controller-manager"), manager("npl-agent"), manager("kubelet")] });
    metadata["namespace"] = namespace.into();
    merge(&mut metadata, &more["metadata"]);
    let mut object = json!({ "metadata": metadata });
    merge(&mut object["spec"], &more["spec"]);
    merge(&mut object["status"], &more["status"]);
    object
}

fn merge(object: &mut Value, more: &Value) {
    for (key, value) in more.as_object().into_iter().flatten() {
        object[key] = value.clone();
    }
}

fn pod(number: usize) -> Value {
    let (node, service) = (number % NODES, number / (MEMBERS / SERVICES));
    let annotation = json!([{ "podPort": 8080, "nodeIP": node_ip(node), "nodePort": 61_000 + number / NODES,
                              "protocol": "tcp", "protocols": ["tcp"] }]);
    let app = format!("web-{service:03}");
    let container = json!({ "name": "web", "image": "registry.example/team/web:1.2.3",
        "ports": [{ "name": "http", "containerPort": 8080 }], "env": [{ "name": "MODE", "value": "production" }],
        "resources": { "requests": { "cpu": "100m", "memory": "128Mi" } } });
    let more = json!({
        "metadata": { "labels": { "app.kubernetes.io/name": app, "app.kubernetes.io/instance": app,
                                  "pod-template-hash": "6d5f7c9b8d", "team": "shop" },
                      "annotations": { "nodeportlocal.antrea.io": annotation.to_string() } },
        "spec": { "nodeName": format!("node-{node:03}.example"), "containers": [container] },
        "status": { "phase": "Running", "podIP": "10.244.1.7", "podIPs": [{ "ip": "10.244.1.7" }],
                    "conditions": [{ "type": "Ready", "status": "True" }] } });
    object(&format!("{app}-6d5f7c9b8d-{number:05}"), Some("production"), &more)
}

fn service(number: usize) -> Value {
    let name = format!("web-{number:03}");
    let more = json!({ "metadata": { "annotations": { "nodeportlocal.antrea.io/enabled": "true" } },
        "spec": { "type": "ClusterIP", "selector": { "app.kubernetes.io/name": name }, "ipFamilies": ["IPv4"],
                  "ports": [{ "name": "http", "port": 80, "targetPort": 8080, "protocol": "TCP" }] } });
    object(&name, Some("production"), &more)
}

fn node(number: usize) -> Value {
    let more = json!({ "metadata": { "labels": { "topology.kubernetes.io/zone": format!("zone-{}", number % 3) } },
        "status": { "addresses": [{ "type": "InternalIP", "address": node_ip(number) }] } });
    object(&format!("node-{number:03}.example"), None, &more)
}

fn node_ip(number: usize) -> String {
    format!("192.0.2.{}", number + 1)
}

/// Answers with a page of a list, or with a watch without events.
fn answer(query: &BTreeMap<String, String>, count: usize, object: fn(usize) -> Value) -> Response {
    if query.get("watch").is_some_and(|watch| watch == "true") {
        return Body::from_stream(futures::stream::pending::<std::io::Result<Vec<u8>>>()).into_response();
    }
    let number = |key: &str| query.get(key).and_then(|text| text.parse().ok());
    let start = number("continue").unwrap_or(0);
    let end = number("limit").map_or(count, |limit: usize| count.min(start + limit));
    let mut metadata = json!({ "resourceVersion": "1" });
    if end < count {
        metadata["continue"] = end.to_string().into();
    }
    let items: Vec<Value> = (start..end).map(object).collect();
    Json(json!({ "metadata": metadata, "items": items })).into_response()
}

fn router() -> Router {
    let list = |count, object: fn(usize) -> Value| {
        get(move |Query(query): Query<BTreeMap<String, String>>| async move { answer(&query, count, object) })
    };
    Router::new()
        .route("/api/v1/pods", list(MEMBERS, pod))
        .route("/api/v1/services", list(SERVICES, service))
        .route("/api/v1/nodes", list(NODES, node))
}

/// The folder below `/proc` of the process that has this argument. The test finds the process by its argument and not
/// by its ID: `/proc` shows the IDs outside of the test's PID namespace, but the test knows only the ID inside.
fn process_with(argument: &Path) -> PathBuf {
    let argument = argument.as_os_str().as_encoded_bytes();
    let is_same = |path: &PathBuf| {
        let line = fs::read(path.join("cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|part| part == argument)
    };
    let folders = fs::read_dir("/proc").unwrap().filter_map(|entry| Some(entry.ok()?.path()));
    { folders }.find(is_same).expect("no process has the argument")
}

/// A field of the file `status` of a process or thread; memory in KiB.
fn field(process: &Path, name: &str) -> u64 {
    let status = fs::read_to_string(process.join("status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_matches([':', ' ', '\t', 'k', 'B']).parse().unwrap()
}

/// The processor time of a process and the number of times that its threads have waited.
fn work_of(process: &Path) -> (Duration, u64) {
    let stat = fs::read_to_string(process.join("stat")).unwrap();
    // The name of the program, in parentheses, may contain spaces.
    let (_, fields) = stat.rsplit_once(')').unwrap();
    // User and system time, in clock ticks of 10 ms.
    let ticks: u64 = fields.split_whitespace().skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum();
    let threads = fs::read_dir(process.join("task")).unwrap().filter_map(|entry| Some(entry.ok()?.path()));
    let waits = threads.map(|thread| field(&thread, "voluntary_ctxt_switches")).sum();
    (Duration::from_millis(10 * ticks), waits)
}

/// A running feed that has listed all members. Fields are dropped in declaration order.
pub(crate) struct LargeCluster {
    pub(crate) process: PathBuf,
    _feed: Running,
    _runtime: Runtime,
    folder: scene::Folder,
}

impl LargeCluster {
    /// Starts the feed with the soft limit of open files that container runtimes set; the feed must raise the limit
    /// itself.
    pub(crate) fn start() -> Self {
        Self::with_open_files("1024:")
    }

    /// Starts the feed with limits of open files, as prlimit reads them: `SOFT:HARD`.
    pub(crate) fn with_open_files(limits: &str) -> Self {
        let runtime = Runtime::new().unwrap();
        let address: SocketAddr = API_SERVER.parse().unwrap();
        let listener = runtime.block_on(TcpListener::bind(address)).unwrap();
        runtime.spawn(async move { axum::serve(listener, router()).await });
        let folder = scene::Folder::new("memory");
        let kubeconfig = folder.join("kubeconfig");
        let config = json!({ "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{ "name": "c", "cluster": { "server": format!("http://{API_SERVER}") } }],
            "users": [{ "name": "u", "user": {} }],
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }] });
        fs::write(&kubeconfig, config.to_string()).unwrap();
        let mut command = Command::new("prlimit");
        command.arg(format!("--nofile={limits}")).arg(api_server::feed_program());
        command.args(["--http", FEED, "--xds", XDS, "--dns", DNS]);
        let feed = api_server::start(&folder, "npl-feed", command.arg("--kubeconfig").arg(&kubeconfig));
        let expected = format!("npl_feed_members {MEMBERS}\n");
        api_server::until("all members", || api_server::get("/metrics").filter(|(_, text)| text.contains(&expected)));
        Self { process: process_with(&kubeconfig), _feed: feed, _runtime: runtime, folder }
    }

    /// The log of the feed.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.join("npl-feed.log")).unwrap()
    }

    /// The largest resident memory that the feed has had, in KiB. In a debug build, the pages of the program's file are
    /// not counted.
    pub(crate) fn peak_memory(&self) -> u64 {
        let [peak, file] = ["VmHWM", "RssFile"].map(|name| field(&self.process, name));
        if cfg!(debug_assertions) { peak.saturating_sub(file) } else { peak }
    }

    /// The resident memory of the feed, in KiB. In a debug build, the pages of the program's file are not counted,
    /// because these pages alone take more than half of the limit.
    pub(crate) fn memory(&self) -> u64 {
        field(&self.process, if cfg!(debug_assertions) { "RssAnon" } else { "VmRSS" })
    }

    /// Waits until the feed uses at most `limit` KiB. After its first snapshot, the feed returns the memory of the
    /// decoded lists to the kernel.
    pub(crate) fn wait_for_memory(&self, limit: u64) {
        api_server::until("resident memory within the limit", || {
            let [all, own] = ["VmRSS", "RssAnon"].map(|name| field(&self.process, name));
            println!("{MEMBERS} members: {all} KiB, of which {own} KiB are not pages of the program");
            (self.memory() <= limit).then_some(())
        });
    }
}

#[test]
fn ten_thousand_members_fit_into_the_memory_limit() {
    network::inside("memory::ten_thousand_members_fit_into_the_memory_limit", || {
        LargeCluster::start().wait_for_memory(LIMIT);
    });
}

/// On a fast machine, a feed that wakes up at short intervals could stay below the limit of processor time. The test
/// therefore also limits the number of waits, which does not depend on the speed of the machine.
#[test]
fn ten_thousand_members_take_no_processor_time_without_changes() {
    network::inside("memory::ten_thousand_members_take_no_processor_time_without_changes", || {
        let cluster = LargeCluster::start();
        api_server::until("an idle feed", || {
            let (began, (time_before, waits_before)) = (Instant::now(), work_of(&cluster.process));
            api_server::until("the end of the observation", || (began.elapsed() >= OBSERVED).then_some(()));
            let (time, waits) = work_of(&cluster.process);
            let (time, waits) = (time.saturating_sub(time_before), waits.saturating_sub(waits_before));
            println!("{MEMBERS} members without changes: {time:?} of processor time and {waits} waits in {OBSERVED:?}");
            (time <= IDLE_LIMIT && waits <= MOST_WAITS).then_some(())
        });
    });
}
