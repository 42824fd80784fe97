// SPDX-License-Identifier: Apache-2.0
//! Tests `kubectl npl test`, run by the real kubectl on a machine in the network of the Nodes.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Instant;

use npl_testkit::poll;
use serde_json::{Value, json};

use crate::world::{LIMIT, World};

/// The result of the command.
struct Outcome {
    code: i32,
    rows: Vec<Value>,
    answer: Value,
    notes: String,
}

fn run(world: &World) -> Outcome {
    let output = world.plug_in(&["test", "--output", "json"]).output().unwrap();
    let notes = String::from_utf8_lossy(&output.stderr).into_owned();
    let answer = serde_json::from_slice::<Value>(&output.stdout);
    assert!(answer.is_ok(), "{answer:?}: {notes}");
    let answer = answer.unwrap();
    let rows = answer["rows"].as_array().unwrap().clone();
    Outcome { code: output.status.code().unwrap(), rows, answer, notes }
}

fn namespaces(world: &World) -> Vec<Value> {
    world.namespaces_named("npl-test")
}

/// Path, protocol and family of the rows with this result.
fn with_result(rows: &[Value], result: &str) -> BTreeSet<String> {
    let text = |row: &Value, key: &str| row[key].as_str().unwrap_or("-").to_owned();
    let rows = rows.iter().filter(|row| row["result"] == result);
    rows.map(|row| format!("{} {} {}", text(row, "path"), text(row, "protocol"), text(row, "family"))).collect()
}

/// Every path passes on a healthy cluster.
pub(crate) fn kubectl_npl_test_passes_on_a_healthy_cluster(world: &mut World) {
    let start = Instant::now();
    let Outcome { code, rows, notes, .. } = run(world);
    let passed = with_result(&rows, "passed");
    let others: Vec<&Value> = rows.iter().filter(|row| row["result"] != "passed").collect();
    assert!(code == 0 && others.is_empty(), "exit code {code}: {others:#?}\n{notes}");
    println!("    {} rows in {:.1} s", rows.len(), start.elapsed().as_secs_f32());
    for (node, other) in [(1, 2), (2, 1)] {
        let from = [
            format!("outside → node-{node}"),
            format!("Pod on node-{other} → node-{node}"),
            format!("Pod on node-{node} → node-{node}"),
            format!("Pod echo-{node} on node-{node} → itself"),
        ];
        for (path, family) in from.iter().flat_map(|path| [(path, "IPv4"), (path, "IPv6")]) {
            for row in ["", ", 8000 bytes"].map(|size| format!("{path}{size} udp {family}")) {
                assert!(passed.contains(&row), "{row} is not in {passed:#?}");
            }
            assert!(passed.contains(&format!("{path} tcp {family}")), "{path} is not in {passed:#?}");
        }
    }
    for row in ["open connection during the drain", "new connection after the drain"] {
        assert!(passed.contains(&format!("{row} tcp IPv4")), "{row} is not in {passed:#?}");
    }
    assert!(namespaces(world).is_empty());
}

/// A rule that drops the Pods' port on one Node fails the paths that the rule affects, and no others.
pub(crate) fn kubectl_npl_test_names_a_broken_path(world: &mut World) {
    let broken = world.cluster.node("node-2").unwrap().netns().clone();
    broken
        .nft(
            "table inet npl-test-broken {
                chain forward {
                    type filter hook forward priority filter;
                    meta nfproto ipv4 tcp dport 7777 drop
                }
            }",
        )
        .unwrap();
    let Outcome { code, rows, answer, notes } = run(world);
    broken.nft("delete table inet npl-test-broken").unwrap();
    // The rule also applies to packets between Pods of the Node, because, depending on the CNI, a bridge passes these
    // packets to netfilter or the Node routes these packets. Only Cilium's programs send them from Pod to Pod.
    let mut clients = vec!["outside", "Pod on node-1"];
    if !world.cluster.cni().is_cilium() {
        clients.push("Pod on node-2");
    }
    let expected = clients.into_iter().map(|from| format!("{from} → node-2 tcp IPv4")).collect();
    assert_eq!(with_result(&rows, "failed"), expected, "{notes}");
    assert_eq!((code, &answer["verdict"]), (1, &json!("at-risk")));
    let doctor: Vec<&Value> = answer["doctor"].as_array().unwrap().iter().map(|it| &it["node"]).collect();
    assert_eq!(doctor, ["node-2"], "the doctor must run only on the Node of the failed paths");
    assert!(namespaces(world).is_empty());
}

/// An interrupted `kubectl npl test` must remove its objects, and name Namespaces that another run of the command has
/// left behind.
pub(crate) fn an_interrupted_kubectl_npl_test_removes_its_objects(world: &mut World) {
    let api = world.cluster.cluster().client();
    let labels = json!({"app.kubernetes.io/name": "npl-test"});
    api.create("/api/v1/namespaces", &json!({"metadata": {"name": "npl-test-left", "labels": labels}})).unwrap();
    let running = world.plug_in(&["test"]).spawn().unwrap();
    let has_own = || (namespaces(world).len() == 2).then_some(());
    poll::until("the Namespace of the test", LIMIT, has_own).unwrap();
    let is_ended = Command::new("kill").args(["-INT", &running.id().to_string()]).status().unwrap().success();
    let output = running.wait_with_output().unwrap();
    let notes = String::from_utf8_lossy(&output.stderr);
    assert!(is_ended && output.status.code() == Some(2), "{notes}");
    assert!(notes.contains("interrupted") && notes.contains("npl-test-left"), "{notes}");
    let names: Vec<Value> = namespaces(world).iter().map(|it| it["metadata"]["name"].clone()).collect();
    assert_eq!(names, ["npl-test-left"]);
    world.kubectl(&["delete", "namespace", "npl-test-left"]);
}
