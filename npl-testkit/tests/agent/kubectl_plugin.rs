// SPDX-License-Identifier: Apache-2.0
//! Tests `kubectl npl` with a real API server. There is no kubelet, so a script replaces `kubectl` in these tests. If
//! the plug-in executes a command in the agent's Pod, the script runs the command on the Node itself. The script also
//! answers for the replicas of the feed, and passes all other commands to kubectl.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use npl_testkit::agent;
use npl_testkit::cluster::PodObject;
use npl_testkit::tools;
use serde_json::{Value, json};

use crate::world::{NAMESPACE, NODE, World};

const AGENT_NAMESPACE: &str = "npl-system";
/// A text in environment variables, labels and annotations. A support archive must not contain this text.
const CANARY: &str = "4d2c-canary";

/// Creates a folder with the script `kubectl` and the plug-in. The tests put this folder at the beginning of `PATH`.
fn programs(world: &World) -> PathBuf {
    let folder = world.run.file("bin");
    fs::create_dir(&folder).unwrap();
    let agent = agent::find_binary().unwrap();
    symlink(&agent, folder.join("kubectl-npl")).unwrap();
    let path = std::env::var("PATH").unwrap();
    let real = path.split(':').map(|folder| PathBuf::from(folder).join("kubectl")).find(|path| path.exists()).unwrap();
    let script = format!(
        "#!/bin/sh\nfor word in \"$@\"; do\n\
         if [ \"$word\" = exec ]; then is_exec=1; fi\n\
         case \"$word\" in */proxy/v1/members/shop/web) cat {}/\"$(basename \"${{word%%:*}}\")\"; exit;; esac\n\
         done\n\
         if [ -z \"$is_exec\" ]; then exec {} \"$@\"; fi\n\
         while [ \"$1\" != -- ]; do shift; done\nshift 2\nexec {} \"$@\"\n",
        world.run.file("feed").display(),
        real.display(),
        agent.display()
    );
    tools::write_program(&folder.join("kubectl"), &script).unwrap();
    folder
}

/// Returns the exit code and output of `kubectl npl`.
fn kubectl_npl(world: &World, programs: &Path, arguments: &[&str]) -> (i32, String) {
    let mut command = world.topology.node().command(programs.join("kubectl")).unwrap();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let runtime_dir = world.agent_options(&[]).runtime_dir;
    command.arg("npl").args(arguments).stdin(Stdio::null());
    command.env("PATH", path).env("KUBECONFIG", world.plane.admin_kubeconfig());
    command.env("NPL_BPFFS", world.bpffs.path()).env("NPL_RUNTIME_DIR", runtime_dir);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code().unwrap(), text)
}

/// Creates the Pod of the agent, with the status that scheduler and kubelet would write.
fn create_agent_pod(world: &World) {
    create_agent_pod_on(world, NODE, "npl-agent-1", &json!({"running": {}}));
}

/// Creates the Pod of an agent on a Node, with a container in this state.
fn create_agent_pod_on(world: &World, node: &str, name: &str, state: &Value) {
    let labels = json!({"app.kubernetes.io/name": "npl", "app.kubernetes.io/component": "agent"});
    let env = json!([{"name": "NPL_NODE_NAME", "value": CANARY}]);
    let pod = json!({
        "metadata": {"name": name, "namespace": AGENT_NAMESPACE, "labels": labels, "annotations": {"canary": CANARY}},
        "spec": {"nodeName": node, "containers": [{"name": "npl-agent", "image": "none", "env": env}]},
    });
    let pods = format!("/api/v1/namespaces/{AGENT_NAMESPACE}/pods");
    world.cluster.client().create(&pods, &pod).unwrap();
    let container = json!({"name": "npl-agent", "image": "", "imageID": "", "ready": true, "restartCount": 5,
                           "state": state});
    let status = json!({"status": {"phase": "Running", "containerStatuses": [container]}});
    world.cluster.client().merge_patch(&format!("{pods}/{name}/status"), &status).unwrap();
}

/// Creates the Pod of a replica of the feed, and the file with the answer that the script `kubectl` gives for this
/// replica: one member at this node port.
fn create_replica(world: &World, name: &str, node_port: u16) {
    let labels = json!({"app.kubernetes.io/name": "npl", "app.kubernetes.io/component": "feed"});
    let pod = json!({
        "metadata": {"name": name, "namespace": AGENT_NAMESPACE, "labels": labels},
        "spec": {"nodeName": NODE, "containers": [{"name": "npl-feed", "image": "none"}]},
    });
    let pods = format!("/api/v1/namespaces/{AGENT_NAMESPACE}/pods");
    world.cluster.client().create(&pods, &pod).unwrap();
    let status = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    world.cluster.client().merge_patch(&format!("{pods}/{name}/status"), &status).unwrap();
    let member = json!({"address": world.node_ip(), "port": node_port, "pod": "web-0", "node": NODE, "zone": "",
                        "ready": true, "draining": false, "weight": 1});
    let version = format!("{node_port:032}");
    let names = json!({"xds": "web.shop:http", "http": "/v1/members/shop/web/http"});
    let port = json!({"namespace": "shop", "service": "web", "port": 80, "name": "http", "protocol": "tcp",
                      "version": version, "names": names, "members": [member]});
    let folder = world.run.file("feed");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join(name), json!({"version": version, "ports": [port]}).to_string()).unwrap();
}

#[test]
fn the_plugin_shows_what_the_replicas_of_the_feed_serve() {
    let world = World::with_agent(&[]);
    let programs = programs(&world);
    let run = |arguments: &[&str]| kubectl_npl(&world, &programs, arguments);
    let members = ["members", "web:http", "--namespace", "shop", "--settle", "0s"];
    let (code, none) = run(&members);
    assert!(code == 2 && none.contains("no replica of npl-feed is in namespace npl-system"), "{code} {none}");
    assert!(none.starts_with("kubectl npl: "), "{none}");
    for name in ["npl-feed-a", "npl-feed-b"] {
        create_replica(&world, name, 61000);
    }
    let (code, table) = run(&members);
    let address = format!("{}:61000", world.node_ip());
    for expected in ["http (80)", &address, "tcp", "web-0", NODE, "ready", "web.shop:http", "Replicas of the feed: 2"] {
        assert!(code == 0 && table.contains(expected), "{expected} is not in {code} {table}");
    }
    create_replica(&world, "npl-feed-c", 61001);
    let (code, differ) = run(&members);
    assert!(code == 1 && differ.contains("The replicas differ.") && differ.contains("npl-feed-c"), "{code} {differ}");
    let (code, json) = run(&[&members[..], &["--output", "json"]].concat());
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((code, &json["agree"], json["replicas"].as_array().map(Vec::len)), (1, &json!(false), Some(3)));
}

#[test]
fn the_plugin_shows_and_checks_the_whole_cluster() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let programs = programs(&world);
    let (code, nobody) = kubectl_npl(&world, &programs, &["status"]);
    assert!(code == 2 && nobody.contains("no agent's Pod is on this Node"), "{code} {nobody}");
    create_agent_pod(&world);
    let run = |arguments: &[&str]| kubectl_npl(&world, &programs, arguments);

    let (code, status) = run(&["status", "--output", "json"]);
    let row = &serde_json::from_str::<Value>(&status).unwrap()[0];
    assert_eq!(
        (code, &row["node"], &row["verdict"], &row["published"]),
        (0, &json!(NODE), &json!("healthy"), &json!(2))
    );
    let (code, mappings) = run(&["mappings", "--namespace", NAMESPACE]);
    let address = format!("{}:61000", world.node_ip());
    for expected in ["shop/web-0", NODE, &address, "8080", "web"] {
        assert!(code == 0 && mappings.contains(expected), "{expected} is not in {mappings}");
    }
    let (code, chain) = run(&["why", "service/shop/web"]);
    assert!(code == 0 && chain.contains("pod shop/web-0, port 8080/udp IPv4"), "{code} {chain}");
    let (code, flows) = run(&["on", NODE, "flows", "--output", "json"]);
    assert!(code == 0 && flows.contains("web-0"), "{code} {flows}");
    let (code, refused) = run(&["on", "node-9", "flows"]);
    assert!(code == 2 && refused.contains("no agent's Pod is on Node node-9"), "{code} {refused}");
    assert_eq!(run(&["check"]), (0, "Every annotation matches its Services and its Node.\n".to_owned()));

    // The new Pod is on Node `node-2`, where no agent runs. `why` must still examine the Pods on the other Node.
    world.cluster.create_pod(&PodObject::new(NAMESPACE, "far", "node-2", "web")).unwrap();
    let (code, chain) = run(&["why", "service/shop/web"]);
    let missing = "the Pods on Node node-2 are not examined: no agent's Pod is on this Node";
    assert!(code == 2 && chain.contains("pod shop/web-0, port 8080/udp IPv4"), "{code} {chain}");
    assert_eq!(chain.matches(missing).count(), 1, "{chain}");
    let (code, answer) = run(&["why", "service/shop/web", "--output", "json"]);
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!((code, &answer["missing"]), (2, &json!([missing])));
    assert!(answer.to_string().contains("pod shop/web-0, port 8080/tcp IPv4"), "{answer}");

    // The agent is killed, so that the annotation does not follow the change of the Service.
    world.agent.as_mut().unwrap().kill().unwrap();
    world.cluster.set_service_enabled(NAMESPACE, "web", false).unwrap();
    let run = |arguments: &[&str]| kubectl_npl(&world, &programs, arguments);
    let (code, found) = run(&["check", "--settle", "100ms"]);
    assert!(code == 1 && found.contains("stale") && found.contains("shop/web-0"), "{code} {found}");
    let (code, ignored) = run(&["why", "service/shop/web"]);
    assert!(code == 1 && ignored.contains("nodeportlocal.antrea.io/enabled is not exactly"), "{code} {ignored}");
    let (code, ignored) = run(&["why", "service/shop/web", "--output", "json"]);
    let ignored: Value = serde_json::from_str(&ignored).unwrap();
    let link = ignored.pointer("/chains/0/links/0").unwrap();
    assert_eq!((code, &link["link"], &link["holds"]), (1, &json!("enabled"), &json!("no")));
    let (code, status) = run(&["status"]);
    assert!(code == 1 && status.contains("traffic at risk"), "{code} {status}");
}

#[test]
fn the_plugin_collects_every_node_and_names_those_that_it_cannot_collect() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let foreign = json!({"metadata": {"annotations": {"example.com/password": CANARY}, "labels": {"canary": CANARY}}});
    for object in [format!("/api/v1/namespaces/{NAMESPACE}/pods/web-0"), format!("/api/v1/nodes/{NODE}")] {
        world.cluster.client().merge_patch(&object, &foreign).unwrap();
    }
    create_agent_pod(&world);
    for node in ["node-8", "node-9"] {
        world.cluster.create_node(node, &[]).unwrap();
    }
    let state = json!({"waiting": {"reason": "CrashLoopBackOff", "message": CANARY}});
    create_agent_pod_on(&world, "node-8", "npl-agent-8", &state);
    let programs = programs(&world);
    let archive = world.run.file("cluster.tar.gz");
    let file = archive.to_str().unwrap();
    let (code, progress) = kubectl_npl(&world, &programs, &["bundle", "--file", file]);
    assert!(code == 2 && progress.contains("the documents of 1 of 3 Nodes"), "{code} {progress}");
    assert!(progress.contains("Node node-9 is not in the archive: no agent's Pod is on this Node"), "{progress}");

    let folder = world.run.file("cluster");
    fs::create_dir(&folder).unwrap();
    tools::output(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&folder)).unwrap();
    let folder = folder.join("npl-bundle");
    let read = |name: &str| serde_json::from_str::<Value>(&fs::read_to_string(folder.join(name)).unwrap()).unwrap();
    let summary = read("summary.json");
    assert_eq!(summary["clusterErrors"], json!({}));
    let rows = summary["nodes"].as_array().unwrap().iter();
    let rows: Vec<_> = rows.map(|row| (row["node"].as_str().unwrap(), row["collected"].as_bool().unwrap())).collect();
    assert_eq!(rows, [(NODE, true), ("node-8", false), ("node-9", false)]);
    let reason = summary["nodes"][1]["reason"].as_str().unwrap();
    assert!(reason.contains("waiting: CrashLoopBackOff, 5 restarts"), "{reason}");
    let of_node = |name: &str| read(&format!("nodes/{NODE}/{name}.json"));
    assert_eq!(of_node("agent")["nodePorts"][0]["pod"], "web-0");
    assert_eq!(of_node("errors"), json!({}));
    for name in ["doctor", "mappings", "pins", "status", "version"] {
        assert!(!of_node(name).is_null(), "{name}");
    }
    assert_eq!(read("cluster/status.json")[0]["verdict"], "healthy");
    assert_eq!(read("cluster/mappings.json")[0]["pod"], "web-0");
    assert_eq!(read("cluster/check.json"), json!([]));
    assert_eq!(read("cluster/agents.json").as_array().unwrap().len(), 2);
    assert_eq!(read("cluster/nodes.json").as_array().unwrap().len(), 3);
    let found = Command::new("grep").args(["-r", CANARY]).arg(&folder).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "");

    let (code, refused) = kubectl_npl(&world, &programs, &["bundle", "--file", file]);
    assert!(code == 2 && refused.contains("choose the path of a new file"), "{code} {refused}");
    let one = world.run.file("one.tar.gz");
    let (code, progress) = kubectl_npl(&world, &programs, &["bundle", "--node", NODE, "--file", one.to_str().unwrap()]);
    assert!(code == 0 && progress.contains("the documents of 1 of 1 Nodes"), "{code} {progress}");
}
