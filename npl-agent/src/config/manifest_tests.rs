// SPDX-License-Identifier: Apache-2.0
//! Checks that the manifests in `deploy/` agree with each other and with the command line.

use std::{collections::BTreeSet, fs, path::Path};

use clap::CommandFactory as _;
use npl_common::names::PIN_ROOT;
use serde_json::Value;

use super::args::Cli;

/// The objects of a YAML file of the repository.
fn objects(file: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
    let text = fs::read_to_string(&path).unwrap();
    serde_saphyr::from_multiple(&text).unwrap()
}

/// The object of a kind with the name `npl-agent`.
fn object(file: &str, kind: &str) -> Value {
    let is_meant = |object: &Value| object["kind"] == kind && object["metadata"]["name"] == "npl-agent";
    objects(file).into_iter().find(is_meant).unwrap_or_else(|| panic!("{file} has no {kind} npl-agent"))
}

fn pod() -> Value {
    object("deploy/npl.yaml", "DaemonSet")["spec"]["template"]["spec"].take()
}

fn pod_namespace() -> String {
    object("deploy/npl.yaml", "DaemonSet")["metadata"]["namespace"].as_str().unwrap().to_owned()
}

/// The elements of a list; an absent list has none.
fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn strings(value: &Value) -> BTreeSet<&str> {
    list(value).iter().filter_map(Value::as_str).collect()
}

/// All containers of the agent's Pod.
fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    list(&pod["initContainers"]).iter().chain(list(&pod["containers"]))
}

fn variable<'a>(container: &'a Value, name: &str) -> Option<&'a str> {
    list(&container["env"]).iter().find(|variable| variable["name"] == name)?["value"].as_str()
}

/// The path at which a container mounts a folder of the Node.
fn mount_point<'a>(pod: &'a Value, container: &'a Value, folder: &str) -> Option<&'a str> {
    let volume = list(&pod["volumes"]).iter().find(|volume| volume["hostPath"]["path"] == folder)?;
    let mount = list(&container["volumeMounts"]).iter().find(|mount| mount["name"] == volume["name"])?;
    mount["mountPath"].as_str()
}

/// Arguments are seen by one process. Variables are also seen by `kubectl exec ds/npl-agent -- /npl-agent status`.
#[test]
fn each_command_in_a_container_uses_the_bpffs_and_cgroup_of_the_agent() {
    let pod = pod();
    for container in containers(&pod) {
        let name = &container["name"];
        // Only NPL's own folder: other programs' pins are none of the agent's business.
        let folder = Path::new("/sys/fs/bpf").join(PIN_ROOT);
        let pins = mount_point(&pod, container, folder.to_str().unwrap());
        let expected = variable(container, "NPL_BPFFS").map(|bpffs| Path::new(bpffs).join(PIN_ROOT));
        assert!(pins.is_some() && pins.map(Path::new) == expected.as_deref(), "{name}: {pins:?}, {expected:?}");
        assert_eq!(variable(container, "NPL_CGROUP"), mount_point(&pod, container, "/sys/fs/cgroup"), "{name}");
        let flags: Vec<&str> =
            strings(&container["args"]).into_iter().filter(|argument| argument.starts_with('-')).collect();
        assert!(flags.is_empty(), "{name} is started with {flags:?}, which commands in the container do not see");
    }
}

#[test]
fn each_variable_of_the_manifest_belongs_to_a_flag() {
    let command = Cli::command();
    let of_flags: BTreeSet<String> = command
        .get_subcommands()
        .flat_map(clap::Command::get_arguments)
        .filter_map(|argument| Some(argument.get_env()?.to_str()?.to_owned()))
        .collect();
    let pod = pod();
    let used = containers(&pod).flat_map(|container| list(&container["env"]));
    let unknown: Vec<&Value> =
        used.map(|it| &it["name"]).filter(|name| !of_flags.contains(name.as_str().unwrap_or_default())).collect();
    assert!(unknown.is_empty(), "no flag reads {unknown:?}");
}

#[test]
fn the_admission_policies_confine_an_agent_in_any_namespace() {
    let namespace = pod_namespace();
    let objects = objects("deploy/npl.yaml");
    let of_kind = |kind: &str| objects.iter().filter(|object| object["kind"] == kind).collect::<Vec<_>>();
    let policies = of_kind("ValidatingAdmissionPolicy");
    for policy in &policies {
        let name = &policy["metadata"]["name"];
        let conditions = policy["spec"]["matchConditions"].to_string();
        // Tools that rename a namespace do not rename it in an expression.
        assert!(!conditions.contains(&namespace), "{name} does not apply in a namespace other than {namespace}");
        let is_bound = |binding: &&Value| binding["spec"]["policyName"] == *name;
        assert!(of_kind("ValidatingAdmissionPolicyBinding").iter().any(is_bound), "{name} has no binding");
    }
    // Each resource that the agent may write to is confined.
    let confined: BTreeSet<&str> = policies
        .iter()
        .flat_map(|policy| list(&policy["spec"]["matchConstraints"]["resourceRules"]))
        .flat_map(|rule| strings(&rule["resources"]))
        .collect();
    let role = object("deploy/npl.yaml", "ClusterRole");
    let writing =
        list(&role["rules"]).iter().filter(|rule| !strings(&rule["verbs"]).is_subset(&["list", "watch"].into()));
    let written: BTreeSet<&str> = writing.flat_map(|rule| strings(&rule["resources"])).collect();
    assert_eq!(written, confined);
}
