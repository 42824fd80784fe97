// SPDX-License-Identifier: Apache-2.0
//! Tests of `kubectl npl on --create-pod`. A script takes the place of kubectl.

use std::{fs, path::Path};

use super::*;
use crate::cli::kubectl::script::Script;

/// A script that takes the place of kubectl, and records the requests and the created objects. Each Pod runs at once,
/// and the command in the Pod exits with 3.
const KUBECTL: &str = r#"
echo "$*" >> requests
case "$*" in
    *" get node "*) echo node/node-2 ;;
    *" get "*namespaces*) echo '{"items": []}' ;;
    *" get "*pods*) echo '{"items": [{"metadata": {"name": "node-2"},
        "status": {"containerStatuses": [{"state": {"running": {}}}]}}]}' ;;
    *" create "*) cat >> objects; echo >> objects ;;
    *" exec "*) exit 3 ;;
esac
"#;

fn args(node: &str) -> OnArgs {
    OnArgs {
        node: node.to_owned(),
        create_pod: true,
        image: None,
        arguments: vec!["status".to_owned(), "--output=json".to_owned()],
    }
}

/// Runs the command, and returns the requests to kubectl. `NAMESPACE` replaces the random name of the Namespace.
fn requests(script: &Script, interrupt: &Interrupt) -> (anyhow::Result<ExitCode>, Vec<String>) {
    let result =
        script.with_kubectl(|kubectl| run_with(kubectl.within(interrupt), &args("node-2"), "npl:1", interrupt));
    let requests = fs::read_to_string(script.0.join("requests")).unwrap();
    let words = |line: &str| {
        let words = line.split(' ').skip(2);
        let words = words.map(|word| if word.starts_with("npl-on-") { "NAMESPACE" } else { word });
        words.collect::<Vec<_>>().join(" ")
    };
    (result, requests.lines().map(words).collect())
}

#[test]
fn the_pod_is_removed_after_the_command_whose_exit_code_is_returned() {
    let script = Script::new("on", KUBECTL);
    let (result, requests) = requests(&script, &Interrupt::new(Duration::from_mins(1)));
    assert_eq!(result.unwrap(), ExitCode::from(3));
    let (create, pods) =
        ("create --filename -", "get --output json pods --namespace NAMESPACE --field-selector metadata.name=node-2");
    let exec = "exec --namespace NAMESPACE node-2 --container npl-agent -- /npl-agent status --output=json";
    let delete = "delete namespace NAMESPACE --ignore-not-found --wait --timeout=90s";
    let leftovers = "get --output json namespaces --selector app.kubernetes.io/name=npl-on";
    assert_eq!(requests, ["get node node-2 --output name", leftovers, create, create, create, pods, exec, delete]);
    let objects = fs::read_to_string(script.0.join("objects")).unwrap();
    let created: Vec<Value> = objects.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let pod = &created[2];
    assert_eq!(created[0]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"], "privileged");
    assert_eq!((&pod["spec"]["nodeName"], &pod["spec"]["containers"][0]["image"]), (&json!("node-2"), &json!("npl:1")));
}

#[test]
fn the_pod_is_removed_after_a_failure_and_after_an_interruption() {
    let fails = KUBECTL.replace("cat >> objects; echo >> objects", "echo forbidden >&2; exit 1");
    let (result, failed) = requests(&Script::new("on-fails", &fails), &Interrupt::new(Duration::from_mins(1)));
    assert!(format!("{:#}", result.unwrap_err()).contains("forbidden"));
    let hangs = KUBECTL.replace("exit 3", "exec sleep 60");
    let limit = Interrupt::new(Duration::from_secs(2));
    let (result, interrupted) = requests(&Script::new("on-hangs", &hangs), &limit);
    assert!(result.unwrap_err().to_string().contains("time limit"));
    for requests in [failed, interrupted] {
        assert!(requests.last().unwrap().starts_with("delete namespace NAMESPACE"), "{requests:?}");
    }
}

#[test]
fn nothing_is_created_for_a_node_that_does_not_exist() {
    let missing = KUBECTL.replace("echo node/node-2", "echo 'nodes \"node-2\" not found' >&2; exit 1");
    let (result, requests) = requests(&Script::new("on-missing", &missing), &Interrupt::new(Duration::from_mins(1)));
    assert!(result.unwrap_err().to_string().contains("not found"));
    assert_eq!(requests, ["get node node-2 --output name"]);
}

#[test]
fn a_pod_that_is_left_changes_the_exit_code_of_success() {
    assert_eq!(exit_code(Some(0), true), ExitCode::SUCCESS);
    assert_eq!(exit_code(Some(0), false), ExitCode::from(2));
    assert_eq!(exit_code(Some(1), false), ExitCode::from(1));
    assert_eq!(exit_code(None, true), ExitCode::FAILURE);
}

/// The Pod must not have more or fewer rights than the agents that the manifest creates.
#[test]
fn the_container_has_the_rights_of_the_agents_container() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/npl.yaml");
    let objects: Vec<Value> = serde_saphyr::from_multiple(&fs::read_to_string(path).unwrap()).unwrap();
    let agent = objects.iter().find(|object| object["kind"] == "DaemonSet").unwrap();
    let agent = &agent["spec"]["template"]["spec"];
    let pod = Script::new("on-rights", "").with_kubectl(|kubectl| {
        let namespace = TemporaryNamespace::new(kubectl, &NAMESPACE);
        pod(&namespace, "node-2", "npl:1")["spec"].take()
    });
    let container = ["name", "securityContext", "resources/limits"].map(|field| format!("/containers/0/{field}"));
    for rights in ["/securityContext", "/hostNetwork", "/hostPID"].map(str::to_owned).into_iter().chain(container) {
        assert_eq!(pod.pointer(&rights), agent.pointer(&rights), "{rights}");
    }
}
