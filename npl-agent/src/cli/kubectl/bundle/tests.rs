// SPDX-License-Identifier: Apache-2.0
//! Tests of the archive of the whole cluster, with a script in the place of kubectl.

use std::{io::Read as _, iter};

use flate2::read::GzDecoder;
use serde_json::json;

use super::*;
use crate::cli::{
    bundle::{Documents, archive as archive_of_node},
    kubectl::{nodes::CONTAINER, script::Script},
};

/// A text that must not be in the archive. The test's objects have this text in fields that the command must omit.
const CANARY: &str = "4d2c-canary";

const KUBECTL: &str = "case \"$*\" in
*' nodes') cat nodes.json ;;
*'pods --namespace npl-system'*) cat agents.json ;;
*'pods --all-namespaces' | *'services --all-namespaces') echo '{\"items\": []}' ;;
*'exec '*' npl-agent-1 '*'/npl-agent bundle') cat node-1.tar.gz ;;
*'exec '*' npl-agent-4 '*) echo 'unable to upgrade connection' >&2; exit 1 ;;
*'exec '*' npl-agent-5 '*) echo 'not an archive' ;;
*' namespaces --selector '*) echo '{\"items\": []}' ;;
*' create '*) cat >> objects; echo >> objects ;;
*'metadata.name=node-3') echo '{\"items\": [{\"metadata\": {\"name\": \"node-3\"}, \"status\": {
    \"phase\": \"Failed\", \"reason\": \"OutOfcpu\"}}]}' ;;
*'metadata.name=node-'*) echo '{\"items\": [{\"status\": {\"containerStatuses\": [{\"state\": {\"running\": {}}}]}}]}' ;;
*'exec --namespace npl-bundle-'*' node-2 '*'/npl-agent bundle') cat node-2.tar.gz ;;
*' delete namespace npl-bundle-'*) echo \"$*\" >> deleted ;;
*) echo \"unexpected: $*\" >&2; exit 1 ;;
esac
";

fn node(number: u8) -> Value {
    json!({
        "metadata": {"name": format!("node-{number}"), "labels": {"a": CANARY}, "annotations": {"b": CANARY}},
        "status": {
            "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}],
            "conditions": [{"type": "Ready", "status": "True", "message": CANARY}],
            "nodeInfo": {"kernelVersion": "6.12.1", "machineID": CANARY},
        },
    })
}

fn agent(number: u8, state: &Value) -> Value {
    let last = json!({"terminated": {"exitCode": 1, "message": CANARY}});
    let status = json!({"name": CONTAINER, "restartCount": 3, "state": state, "lastState": last});
    let env = json!([{"name": "TOKEN", "value": CANARY}]);
    json!({
        "metadata": {"name": format!("npl-agent-{number}"), "annotations": {"b": CANARY}},
        "spec": {
            "nodeName": format!("node-{number}"),
            "containers": [{"name": CONTAINER, "image": "npl:1", "env": env}],
        },
        "status": {"phase": "Running", "containerStatuses": [status]},
    })
}

/// A cluster of five Nodes: on the first, the agent answers; the second agent is in a crash loop; the third Node has no
/// agent; the fourth agent cannot be reached; the fifth agent's answer is not an archive.
fn cluster(name: &str) -> Script {
    let script = Script::new(name, KUBECTL);
    let write = |name: &str, content: &[u8]| fs::write(script.0.join(name), content).unwrap();
    let running = json!({"running": {}});
    let waiting = json!({"waiting": {"reason": "CrashLoopBackOff", "message": CANARY}});
    let agents = [agent(1, &running), agent(2, &waiting), agent(4, &running), agent(5, &running)];
    write("agents.json", json!({"items": agents}).to_string().as_bytes());
    write("nodes.json", json!({"items": (1..=5).map(node).collect::<Vec<_>>()}).to_string().as_bytes());
    let documents = Documents::from([
        ("status.json", json!({"verdict": "healthy", "mappings": 4})),
        ("errors.json", json!({})),
        ("environment.json", json!(CANARY)),
    ]);
    write("node-1.tar.gz", &archive_of_node(&documents).unwrap());
    let documents = Documents::from([("status.json", json!({"verdict": "at-risk", "mappings": 2}))]);
    write("node-2.tar.gz", &archive_of_node(&documents).unwrap());
    script
}

fn files(archive: &[u8]) -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    for entry in tar::Archive::new(GzDecoder::new(archive)).entries().unwrap() {
        let mut entry = entry.unwrap();
        let (name, mut text) = (entry.path().unwrap().display().to_string(), String::new());
        entry.read_to_string(&mut text).unwrap();
        files.insert(name, text);
    }
    files
}

fn args(nodes: &[&str]) -> ClusterBundleArgs {
    ClusterBundleArgs {
        node: nodes.iter().map(|name| (*name).to_owned()).collect(),
        file: None,
        flows: false,
        create_pods: false,
        image: None,
    }
}

fn collect(script: &Script, nodes: &[&str]) -> anyhow::Result<(ExitCode, BTreeMap<String, String>)> {
    collect_with(script, &args(nodes))
}

fn collect_with(script: &Script, args: &ClusterBundleArgs) -> anyhow::Result<(ExitCode, BTreeMap<String, String>)> {
    let mut out = Vec::new();
    let limit = Interrupt::new(Duration::from_mins(1));
    let code = script.with_kubectl(|kubectl| write(kubectl, args, &limit, &mut out))?;
    Ok((code, files(&out)))
}

#[test]
fn nodes_that_cannot_be_collected_are_named_and_do_not_stop_the_others() {
    let (code, files) = collect(&cluster("bundle-all"), &[]).unwrap();
    assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::from(2)));
    let names: Vec<&str> = files.keys().map(|name| name.strip_prefix("npl-bundle/").unwrap()).collect();
    let views = ["agents", "check", "mappings", "nodes", "status"].map(|name| format!("cluster/{name}.json"));
    let of_node = ["nodes/node-1/errors.json", "nodes/node-1/status.json"];
    let expected: Vec<&str> = iter::once("README.txt")
        .chain(views.iter().map(String::as_str))
        .chain(of_node)
        .chain(iter::once("summary.json"))
        .collect();
    assert_eq!(names, expected);
    for (name, content) in &files {
        assert!(!content.contains(CANARY), "{name}: {content}");
    }

    let summary: Value = serde_json::from_str(&files["npl-bundle/summary.json"]).unwrap();
    assert_eq!((&summary["collected"], &summary["missing"]), (&json!(1), &json!(4)));
    assert_eq!(summary["clusterErrors"], json!({}));
    let rows = summary["nodes"].as_array().unwrap();
    assert_eq!((&rows[0]["collected"], &rows[0]["ignoredFiles"]), (&json!(true), &json!(1)));
    let reasons = [
        "the agent's container does not run (waiting: CrashLoopBackOff, 3 restarts, last exit code 1): `kubectl npl \
         bundle --node node-2 --create-pods`",
        "no agent's Pod is on this Node: `kubectl npl bundle --node node-3 --create-pods`",
        "`npl-agent bundle`: unable to upgrade connection",
        "read the Node's archive",
    ];
    for (row, reason) in rows[1..].iter().zip(reasons) {
        assert!(row["reason"].as_str().unwrap().starts_with(reason), "{row}");
    }
    let status: Value = serde_json::from_str(&files["npl-bundle/cluster/status.json"]).unwrap();
    let verdicts: Vec<&Value> = status.as_array().unwrap().iter().map(|row| &row["verdict"]).collect();
    assert_eq!(verdicts[0], "healthy");
    assert!(verdicts[1..].iter().all(|verdict| *verdict == verdicts[1] && *verdict != "healthy"), "{status}");
}

/// The new Pod on the second Node runs, and the new Pod on the third Node fails.
#[test]
fn nodes_without_a_running_agent_are_collected_in_new_pods_which_are_removed() {
    let script = cluster("bundle-pods");
    let with_pods = |nodes: &[&str]| ClusterBundleArgs { create_pods: true, ..args(nodes) };
    let (code, files) = collect_with(&script, &with_pods(&["node-1", "node-2", "node-3"])).unwrap();
    assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::from(2)));
    let summary: Value = serde_json::from_str(&files["npl-bundle/summary.json"]).unwrap();
    let rows = summary["nodes"].as_array().unwrap();
    let states: Vec<_> = rows.iter().map(|row| (row["collected"].as_bool(), row["inNewPod"].as_bool())).collect();
    assert_eq!(states, [(true, false), (true, true), (false, false)].map(|(a, b)| (Some(a), Some(b))));
    let reason = rows[2]["reason"].as_str().unwrap();
    assert!(reason.starts_with("no agent's Pod is on this Node: Pod node-3 has failed: OutOfcpu"), "{reason}");
    let status: Value = serde_json::from_str(&files["npl-bundle/cluster/status.json"]).unwrap();
    assert_eq!((&status[1]["verdict"], &status[1]["mappings"]), (&json!("at-risk"), &json!(2)));
    let objects = fs::read_to_string(script.0.join("objects")).unwrap();
    // Several processes append objects at the same time, so an object does not always begin on a new line.
    let created: Result<Vec<Value>, _> = serde_json::Deserializer::from_str(&objects).into_iter().collect();
    let created = created.unwrap();
    let count = |kind: &str| created.iter().filter(|object| object["kind"] == kind).count();
    assert_eq!(["Namespace", "ServiceAccount", "Pod"].map(count), [1, 1, 2]);
    let of_pods = created.iter().filter(|object| object["kind"] == "Pod");
    let nodes: std::collections::BTreeSet<_> = of_pods.map(|pod| pod["spec"]["nodeName"].as_str().unwrap()).collect();
    assert!(nodes.into_iter().eq(["node-2", "node-3"]));
    let deleted = fs::read_to_string(script.0.join("deleted")).unwrap();
    assert_eq!(deleted.lines().count(), 1, "{deleted}");

    // If an agent runs on each Node, no Pod is created.
    let (code, _) = collect_with(&script, &with_pods(&["node-1"])).unwrap();
    assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::SUCCESS));
    assert_eq!(fs::read_to_string(script.0.join("objects")).unwrap(), objects);
}

#[test]
fn the_pods_are_removed_if_they_cannot_be_created_or_the_archive_cannot_be_written() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::Error::other("full"))
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let args = ClusterBundleArgs { create_pods: true, ..args(&["node-2"]) };
    let script = cluster("bundle-forbidden");
    let text = fs::read_to_string(script.0.join("kubectl")).unwrap();
    let forbidden = text.replace("cat >> objects; echo >> objects", "echo forbidden >&2; exit 1");
    fs::write(script.0.join("kubectl"), forbidden).unwrap();
    let error = collect_with(&script, &args).unwrap_err();
    assert!(format!("{error:#}").contains("forbidden"), "{error:#}");
    assert!(script.0.join("deleted").exists());

    let script = cluster("bundle-full");
    let limit = Interrupt::new(Duration::from_mins(1));
    assert!(script.with_kubectl(|kubectl| write(kubectl, &args, &limit, Full)).is_err());
    assert_eq!(script.0.join("objects").exists(), script.0.join("deleted").exists());
}

#[test]
fn only_the_nodes_that_are_asked_for_are_collected() {
    let script = cluster("bundle-one");
    let (code, files) = collect(&script, &["node-1"]).unwrap();
    assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::SUCCESS));
    let summary: Value = serde_json::from_str(&files["npl-bundle/summary.json"]).unwrap();
    assert_eq!(summary["nodes"].as_array().unwrap().len(), 1);
    let error = collect(&script, &["node-1", "node-9"]).unwrap_err();
    assert!(error.to_string().contains("the cluster has no Node node-9"), "{error:#}");
}

/// Makes the script fail as kubectl does if the API server rejects the list of Nodes for this reason.
fn reject_list_of_nodes(script: &Script, reason: &str) {
    let text = fs::read_to_string(script.0.join("kubectl")).unwrap();
    let rejected = format!("echo '{{\"items\": []}}'; echo 'Error from server ({reason}): nodes' >&2; exit 1");
    fs::write(script.0.join("kubectl"), text.replace("cat nodes.json", &rejected)).unwrap();
}

/// If the user may not list Nodes, the command takes the Nodes' names from the agents' Pods and from `--node`.
#[test]
fn without_the_right_to_list_nodes_the_nodes_with_agents_are_collected() {
    let script = cluster("bundle-denied");
    reject_list_of_nodes(&script, "Forbidden");
    let (code, files) = collect(&script, &[]).unwrap();
    assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::from(2)));
    let summary: Value = serde_json::from_str(&files["npl-bundle/summary.json"]).unwrap();
    assert_eq!((&summary["collected"], &summary["missing"]), (&json!(1), &json!(3)));
    let errors = summary["clusterErrors"].as_object().unwrap();
    assert_eq!(errors.keys().collect::<Vec<_>>(), ["check.json", "nodes.json"]);
    assert!(errors["nodes.json"].as_str().unwrap().contains("(Forbidden)"), "{errors:?}");

    // The existence of a named Node is unknown, so the command must not deny it.
    let (_, files) = collect(&script, &["node-3"]).unwrap();
    let summary: Value = serde_json::from_str(&files["npl-bundle/summary.json"]).unwrap();
    let reason = summary["nodes"][0]["reason"].as_str().unwrap();
    assert!(reason.starts_with("no agent's Pod is on this Node"), "{reason}");

    fs::write(script.0.join("agents.json"), r#"{"items": []}"#).unwrap();
    let error = collect(&script, &[]).unwrap_err();
    assert!(error.to_string().contains("you may not list Nodes"), "{error:#}");
}

#[test]
fn an_unavailable_list_of_nodes_is_not_taken_for_a_missing_permission() {
    let script = cluster("bundle-unavailable");
    reject_list_of_nodes(&script, "ServiceUnavailable");
    let error = collect(&script, &[]).unwrap_err();
    assert!(format!("{error:#}").contains("Error from server (ServiceUnavailable): nodes"), "{error:#}");
}

#[test]
fn the_remaining_nodes_are_named_after_the_time_limit() {
    let script = cluster("bundle-limit");
    let over = Interrupt::new(Duration::ZERO);
    let names: Vec<String> = ["node-1", "node-2"].map(str::to_owned).into();
    let rows = script.with_kubectl(|kubectl| {
        let agents = agents(kubectl).unwrap();
        let plans = summary::plan(&names, &[], &agents).unwrap();
        let mut archive = ClusterArchive::new(Vec::new()).unwrap();
        add_nodes(kubectl.within(&over), &args(&[]), None, &plans, &mut archive).unwrap().0
    });
    let text = rows.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    assert!(text.contains("Node node-1 is not in the archive: the time limit of 0 s is over"), "{text}");
    assert_eq!(rows.len(), 2);
}

#[test]
fn a_reason_is_one_line_of_limited_length() {
    assert_eq!(summary::shortened("a\nb  c\n"), "a b c");
    assert_eq!(summary::shortened(&"é".repeat(600)).chars().count(), 501);
}
