// SPDX-License-Identifier: Apache-2.0
//! Checks that the manifests in `deploy/` agree with each other and with the command line.

use std::{collections::BTreeSet, fs, path::Path};

use clap::CommandFactory as _;
use npl_common::names::PIN_ROOT;
use serde_json::{Value, json};

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

/// The elements of a list; none if the list is absent.
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

/// The path at which a container mounts a directory of the Node.
fn mount_point<'a>(pod: &'a Value, container: &'a Value, folder: &str) -> Option<&'a str> {
    let volume = list(&pod["volumes"]).iter().find(|volume| volume["hostPath"]["path"] == folder)?;
    let mount = list(&container["volumeMounts"]).iter().find(|mount| mount["name"] == volume["name"])?;
    mount["mountPath"].as_str()
}

/// Paths must be set by environment variables: a command such as `kubectl exec ds/npl-agent -- /npl-agent status` gets
/// the container's variables, but not its arguments.
#[test]
fn each_command_in_a_container_uses_the_bpffs_and_cgroup_of_the_agent() {
    let pod = pod();
    for container in containers(&pod) {
        let name = &container["name"];
        // The container mounts only NPL's own directory, so that the agent cannot access pins of other software.
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

/// Variables of `run` that have no value below `config` of the chart: those that the chart's templates set, and those
/// that no agent in a Pod needs.
const NOT_BELOW_CONFIG: [&str; 9] = [
    "NPL_BPFFS",
    // The values `localClients.enabled` and `localClients.cgroup` set this variable.
    "NPL_CGROUP",
    // An agent in a Pod uses its service account.
    "NPL_KUBECONFIG",
    // The value `probes.port` sets this variable.
    "NPL_LISTEN",
    // The value `localClients.scope` sets this variable.
    "NPL_LOCAL_CLIENTS",
    // The values below `metrics` set this variable.
    "NPL_METRICS_LISTEN",
    "NPL_NODE_NAME",
    // The hook of `helm uninstall` sets this variable.
    "NPL_RETIRE",
    "NPL_RUNTIME_DIR",
];

#[test]
fn each_option_of_the_agent_has_a_value_of_the_chart() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart/npl/values.schema.json");
    let schema: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let values = schema.pointer("/properties/config/properties").unwrap().as_object().unwrap();
    // The template converts the name of a value to the name of a variable in the same way.
    let variable = |value: &str| {
        let letters = value.chars().flat_map(|it| it.is_uppercase().then_some('_').into_iter().chain([it]));
        format!("NPL_{}", letters.collect::<String>().to_uppercase())
    };
    let mut covered: BTreeSet<String> = values.keys().map(|value| variable(value)).collect();
    covered.extend(NOT_BELOW_CONFIG.map(str::to_owned));
    let command = Cli::command();
    let run = command.get_subcommands().find(|it| it.get_name() == "run").unwrap();
    let options: BTreeSet<String> =
        run.get_arguments().filter_map(|argument| Some(argument.get_env()?.to_str()?.to_owned())).collect();
    assert_eq!(options, covered);
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
        // Tools that rename the namespace of a manifest do not change the name inside a CEL expression.
        assert!(!conditions.contains(&namespace), "{name} does not apply in a namespace other than {namespace}");
        let is_bound = |binding: &&Value| binding["spec"]["policyName"] == *name;
        assert!(of_kind("ValidatingAdmissionPolicyBinding").iter().any(is_bound), "{name} has no binding");
    }
    // An admission policy must restrict the agent's writes to each resource that the agent's role permits it to write,
    // and no policy may name a further resource.
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

#[test]
fn the_agent_is_scheduled_on_nodes_that_its_image_runs_on() {
    let pod = pod();
    let affinity = &pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    for term in list(&affinity["nodeSelectorTerms"]) {
        for (key, value) in [("kubernetes.io/os", "linux"), ("kubernetes.io/arch", "amd64")] {
            let is_required =
                |it: &Value| it["key"] == key && it["operator"] == "In" && strings(&it["values"]) == [value].into();
            assert!(list(&term["matchExpressions"]).iter().any(is_required), "{key} in {term}");
        }
    }
    assert!(!list(&affinity["nodeSelectorTerms"]).is_empty());
}

/// Processes with the default SELinux type of unprivileged containers may not call `bpf()`.
#[test]
fn each_container_has_the_selinux_type_of_a_privileged_one() {
    let pod = pod();
    assert_eq!(pod["securityContext"]["seLinuxOptions"], json!({ "type": "spc_t" }));
    for container in containers(&pod) {
        assert_eq!(container["securityContext"]["seLinuxOptions"], Value::Null, "{} overrides it", container["name"]);
    }
}

/// The capabilities that at least one container adds, and those that every container drops.
fn capabilities(pod: &Value) -> (BTreeSet<&str>, BTreeSet<&str>) {
    let of =
        |field: &'static str| containers(pod).map(move |it| strings(&it["securityContext"]["capabilities"][field]));
    let added = of("add").flatten().collect();
    let dropped = of("drop").reduce(|all, next| &all & &next).unwrap_or_default();
    (added, dropped)
}

#[test]
fn the_security_context_constraints_of_openshift_permit_what_the_agent_needs_and_no_more() {
    const FILE: &str = "deploy/openshift/scc.yaml";
    let (pod, constraints) = (pod(), object(FILE, "SecurityContextConstraints"));
    let (added, dropped) = capabilities(&pod);
    assert_eq!(strings(&constraints["allowedCapabilities"]), added);
    assert_eq!(strings(&constraints["requiredDropCapabilities"]), dropped);
    for (permission, field) in
        [("allowHostNetwork", "hostNetwork"), ("allowHostPID", "hostPID"), ("allowHostIPC", "hostIPC")]
    {
        assert_eq!(constraints[permission] == true, pod[field] == true, "{permission}");
    }
    for (permission, field) in
        [("allowPrivilegedContainer", "privileged"), ("allowPrivilegeEscalation", "allowPrivilegeEscalation")]
    {
        let is_used = containers(&pod).any(|it| it["securityContext"][field] != false);
        assert_eq!(constraints[permission], is_used, "{permission}");
    }
    let is_read_only = containers(&pod).all(|it| it["securityContext"]["readOnlyRootFilesystem"] == true);
    assert_eq!(constraints["readOnlyRootFilesystem"], is_read_only);
    let ports: usize = containers(&pod).map(|it| list(&it["ports"]).len()).sum();
    assert_eq!(constraints["allowHostPorts"], ports > 0);
    let kind = |volume: &Value| volume.as_object().unwrap().keys().find(|key| *key != "name").unwrap().clone();
    let volumes: BTreeSet<String> = list(&pod["volumes"]).iter().map(kind).collect();
    assert_eq!(strings(&constraints["volumes"]), volumes.iter().map(String::as_str).collect());
    assert_eq!(constraints["allowHostDirVolumePlugin"], volumes.contains("hostPath"));
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    assert_eq!(strings(&constraints["seccompProfiles"]), ["runtime/default"].into());
    for strategy in ["runAsUser", "seLinuxContext", "fsGroup", "supplementalGroups"] {
        assert_eq!(constraints[strategy]["type"], "RunAsAny", "{strategy}");
    }
}

#[test]
fn openshift_lets_the_agents_service_account_use_its_constraints() {
    const FILE: &str = "deploy/openshift/scc.yaml";
    let all = objects(FILE);
    let of_kind = |kind: &str| all.iter().find(|object| object["kind"] == kind).unwrap();
    let (role, binding) = (of_kind("ClusterRole"), of_kind("ClusterRoleBinding"));
    assert_eq!(
        role["rules"],
        json!([{
            "apiGroups": ["security.openshift.io"], "resources": ["securitycontextconstraints"],
            "resourceNames": ["npl-agent"], "verbs": ["use"],
        }])
    );
    assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
    assert_eq!(binding["subjects"], object("deploy/npl.yaml", "ClusterRoleBinding")["subjects"]);
    assert_eq!(binding["subjects"][0]["name"], pod()["serviceAccountName"]);
    let overlay = objects("deploy/openshift/kustomization.yaml");
    assert_eq!(overlay[0]["resources"], json!(["scc.yaml"]));
}

/// Each API group, resource and verb of the rules.
fn rights(rules: &[Value]) -> BTreeSet<(&str, &str, &str)> {
    let mut rights = BTreeSet::new();
    for rule in rules {
        for group in strings(&rule["apiGroups"]) {
            for resource in strings(&rule["resources"]) {
                rights.extend(strings(&rule["verbs"]).into_iter().map(|verb| (group, resource, verb)));
            }
        }
    }
    rights
}

#[test]
fn every_request_of_the_agent_belongs_to_its_own_priority_level() {
    let objects = objects("deploy/npl.yaml");
    let subject = json!({ "name": pod()["serviceAccountName"], "namespace": pod_namespace() });
    let mut requests = BTreeSet::new();
    for schema in objects.iter().filter(|object| object["kind"] == "FlowSchema") {
        let level = &schema["spec"]["priorityLevelConfiguration"]["name"];
        let is_level = |it: &Value| it["kind"] == "PriorityLevelConfiguration" && it["metadata"]["name"] == *level;
        assert!(objects.iter().any(is_level), "{level}");
        for rule in list(&schema["spec"]["rules"]) {
            assert_eq!(rule["subjects"], json!([{ "kind": "ServiceAccount", "serviceAccount": subject }]));
            requests.extend(rights(list(&rule["resourceRules"])));
        }
    }
    let role = object("deploy/npl.yaml", "ClusterRole");
    assert_eq!(requests, rights(list(&role["rules"])));
}

#[test]
fn the_manifests_besides_npl_yaml_use_its_image_and_its_nodes() {
    let agent = pod();
    let image = |container: &Value| container["image"].as_str().unwrap().to_owned();
    let images: BTreeSet<String> = containers(&agent).map(image).collect();
    assert_eq!(images.len(), 1);
    let daemon_set = objects("deploy/cleanup.yaml").into_iter().find(|object| object["kind"] == "DaemonSet").unwrap();
    let cleanup = &daemon_set["spec"]["template"]["spec"];
    let patch = objects("deploy/mount-bpffs.yaml").remove(0);
    let mounting = &patch["spec"]["template"]["spec"];
    for pod in [cleanup, mounting] {
        assert!(containers(pod).all(|container| images.contains(&image(container))));
    }
    for field in ["affinity", "tolerations", "hostNetwork", "serviceAccountName", "securityContext"] {
        assert_eq!(cleanup[field], agent[field], "{field}");
    }
    let (added, dropped) = capabilities(cleanup);
    assert!(added.is_subset(&capabilities(&agent).0) && dropped == capabilities(&agent).1);
    assert!(containers(cleanup).all(|it| variable(it, "NPL_BPFFS") == mount_point(cleanup, it, "/sys/fs/bpf")));
    for container in containers(mounting) {
        let folder = Path::new(mount_point(mounting, container, "/sys/fs").unwrap()).join("bpf");
        assert_eq!(variable(container, "NPL_BPFFS").map(Path::new), Some(folder.as_path()));
    }
}
