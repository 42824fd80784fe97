// SPDX-License-Identifier: Apache-2.0
//! Measures the memory of the program `npl-feed` in a large cluster. A model of the API server sends the objects, because
//! a real one would need minutes to store them.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
};

use axum::{Json, Router, body::Body, extract::Query, response::IntoResponse as _, response::Response, routing::get};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::{
    api_server::{self, FEED},
    network, scene,
};

const MEMBERS: usize = 10_000;
const SERVICES: usize = 100;
const NODES: usize = 100;
/// The upper limit of the resident memory, in KiB.
const LIMIT: usize = 40 * 1024;
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

/// A page of a list, or a watch without events.
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

/// The folder below `/proc` of the process that has this argument. `/proc` shows the process IDs outside of the test's
/// PID namespace, so that a child's ID does not name the folder.
fn process_with(argument: &Path) -> PathBuf {
    let argument = argument.as_os_str().as_encoded_bytes();
    let is_same = |path: &PathBuf| {
        let line = fs::read(path.join("cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|part| part == argument)
    };
    let folders = fs::read_dir("/proc").unwrap().filter_map(|entry| Some(entry.ok()?.path()));
    { folders }.find(is_same).expect("a process with the argument")
}

/// A field of the file `status` of a process, in KiB.
fn kibibytes(process: &Path, field: &str) -> usize {
    let status = fs::read_to_string(process.join("status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_matches([':', ' ', '\t', 'k', 'B']).parse().unwrap()
}

#[test]
fn ten_thousand_members_fit_into_the_memory_limit() {
    network::inside("memory::ten_thousand_members_fit_into_the_memory_limit", || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let address: SocketAddr = API_SERVER.parse().unwrap();
        let listener = runtime.block_on(TcpListener::bind(address)).unwrap();
        runtime.spawn(async move { axum::serve(listener, router()).await });
        let folder = scene::new_folder("memory");
        let kubeconfig = folder.join("kubeconfig");
        let config = json!({ "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{ "name": "c", "cluster": { "server": format!("http://{API_SERVER}") } }],
            "users": [{ "name": "u", "user": {} }],
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }] });
        fs::write(&kubeconfig, config.to_string()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_npl-feed"));
        command.args(["--http", FEED, "--xds", "127.0.0.1:18000", "--dns", "127.0.0.1:5353"]);
        let feed = api_server::start(&folder, "npl-feed", command.arg("--kubeconfig").arg(&kubeconfig));
        let expected = format!("npl_feed_members {MEMBERS}\n");
        api_server::until("all members", || api_server::get("/metrics").filter(|(_, text)| text.contains(&expected)));
        let process = process_with(&kubeconfig);
        // Decoded lists are returned to the kernel after the first snapshot.
        api_server::until("resident memory within the limit", || {
            let [all, own] = ["VmRSS", "RssAnon"].map(|field| kibibytes(&process, field));
            println!("{MEMBERS} members: {all} KiB, of which {own} KiB are not pages of the program");
            // An unoptimized program alone takes more than half of the limit.
            (if cfg!(debug_assertions) { own } else { all } <= LIMIT).then_some(())
        });
        drop(feed);
        fs::remove_dir_all(&folder).unwrap();
    });
}
