// SPDX-License-Identifier: Apache-2.0
//! Tests the commands that work on a Node where no agent runs: `kubectl npl on NODE --create-pod` and
//! `kubectl npl bundle --create-pods`.

use std::fs;
use std::process::{Command, Output};

use npl_testkit::poll;
use npl_testkit::tools;
use serde_json::{Value, json};

use crate::agent;
use crate::traffic::PORTS;
use crate::world::{AGENT_NAMESPACE, LIMIT, World};

const NODE: &str = "node-2";

fn on(world: &World, arguments: &[&str]) -> Output {
    world.plug_in(&[&["on", NODE], arguments].concat()).output().unwrap()
}

/// Returns the standard output of a successful command, and checks that its Pod has been removed.
fn output(world: &World, arguments: &[&str]) -> String {
    let output = on(world, &[&["--create-pod"], arguments].concat());
    let notes = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let is_in_pod = notes.contains("creating a Pod there in Namespace npl-on-");
    assert!(output.status.success() && is_in_pod, "{arguments:?}: {notes}{text}");
    assert!(namespaces(world).is_empty(), "{notes}");
    text
}

fn namespaces(world: &World) -> Vec<Value> {
    world.namespaces_named("npl-on")
}

/// Restricts the agents to the Node with this host name; with `null`, lets them run on all Nodes.
fn select_nodes(world: &World, host: &Value) {
    let patch = json!({"spec": {"template": {"spec": {"nodeSelector": {"kubernetes.io/hostname": host}}}}});
    let agents = ["patch", "daemonset/npl-agent", "--namespace", AGENT_NAMESPACE];
    world.kubectl(&[&agents[..], &["--patch", &patch.to_string()]].concat());
    world.wait_for_rollout(AGENT_NAMESPACE, "daemonset/npl-agent");
}

/// Without an agent on the Node, the commands read the kernel state that the agent has left, and the Pod is removed
/// after each command and after an interruption.
pub(crate) fn commands_run_in_a_pod_on_a_node_without_an_agent(world: &mut World) {
    let shop = world.wait_for_shop(4);
    select_nodes(world, &json!("node-1"));
    let is_gone = || {
        let agents = world.pods(AGENT_NAMESPACE, "app.kubernetes.io/component=agent");
        agents.iter().all(|agent| agent.node != NODE).then_some(())
    };
    poll::until("the agent of the Node to end", LIMIT, is_gone).unwrap();

    let refused = on(world, &["doctor"]);
    let notes = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && notes.contains("--create-pod"), "{notes}");
    assert!(namespaces(world).is_empty());

    // No agent runs on this Node, so the plug-in gives the new Pod the image of the agent on the other Node.
    let findings = output(world, &["doctor", "--output", "json"]);
    let findings: Vec<Value> = serde_json::from_str(&findings).unwrap();
    assert!(findings.iter().any(|finding| finding["key"] == "bpffs" && finding["state"] == "ok"), "{findings:#?}");
    let mappings: Vec<Value> = serde_json::from_str(&output(world, &["mappings", "--output", "json"])).unwrap();
    let pods = shop.values().filter(|pod| pod.node == NODE).count();
    assert!(pods > 0 && mappings.len() >= pods * PORTS, "{mappings:#?}");

    let running = world.plug_in(&["on", NODE, "--create-pod", "trace", "--duration", "5m"]).spawn().unwrap();
    let is_running = || {
        let pods = world.cluster.cluster().client().get("/api/v1/pods?labelSelector=app.kubernetes.io/name%3Dnpl-on");
        let pods = pods.unwrap();
        (pods["items"][0]["status"]["phase"] == "Running").then_some(())
    };
    poll::until("the Pod of the command", LIMIT, is_running).unwrap();
    assert!(Command::new("kill").args(["-INT", &running.id().to_string()]).status().unwrap().success());
    let ended = running.wait_with_output().unwrap();
    let notes = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.code() == Some(2) && notes.contains("interrupted"), "{notes}");
    assert!(namespaces(world).is_empty(), "{notes}");

    select_nodes(world, &Value::Null);
    assert_eq!(agent::on(world, NODE).node, NODE);
}

/// Returns the Node whose agent's container waits for its next restart after a crash.
fn crashing_node(world: &World) -> Option<String> {
    let selector = "labelSelector=app.kubernetes.io/component%3Dagent";
    let path = format!("/api/v1/namespaces/{AGENT_NAMESPACE}/pods?{selector}");
    let pods = world.cluster.cluster().client().get(&path).unwrap();
    let is_crashing = |pod: &&Value| {
        let containers = pod["status"]["containerStatuses"].as_array();
        containers.into_iter().flatten().any(|it| it["state"]["waiting"]["reason"] == "CrashLoopBackOff")
    };
    let pod = pods["items"].as_array()?.iter().find(is_crashing)?;
    pod["spec"]["nodeName"].as_str().map(str::to_owned)
}

/// An invalid option makes the agent of one Node crash, and the rollout stops at this Node. With `--create-pods`, the
/// archive contains the kernel state of this Node; without this flag, the command creates no Pod.
pub(crate) fn the_support_archive_has_the_node_whose_agent_is_in_a_crash_loop(world: &mut World) {
    let shop = world.wait_for_shop(4);
    let variables = ["set", "env", "daemonset/npl-agent", "--namespace", AGENT_NAMESPACE, "--containers=npl-agent"];
    world.kubectl(&[&variables[..], &["NPL_RESYNC=wrong"]].concat());
    let (node, _) = poll::until("an agent in a crash loop", LIMIT, || crashing_node(world)).unwrap();

    let bundle = |name: &str, flags: &[&str]| {
        let file = world.cluster.run().file(name);
        let output = world.plug_in(&[&["bundle", "--file", file.to_str().unwrap()], flags].concat()).output().unwrap();
        let folder = world.cluster.run().file(&format!("{name}-unpacked"));
        fs::create_dir(&folder).unwrap();
        tools::output(Command::new("tar").arg("-xzf").arg(&file).arg("-C").arg(&folder)).unwrap();
        assert!(world.namespaces_named("npl-bundle").is_empty());
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned(), folder.join("npl-bundle"))
    };
    let (code, notes, folder) = bundle("without-pods.tar.gz", &["--node", &node]);
    assert!(code == Some(2) && notes.contains("--create-pods"), "{code:?} {notes}");
    assert!(!notes.contains("creating") && !folder.join("nodes").exists(), "{notes}");

    let (code, notes, folder) = bundle("with-pods.tar.gz", &["--create-pods"]);
    assert!(code == Some(0) && notes.contains("collected in a new Pod"), "{code:?} {notes}");
    let read = |name: &str| serde_json::from_str::<Value>(&fs::read_to_string(folder.join(name)).unwrap()).unwrap();
    let rows = read("summary.json")["nodes"].clone();
    for row in rows.as_array().unwrap() {
        assert_eq!(
            (&row["collected"], &row["inNewPod"]),
            (&json!(true), &json!(row["node"] == node.as_str())),
            "{row}"
        );
    }
    let mappings = read(&format!("nodes/{node}/mappings.json"));
    let pods = shop.values().filter(|pod| pod.node == node).count();
    assert!(pods > 0 && mappings.as_array().unwrap().len() >= pods * PORTS, "{mappings:#}");

    world.kubectl(&[&variables[..], &["NPL_RESYNC-"]].concat());
    world.wait_for_rollout(AGENT_NAMESPACE, "daemonset/npl-agent");
}
