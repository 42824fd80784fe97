// SPDX-License-Identifier: Apache-2.0
//! Tests of `nodeGroups`: the agents of a group have the group's options, no Node runs two agents, and the `PodMonitor`,
//! `kubectl npl` and the uninstall hook find the agents of every group.

use serde_json::{Value, json};

use crate::objects::{find, rendered};
use crate::values::{pod, variable_of};

/// Two groups of Nodes. A Node may have the labels of both.
const GROUPS: &str = r#"[
    {
        "name": "edge",
        "nodeLabel": {"key": "example.org/zone", "values": ["edge", "dmz"]},
        "config": {"portRange": "40000-41000", "serviceMetrics": 0, "ignoreNetworkPolicy": false, "forwarding": "redirect"},
        "localClients": {"enabled": false},
        "logFilter": "",
        "resources": {"limits": {"memory": "1Gi"}}
    },
    {
        "name": "large",
        "nodeLabel": {"key": "example.org/size", "values": ["large"]},
        "config": {"maxFlows": 1000000, "portRange": "62000-63000"}
    }
]"#;

const DEFAULT: (&str, &str) = ("DaemonSet", "npl-agent");
const EDGE: (&str, &str) = ("DaemonSet", "npl-agent-edge");
const LARGE: (&str, &str) = ("DaemonSet", "npl-agent-large");

/// Renders the chart with [`GROUPS`] and further values.
fn with_groups(further: &[(&str, &str)]) -> Vec<Value> {
    rendered(&[&[("nodeGroups", GROUPS)][..], further].concat())
}

#[test]
fn the_agents_of_a_group_have_its_options_and_otherwise_those_of_the_chart() {
    let objects = with_groups(&[
        ("config", r#"{"drain":"1m","serviceMetrics":50,"ignoreNetworkPolicy":true,"maxFlows":8192}"#),
        ("logFilter", "\"warn\""),
    ]);
    let variable = |daemon_set, name| variable_of(&objects, daemon_set, name);
    for (name, default, edge, large) in [
        ("NPL_PORT_RANGE", None, Some("40000-41000"), Some("62000-63000")),
        ("NPL_FORWARDING", None, Some("redirect"), None),
        ("NPL_DRAIN", Some("1m"), Some("1m"), Some("1m")),
        ("NPL_MAX_FLOWS", Some("8192"), Some("8192"), Some("1000000")),
        // A group's value takes precedence even if it is 0, false or empty.
        ("NPL_SERVICE_METRICS", Some("50"), Some("0"), Some("50")),
        ("NPL_IGNORE_NETWORK_POLICY", Some("true"), Some("false"), Some("true")),
        ("NPL_LOG", Some("warn"), None, Some("warn")),
        ("NPL_CGROUP", Some("/cgroup"), Some("none"), Some("/cgroup")),
    ] {
        let found = [DEFAULT, EDGE, LARGE].map(|daemon_set| variable(daemon_set, name));
        assert_eq!(found, [default, edge, large], "{name}");
    }
    let part = |(kind, name), field| find(&objects, kind, name).unwrap().pointer(field).cloned().unwrap_or_default();
    // The init container must create maps of the size that the agent uses.
    let size = |daemon_set| part(daemon_set, pod!("/spec/initContainers/0/env/1/value"));
    assert_eq!([DEFAULT, EDGE, LARGE].map(size), ["8192", "8192", "1000000"]);
    let memory = |daemon_set| part(daemon_set, pod!("/spec/containers/0/resources/limits/memory"));
    assert_eq!([DEFAULT, EDGE, LARGE].map(memory), ["480Mi", "1Gi", "480Mi"]);
    let cpu = |daemon_set| part(daemon_set, pod!("/spec/containers/0/resources/requests/cpu"));
    assert_eq!([DEFAULT, EDGE, LARGE].map(cpu), ["20m"; 3]);
}

/// The names of the DaemonSets of agents that run a Pod on a Node with these labels, as Kubernetes evaluates the
/// required node affinity.
fn agents_on<'a>(objects: &'a [Value], labels: &Value) -> Vec<&'a str> {
    let matches = |expression: &Value| {
        let values = expression["values"].as_array().unwrap();
        let is_listed = labels.get(expression["key"].as_str().unwrap()).is_some_and(|label| values.contains(label));
        let operator = expression["operator"].as_str().unwrap();
        assert!(["In", "NotIn"].contains(&operator), "this test does not know the operator {operator}");
        is_listed == (operator == "In")
    };
    let runs_on = |daemon_set: &&Value| {
        let required = pod!("/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution");
        let terms = daemon_set.pointer(required).unwrap()["nodeSelectorTerms"].as_array().unwrap();
        terms.iter().any(|term| term["matchExpressions"].as_array().unwrap().iter().all(matches))
    };
    let agents = objects.iter().filter(|object| object["kind"] == "DaemonSet");
    agents.filter(runs_on).map(|daemon_set| daemon_set["metadata"]["name"].as_str().unwrap()).collect()
}

#[test]
fn every_node_runs_exactly_one_agent_whatever_its_labels_are() {
    let objects = with_groups(&[]);
    for (zone, size, expected) in [
        (None, None, "npl-agent"),
        (Some("core"), Some("small"), "npl-agent"),
        (Some("edge"), None, "npl-agent-edge"),
        (Some("dmz"), Some("small"), "npl-agent-edge"),
        (Some("edge"), Some("large"), "npl-agent-edge"),
        (None, Some("large"), "npl-agent-large"),
        (Some("core"), Some("large"), "npl-agent-large"),
    ] {
        let mut labels = json!({ "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64" });
        for (key, label) in [("example.org/zone", zone), ("example.org/size", size)] {
            if let Some(label) = label {
                labels[key] = json!(label);
            }
        }
        assert_eq!(agents_on(&objects, &labels), [expected], "{labels}");
        labels["kubernetes.io/arch"] = json!("riscv64");
        assert!(agents_on(&objects, &labels).is_empty(), "{labels}");
    }
}

/// The DaemonSets tolerate every taint, so only the node affinity keeps their Pods off virtual Nodes.
#[test]
fn virtual_nodes_run_no_agent() {
    for objects in [rendered(&[]), with_groups(&[]), rendered(&[("cleanup.enabled", "true")])] {
        let mut labels = json!({ "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64" });
        assert!(!agents_on(&objects, &labels).is_empty(), "{labels}");
        labels["type"] = json!("virtual-kubelet");
        assert!(agents_on(&objects, &labels).is_empty(), "{labels}");
        labels["type"] = json!("worker");
        assert!(!agents_on(&objects, &labels).is_empty(), "{labels}");
        labels["eks.amazonaws.com/compute-type"] = json!("fargate");
        assert!(agents_on(&objects, &labels).is_empty(), "{labels}");
    }
}

/// Whether a selector by labels selects objects with these labels.
fn selects(selector: &Value, labels: &Value) -> bool {
    selector["matchLabels"].as_object().unwrap().iter().all(|(key, value)| labels[key] == *value)
}

#[test]
fn agents_of_every_group_have_the_labels_by_which_agents_are_found() {
    let objects = with_groups(&[("metrics.enabled", "true"), ("metrics.podMonitor.enabled", "true")]);
    let monitor = &find(&objects, "PodMonitor", "npl-agent").unwrap()["spec"]["selector"];
    let daemon_sets = [DEFAULT, EDGE, LARGE].map(|(kind, name)| find(&objects, kind, name).unwrap());
    for daemon_set in daemon_sets {
        let labels = daemon_set.pointer(pod!("/metadata/labels")).unwrap();
        // `kubectl npl` finds the agents by these two labels.
        assert_eq!(labels["app.kubernetes.io/name"], "npl");
        assert_eq!(labels["app.kubernetes.io/component"], "agent");
        assert_eq!(daemon_set["metadata"]["labels"]["app.kubernetes.io/component"], "agent");
        assert!(selects(monitor, labels), "{labels}");
        assert!(selects(&daemon_set["spec"]["selector"], labels), "{labels}");
        let container = daemon_set.pointer(pod!("/spec/containers/0/name")).unwrap();
        assert_eq!(container, "npl-agent", "`kubectl npl` and the uninstall hook name the container");
        let account = daemon_set.pointer(pod!("/spec/serviceAccountName")).unwrap();
        assert_eq!(account, "npl-agent", "the admission policies and the ClusterRole name the service account");
    }
    let [_, edge, large] = daemon_sets.map(|daemon_set| daemon_set.pointer(pod!("/metadata/labels")).unwrap());
    let [_, of_edge, of_large] = daemon_sets.map(|daemon_set| &daemon_set["spec"]["selector"]);
    assert!(!selects(of_edge, large) && !selects(of_large, edge), "two groups select the same Pods");
}

#[test]
fn the_hook_retires_the_nodes_of_every_group() {
    let objects = with_groups(&[]);
    let job = find(&objects, "Job", "npl-retire").unwrap();
    let arguments = job.pointer(pod!("/spec/containers/0/args")).unwrap().as_array().unwrap();
    assert!(arguments.contains(&json!("--daemon-set=npl-agent,npl-agent-edge,npl-agent-large")), "{arguments:?}");
    let role = find(&objects, "Role", "npl-retire").unwrap();
    assert_eq!(role["rules"][0]["resourceNames"], json!(["npl-agent", "npl-agent-edge", "npl-agent-large"]));
    // The hook itself and the cleanup run on Nodes of any group.
    let affinity = pod!("/spec/affinity").to_owned();
    let without_groups = rendered(&[]);
    assert_eq!(job.pointer(&affinity), find(&without_groups, "Job", "npl-retire").unwrap().pointer(&affinity));
    let cleanup = with_groups(&[("cleanup.enabled", "true")]);
    let names = agents_on(
        &cleanup,
        &json!({
            "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", "example.org/zone": "edge",
        }),
    );
    assert_eq!(names, ["npl-cleanup"]);
}

#[test]
fn the_feed_serves_the_port_ranges_of_all_groups() {
    let range = |set: &[(&str, &str)]| {
        let objects = rendered(&[&[("feed.enabled", "true")][..], set].concat());
        variable_of(&objects, ("Deployment", "npl-feed"), "NPL_FEED_PORT_RANGE").map(str::to_owned)
    };
    let own = ("config.portRange", "\"20000-22299\"");
    assert_eq!(range(&[]), None);
    assert_eq!(range(&[own]).as_deref(), Some("20000-22299"));
    assert_eq!(range(&[("config.portRange", "\"01024-02000\"")]).as_deref(), Some("1024-2000"));
    assert_eq!(range(&[("nodeGroups", GROUPS)]).as_deref(), Some("40000-63000"));
    assert_eq!(range(&[("nodeGroups", GROUPS), own]).as_deref(), Some("20000-63000"));
    let without_range = r#"[{"name":"a","nodeLabel":{"key":"k","values":["v"]},"config":{"resync":"10s"}}]"#;
    assert_eq!(range(&[("nodeGroups", without_range)]), None);
}
