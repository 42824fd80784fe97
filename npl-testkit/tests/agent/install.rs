// SPDX-License-Identifier: Apache-2.0
//! Tests `deploy/npl.yaml` on API servers that restrict what a manifest may create.

use std::fs;
use std::process::Command;

use npl_common::names;
use npl_testkit::agent::{Agent, Options};
use npl_testkit::api_client::ApiClient;
use npl_testkit::cluster::Cluster;
use npl_testkit::control_plane::ControlPlane;
use npl_testkit::mounts;
use npl_testkit::poll;
use npl_testkit::process::Process;
use npl_testkit::run::Run;
use npl_testkit::tools;
use serde_json::{Value, json};

use crate::world::{LIMIT, NODE, World, manifest};

/// The agent's namespace.
const NPL_SYSTEM: &str = "/api/v1/namespaces/npl-system";

/// An admission configuration like that of GKE and other providers: Pods of the two system priority classes are
/// admitted only in namespaces with a `ResourceQuota` for these classes.
const PRIORITY_NEEDS_QUOTA: &str = "apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
  - name: ResourceQuota
    configuration:
      apiVersion: apiserver.config.k8s.io/v1
      kind: ResourceQuotaConfiguration
      limitedResources:
        - resource: pods
          matchScopes:
            - scopeName: PriorityClass
              operator: In
              values: [system-node-critical, system-cluster-critical]
";

/// Creates a control plane whose API server has this admission configuration, with the whole manifest applied.
fn installed_with(run: &Run, configuration: &str) -> (ControlPlane, Cluster) {
    let file = run.file("admission.yaml");
    fs::write(&file, configuration).unwrap();
    let flag = format!("--admission-control-config-file={}", file.display());
    let plane = ControlPlane::start_with_flags(run, None, &[flag]).unwrap();
    let cluster = Cluster::new(&plane).unwrap();
    cluster.kubectl(&["apply", "--filename", manifest().to_str().unwrap()]).unwrap();
    (plane, cluster)
}

/// Creates a Pod from the DaemonSet's template, as the DaemonSet controller does.
fn create_agent_pod(cluster: &Cluster, name: &str) -> anyhow::Result<Value> {
    let daemon_set = cluster.client().get("/apis/apps/v1/namespaces/npl-system/daemonsets/npl-agent")?;
    let mut pod = daemon_set["spec"]["template"].clone();
    pod["metadata"]["name"] = json!(name);
    pod["spec"]["nodeName"] = json!(NODE);
    cluster.client().create(&format!("{NPL_SYSTEM}/pods"), &pod)
}

#[test]
fn a_cluster_that_limits_critical_priorities_admits_the_agents_pods() {
    let run = Run::start().unwrap();
    let (_plane, cluster) = installed_with(&run, PRIORITY_NEEDS_QUOTA);
    let quota = format!("{NPL_SYSTEM}/resourcequotas/npl-agent");
    let hard = cluster.client().get(&quota).unwrap()["spec"]["hard"].take();
    // No quota controller runs here, so the test writes the status of the quota.
    let status = json!({"status": {"hard": hard, "used": {"pods": "0"}}});
    cluster.client().merge_patch(&format!("{quota}/status"), &status).unwrap();
    // Retry, because the API server applies quotas and priority classes only after its own watches have delivered them.
    let mut last = None;
    let admitted = poll::until("the agent's Pod to be admitted", LIMIT, || {
        create_agent_pod(&cluster, "admitted").map_err(|error| last = Some(error)).ok()
    });
    assert!(admitted.is_ok(), "{last:?}");
    // The quota must count the agent's Pod, which shows that the scope of the quota matches the Pod's priority class.
    let counted = cluster.client().get(&quota).unwrap();
    assert_eq!(counted.pointer("/status/used/pods"), Some(&json!("1")), "{counted}");

    cluster.client().delete(&quota).unwrap();
    let (mut number, mut last) = (0, None);
    let refused = poll::until("a Pod to be refused without the quota", LIMIT, || {
        number += 1;
        let refusal = create_agent_pod(&cluster, &format!("refused-{number}")).err();
        // Until the API server's watch has delivered the deletion of the quota, the API server may refuse the Pod for
        // another reason.
        last = refusal.map(|error| format!("{error:#}"));
        last.as_ref().is_some_and(|text| text.contains("insufficient quota to match these scopes")).then_some(())
    });
    assert!(refused.is_ok(), "{last:?}");
}

/// A namespace that differs from the one in the manifest.
const ELSEWHERE: &str = "elsewhere";

/// Applies the manifest in another namespace with kustomize, which does not change the namespace in the CEL expressions
/// of the admission policies. Returns a client with the token of an agent's Pod on [`NODE`].
fn installed_elsewhere(run: &Run, plane: &ControlPlane, cluster: &Cluster) -> ApiClient {
    let folder = run.file("overlay");
    fs::create_dir(&folder).unwrap();
    fs::copy(manifest(), folder.join("npl.yaml")).unwrap();
    fs::write(folder.join("kustomization.yaml"), format!("namespace: {ELSEWHERE}\nresources: [npl.yaml]\n")).unwrap();
    cluster.kubectl(&["apply", "--kustomize", folder.to_str().unwrap()]).unwrap();
    agent_token(plane, cluster, NODE, "agent-0")
}

/// Returns a Node's name that is longer than the 128 bytes of an Event's `reportingInstance`.
fn long_node() -> String {
    format!("{NODE}.{}", "zone-with-a-long-name.".repeat(6)) + "example.org"
}

/// Creates a Node and the agent's Pod on it. Returns a client with the token of the Pod.
fn agent_token(plane: &ControlPlane, cluster: &Cluster, node: &str, name: &str) -> ApiClient {
    cluster.create_node(node, &[]).unwrap();
    let container = json!({"name": "npl-agent", "image": "npl-agent"});
    let spec = json!({"nodeName": node, "serviceAccountName": "npl-agent", "containers": [container]});
    let pod = json!({"metadata": {"name": name}, "spec": spec});
    cluster.client().create(&format!("/api/v1/namespaces/{ELSEWHERE}/pods"), &pod).unwrap();
    let bound_name = format!("--bound-object-name={name}");
    let bound = ["--bound-object-kind=Pod", bound_name.as_str()];
    let words = ["create", "token", "npl-agent", "--namespace", ELSEWHERE];
    let token = cluster.kubectl(&[&words[..], &bound].concat()).unwrap();
    plane.client_with(token.trim()).unwrap()
}

#[test]
fn the_admission_policies_confine_an_agent_in_another_namespace() {
    let run = Run::start().unwrap();
    let plane = ControlPlane::start(&run, None).unwrap();
    let cluster = Cluster::new(&plane).unwrap();
    let agent = installed_elsewhere(&run, &plane, &cluster);
    let status = format!("/api/v1/namespaces/{ELSEWHERE}/pods/agent-0/status");
    // The API server applies the policies shortly after their creation, and accepts the label until then. Each attempt
    // therefore writes a new label.
    let mut number = 0;
    let mut last = None;
    let refused = || {
        number += 1;
        let labels = json!({"metadata": {"labels": {"number": number.to_string()}}});
        // The RBAC rules also take effect some time after their creation. Until then, the API server refuses every
        // write.
        last = agent.merge_patch(&status, &labels).err().map(|error| format!("{error:#}"));
        last.as_ref().is_some_and(|text| text.contains("labels and finalizers")).then_some(())
    };
    let waited = poll::until("the policy for Pods", LIMIT, refused);
    assert!(waited.is_ok(), "{waited:?}: {last:?}");

    let events = format!("/apis/events.k8s.io/v1/namespaces/{ELSEWHERE}/events");
    let event = |name: &str, controller: &str, instance: &str| {
        json!({
            "metadata": {"name": name, "namespace": ELSEWHERE},
            "eventTime": "2026-01-01T00:00:00.000000Z",
            "reportingController": controller, "reportingInstance": instance,
            "regarding": {"kind": "Pod", "name": "agent-0", "namespace": ELSEWHERE},
            "type": "Warning", "reason": "NoFreePort", "action": "Publish", "note": "a note",
        })
    };
    let long = long_node();
    let of_long_node = agent_token(&plane, &cluster, &long, "agent-1");
    let cut = |bytes: usize| long.split_at(bytes).0.to_owned();
    let refused = [
        (&agent, "stranger", "kubelet", NODE.to_owned()),
        (&agent, "other-node", "npl-agent", "node-2".to_owned()),
        (&agent, "longer-name", "npl-agent", format!("{NODE}0")),
        (&agent, "shorter-name", "npl-agent", "node".to_owned()),
        (&of_long_node, "shorter-than-cut", "npl-agent", cut(127)),
        (&of_long_node, "name-of-the-other", "npl-agent", NODE.to_owned()),
    ];
    for (client, name, controller, instance) in refused {
        let create = || client.create(&events, &event(name, controller, &instance)).err();
        // Until the policy for Events takes effect, the API server creates the Event, or reports that its name is
        // already taken. Wait for the policy's error.
        let denied = || create().map(|error| format!("{error:#}")).filter(|text| text.contains("denied request"));
        poll::until(&format!("the refusal of the Event {name}"), LIMIT, denied).unwrap();
    }
    agent.create(&events, &event("own", "npl-agent", NODE)).unwrap();
    of_long_node.create(&events, &event("own-cut", "npl-agent", &cut(128))).unwrap();
    let series = json!({"series": {"count": 2, "lastObservedTime": "2026-01-01T00:00:01.000000Z"}});
    agent.merge_patch(&format!("{events}/own"), &series).unwrap();
    cluster.client().create(&events, &event("of-another", "example.org/controller", "it")).unwrap();
    let labels = json!({"metadata": {"labels": {"app": "mine"}}});
    for (name, change) in [("own", labels), ("of-another", series), ("of-another", json!({}))] {
        let error = agent.merge_patch(&format!("{events}/{name}"), &change).unwrap_err();
        assert!(format!("{error:#}").contains("denied request"), "{name} {change}: {error:#}");
    }
}

#[test]
fn the_patch_for_nodes_without_a_bpf_file_system_mounts_one_before_the_programs_are_loaded() {
    let run = Run::start().unwrap();
    let plane = ControlPlane::start(&run, None).unwrap();
    let cluster = Cluster::new(&plane).unwrap();
    cluster.kubectl(&["apply", "--filename", manifest().to_str().unwrap()]).unwrap();
    let patch = tools::repository_file("deploy/mount-bpffs.yaml");
    let daemon_set = ["patch", "daemonset", "npl-agent", "--namespace", "npl-system"];
    cluster.kubectl(&[&daemon_set[..], &["--patch-file", patch.to_str().unwrap()]].concat()).unwrap();
    let names = ["get", "daemonset", "npl-agent", "--namespace", "npl-system", "--output"];
    let path = "jsonpath={.spec.template.spec.initContainers[*].name}";
    assert_eq!(cluster.kubectl(&[&names[..], &[path]].concat()).unwrap(), "mount-bpffs load-programs");
    // `deploy/cleanup.yaml` also contains a DaemonSet, which can be created because its namespace exists here.
    let cleanup = tools::repository_file("deploy/cleanup.yaml");
    let accepted = cluster.kubectl(&["apply", "--dry-run=server", "--filename", cleanup.to_str().unwrap()]).unwrap();
    assert!(accepted.contains("daemonset.apps/npl-cleanup"), "{accepted}");
}

#[test]
fn load_mounts_a_bpf_file_system_where_none_is_mounted() {
    let world = World::new();
    let folder = world.run.file("sys-fs-bpf");
    fs::create_dir(&folder).unwrap();
    let (agent, folder) = (world.agent_options(&[]).binary, folder.to_str().unwrap().to_owned());
    // The script runs in a separate mount namespace. The first call lacks the flag and fails; the third call finds the
    // file system that the second call has mounted.
    let load = format!("{} load --bpffs {folder}", agent.display());
    let script = format!("{load} 2>&1; {load} --mount-bpffs && {load} --mount-bpffs && ls {folder}/npl");
    let mut command = world.topology.node().command("unshare").unwrap();
    let output = tools::output(command.args(["--mount", "sh", "-c", &script])).unwrap();
    assert!(output.starts_with("npl-agent: "), "without the flag: {output}");
    assert!(
        output.contains("is not a BPF file system") && output.contains("loaded") && output.contains("v2"),
        "{output}"
    );
}

/// `npl-agent cleanup --stay` must not exit after the cleanup, because the kubelet would restart the containers of the
/// DaemonSet.
#[test]
fn cleanup_can_stay_after_its_work_until_it_is_stopped() {
    let world = World::with_agent(&[]);
    let options = world.agent_options(&[]);
    drop(world.agent);
    let mut command = world.topology.node().command(&options.binary).unwrap();
    command.args(["cleanup", "--stay", "--bpffs"]).arg(&options.bpffs);
    let log = world.run.file("cleanup.log");
    let mut cleanup = Process::spawn("npl-agent cleanup", command, &log).unwrap();
    let own = world.bpffs.path().join(names::PIN_ROOT);
    poll::until("the pins to be removed", LIMIT, || (!own.exists()).then_some(())).unwrap();
    assert!(cleanup.exit_status().is_none());
    assert!(cleanup.terminate(LIMIT).unwrap().success());
}

/// The agent must work with only NPL's own directory of the BPF file system, as the DaemonSet mounts it. The cleanup
/// cannot remove this directory, which is a mount point in the container.
#[test]
fn an_agent_needs_only_its_own_folder_of_the_bpf_file_system() {
    let mut world = World::new();
    world.create_node();
    let own = world.bpffs.path().join(names::PIN_ROOT);
    fs::create_dir(&own).unwrap();
    // This directory stands in for the container's root file system, and is read-only.
    let shown = world.run.file("container");
    fs::create_dir(&shown).unwrap();
    let mount = |words: &[&str]| tools::output(Command::new("mount").args(words).arg(&shown)).unwrap();
    mount(&["-t", "tmpfs", "none"]);
    mounts::bind(&own, &shown.join(names::PIN_ROOT)).unwrap();
    mount(&["-o", "remount,ro"]);
    let options = Options { bpffs: shown, ..world.agent_options(&[]) };
    world.agent = Some(Agent::start(options.clone()).unwrap());
    world.serve(&["web-0"]);
    assert!(world.pins().join("npl_mapping_v4").exists());
    assert!(options.command(&["status"]).unwrap().contains("running"));
    world.agent().kill().unwrap();
    assert!(options.command(&["cleanup"]).unwrap().contains("npl_mapping_v4"));
    assert_eq!(fs::read_dir(&own).unwrap().count(), 0);
    assert_eq!(options.command(&["cleanup"]).unwrap().trim(), "nothing to remove");
}

#[test]
fn an_agent_that_no_admission_policy_confines_logs_a_warning() {
    let mut world = World::new();
    world.create_node();
    world.create_pod("web-0");
    world.start_agent(&[]);
    world.wait_for_log("no admission policy restricts this agent's writes");
    let state = |world: &World| {
        let findings = world.agent_options(&[]).command_json("doctor").unwrap();
        let finding = findings.as_array().unwrap().iter().find(|finding| finding["key"] == "admission_policy");
        finding.unwrap()["state"].clone()
    };
    assert_eq!(state(&world), "warning");

    world.cluster.kubectl(&["apply", "--filename", manifest().to_str().unwrap()]).unwrap();
    world.agent().restart().unwrap();
    poll::until("the agent to find the policy", LIMIT, || (state(&world) == "ok").then_some(())).unwrap();
}
