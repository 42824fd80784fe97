// SPDX-License-Identifier: Apache-2.0
//! Tests that each value of the chart has the effect that its comment describes.

use std::collections::BTreeSet;
use std::fs;

use npl_testkit::helm;
use serde_json::{Value, json};

use crate::feed;
use crate::objects::{find, rendered};

/// A value of the chart, and the object field that the value sets. If the expected content is `null`, the field must be
/// absent.
pub(crate) struct Case {
    /// The value as a path and JSON, followed by other values that it requires.
    set: &'static [(&'static str, &'static str)],
    /// The kind and name of the object.
    object: (&'static str, &'static str),
    /// The JSON pointer of the field; empty for the object itself.
    field: &'static str,
    expected: &'static str,
}

const DAEMON_SET: (&str, &str) = ("DaemonSet", "npl-agent");
const POD_MONITOR: (&str, &str) = ("PodMonitor", "npl-agent");
const RULE: (&str, &str) = ("PrometheusRule", "npl-agent");

pub(crate) const fn case(
    set: &'static [(&'static str, &'static str)],
    object: (&'static str, &'static str),
    field: &'static str,
    expected: &'static str,
) -> Case {
    Case { set, object, field, expected }
}

/// The JSON pointer of a field of a workload's first container.
macro_rules! container {
    ($field:literal) => {
        concat!("/spec/template/spec/containers/0", $field)
    };
}
/// The JSON pointer of a field of a workload's Pod template.
macro_rules! pod {
    ($field:literal) => {
        concat!("/spec/template", $field)
    };
}
pub(crate) use {container, pod};

/// Chart values, each of which sets one field of one rendered object.
const FIELDS: &[Case] = &[
    case(&[("image.repository", "\"r/a\"")], DAEMON_SET, container!("/image"), "\"r/a:0.1.0\""),
    case(&[("image.tag", "\"v9\"")], DAEMON_SET, container!("/image"), "\"localhost/npl-agent:v9\""),
    case(&[("image.pullPolicy", "\"Always\"")], DAEMON_SET, container!("/imagePullPolicy"), "\"Always\""),
    case(&[("imagePullSecrets", r#"[{"name":"s"}]"#)], DAEMON_SET, pod!("/spec/imagePullSecrets"), r#"[{"name":"s"}]"#),
    case(&[("loadPrograms.enabled", "false")], DAEMON_SET, pod!("/spec/initContainers"), "null"),
    case(
        &[("mountBpffs.enabled", "true")],
        DAEMON_SET,
        pod!("/spec/initContainers/0/securityContext/privileged"),
        "true",
    ),
    case(
        &[("architectures", r#"["amd64","arm64"]"#)],
        DAEMON_SET,
        pod!(
            "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0/matchExpressions/1/values"
        ),
        r#"["amd64","arm64"]"#,
    ),
    case(&[("nodeSelector", r#"{"a":"b"}"#)], DAEMON_SET, pod!("/spec/nodeSelector"), r#"{"a":"b"}"#),
    case(&[("tolerations", r#"[{"key":"k"}]"#)], DAEMON_SET, pod!("/spec/tolerations"), r#"[{"key":"k"}]"#),
    case(
        &[("updateStrategy.maxUnavailable", "3")],
        DAEMON_SET,
        "/spec/updateStrategy/rollingUpdate/maxUnavailable",
        "3",
    ),
    case(&[("terminationGracePeriodSeconds", "9")], DAEMON_SET, pod!("/spec/terminationGracePeriodSeconds"), "9"),
    case(&[("priorityClassName", "\"p\"")], DAEMON_SET, pod!("/spec/priorityClassName"), "\"p\""),
    case(
        &[("priorityClassName", "\"p\"")],
        ("ResourceQuota", "npl-agent"),
        "/spec/scopeSelector/matchExpressions/0/values",
        r#"["p"]"#,
    ),
    case(&[("resourceQuota.enabled", "false")], ("ResourceQuota", "npl-agent"), "", "null"),
    case(&[("resourceQuota.pods", "7")], ("ResourceQuota", "npl-agent"), "/spec/hard/pods", "\"7\""),
    case(&[("resources.requests.cpu", "\"1\"")], DAEMON_SET, container!("/resources/requests/cpu"), "\"1\""),
    case(&[("resources.requests.memory", "\"1Gi\"")], DAEMON_SET, container!("/resources/requests/memory"), "\"1Gi\""),
    case(&[("resources.limits.memory", "\"1Gi\"")], DAEMON_SET, container!("/resources/limits/memory"), "\"1Gi\""),
    case(&[("commonLabels", r#"{"c":"b"}"#)], ("ClusterRole", "npl-agent"), "/metadata/labels/c", "\"b\""),
    case(&[("podAnnotations", r#"{"a":"b"}"#)], DAEMON_SET, pod!("/metadata/annotations/a"), "\"b\""),
    case(&[("podLabels", r#"{"a":"b"}"#)], DAEMON_SET, pod!("/metadata/labels/a"), "\"b\""),
    case(
        &[("serviceAccountAnnotations", r#"{"a":"b"}"#)],
        ("ServiceAccount", "npl-agent"),
        "/metadata/annotations",
        r#"{"a":"b"}"#,
    ),
    case(
        &[("podSecurity.seLinuxOptions.type", "\"t\"")],
        DAEMON_SET,
        pod!("/spec/securityContext/seLinuxOptions"),
        r#"{"type":"t"}"#,
    ),
    case(&[("podSecurity.seLinuxOptions", "null")], DAEMON_SET, pod!("/spec/securityContext/seLinuxOptions"), "null"),
    case(
        &[("podSecurity.seccompProfile.type", "\"Unconfined\"")],
        DAEMON_SET,
        pod!("/spec/securityContext/seccompProfile/type"),
        "\"Unconfined\"",
    ),
    case(&[("probes.port", "9000")], DAEMON_SET, container!("/startupProbe/httpGet/port"), "9000"),
    case(&[("probes.port", "9000")], DAEMON_SET, container!("/readinessProbe/httpGet/port"), "9000"),
    case(&[("probes.port", "9000")], DAEMON_SET, container!("/livenessProbe/httpGet/port"), "9000"),
    case(&[("probes.startup.periodSeconds", "5")], DAEMON_SET, container!("/startupProbe/periodSeconds"), "5"),
    case(&[("probes.startup.failureThreshold", "5")], DAEMON_SET, container!("/startupProbe/failureThreshold"), "5"),
    case(&[("probes.readiness.periodSeconds", "5")], DAEMON_SET, container!("/readinessProbe/periodSeconds"), "5"),
    case(
        &[("probes.readiness.failureThreshold", "5")],
        DAEMON_SET,
        container!("/readinessProbe/failureThreshold"),
        "5",
    ),
    case(&[("probes.liveness.periodSeconds", "6")], DAEMON_SET, container!("/livenessProbe/periodSeconds"), "6"),
    case(&[("probes.liveness.timeoutSeconds", "6")], DAEMON_SET, container!("/livenessProbe/timeoutSeconds"), "6"),
    case(&[("probes.liveness.failureThreshold", "7")], DAEMON_SET, container!("/livenessProbe/failureThreshold"), "7"),
    case(&[("admissionPolicy.enabled", "false")], ("ValidatingAdmissionPolicy", "npl-agent"), "", "null"),
    case(&[("flowControl.enabled", "false")], ("FlowSchema", "npl-agent-writes"), "", "null"),
    case(
        &[("flowControl.shares", "9")],
        ("PriorityLevelConfiguration", "npl-agent"),
        "/spec/limited/nominalConcurrencyShares",
        "9",
    ),
    case(
        &[("metrics.enabled", "true"), ("metrics.port", "9000")],
        DAEMON_SET,
        container!("/ports"),
        r#"[{"name":"metrics","containerPort":9000}]"#,
    ),
    case(
        &[("metrics.enabled", "true"), ("metrics.podMonitor.enabled", "true")],
        POD_MONITOR,
        "/spec/podMetricsEndpoints/0/port",
        "\"metrics\"",
    ),
    case(
        &[
            ("metrics.enabled", "true"),
            ("metrics.podMonitor.enabled", "true"),
            ("metrics.podMonitor.interval", "\"10s\""),
        ],
        POD_MONITOR,
        "/spec/podMetricsEndpoints/0/interval",
        "\"10s\"",
    ),
    case(
        &[
            ("metrics.enabled", "true"),
            ("metrics.podMonitor.enabled", "true"),
            ("metrics.podMonitor.labels", r#"{"a":"b"}"#),
        ],
        POD_MONITOR,
        "/metadata/labels/a",
        "\"b\"",
    ),
    case(
        &[("metrics.prometheusRule.enabled", "true"), ("metrics.prometheusRule.labels", r#"{"a":"b"}"#)],
        RULE,
        "/metadata/labels/a",
        "\"b\"",
    ),
    case(
        &[("metrics.dashboard.enabled", "true"), ("metrics.dashboard.labels", r#"{"a":"b"}"#)],
        ("ConfigMap", "npl-dashboard"),
        "/metadata/labels/a",
        "\"b\"",
    ),
    case(
        &[("openshift.enabled", "true")],
        ("SecurityContextConstraints", "npl-agent"),
        "/allowedCapabilities",
        r#"["BPF","NET_ADMIN","PERFMON"]"#,
    ),
    case(&[("retireOnUninstall.enabled", "false")], ("Job", "npl-retire"), "", "null"),
    case(
        &[("retireOnUninstall.timeoutSeconds", "60")],
        ("Job", "npl-retire"),
        container!("/args"),
        r#"["retire","--namespace=npl-system","--daemon-set=npl-agent","--timeout=60s"]"#,
    ),
    case(
        &[("nodeGroups", r#"[{"name":"edge","nodeLabel":{"key":"k","values":["v",""]},"config":{"resync":"10s"}}]"#)],
        ("DaemonSet", "npl-agent-edge"),
        pod!(
            "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0/matchExpressions/4"
        ),
        r#"{"key":"k","operator":"In","values":["v",""]}"#,
    ),
    case(&[("cleanup.enabled", "true")], DAEMON_SET, "", "null"),
    case(&[("cleanup.enabled", "true")], ("DaemonSet", "npl-cleanup"), "/metadata/namespace", "\"npl-system\""),
    case(
        &[("namespace.create", "true")],
        ("Namespace", "npl-system"),
        "/metadata/labels/pod-security.kubernetes.io~1enforce",
        "\"privileged\"",
    ),
];

/// Chart values, the environment variable of the agent that they set, and the expected content of this variable.
type VariableCase = (&'static [(&'static str, &'static str)], &'static str, &'static str);

const VARIABLES: &[VariableCase] = &[
    (&[("config.portRange", "\"40000-41000\"")], "NPL_PORT_RANGE", "40000-41000"),
    (&[("config.protocols", "\"tcp,udp,sctp\"")], "NPL_PROTOCOLS", "tcp,udp,sctp"),
    (&[("config.devices", "\"eth0,eth1\"")], "NPL_DEVICES", "eth0,eth1"),
    (&[("config.forwarding", "\"offload\"")], "NPL_FORWARDING", "offload"),
    (&[("config.ignoreNetworkPolicy", "true")], "NPL_IGNORE_NETWORK_POLICY", "true"),
    (&[("config.attach", "\"auto\"")], "NPL_ATTACH", "auto"),
    (&[("config.nodeIp", "\"external\"")], "NPL_NODE_IP", "external"),
    (&[("config.annotationDomain", "\"example.org\"")], "NPL_ANNOTATION_DOMAIN", "example.org"),
    (&[("config.namespaces", "\"shop,billing\"")], "NPL_NAMESPACES", "shop,billing"),
    (&[("config.serviceSelector", "\"a in (b,c)\"")], "NPL_SERVICE_SELECTOR", "a in (b,c)"),
    (&[("config.annotationFormat", "\"v2.6\"")], "NPL_ANNOTATION_FORMAT", "v2.6"),
    (&[("config.protocolPairing", "\"merged\"")], "NPL_PROTOCOL_PAIRING", "merged"),
    (&[("config.requestedNodePorts", "true")], "NPL_REQUESTED_NODE_PORTS", "true"),
    (&[("config.drain", "\"1m30s\"")], "NPL_DRAIN", "1m30s"),
    (&[("config.quarantine", "\"5m\"")], "NPL_QUARANTINE", "5m"),
    (&[("config.resync", "\"10s\"")], "NPL_RESYNC", "10s"),
    (&[("config.maxFlows", "1000000")], "NPL_MAX_FLOWS", "1000000"),
    (&[("config.serviceMetrics", "50")], "NPL_SERVICE_METRICS", "50"),
    (&[("config.nftGuard", "\"off\"")], "NPL_NFT_GUARD", "off"),
    (&[("config.logFormat", "\"json\"")], "NPL_LOG_FORMAT", "json"),
    (&[("logFilter", "\"warn\"")], "NPL_LOG", "warn"),
    (&[("extraEnv", r#"[{"name":"A","value":"b"}]"#)], "A", "b"),
    (&[("localClients.enabled", "false")], "NPL_CGROUP", "none"),
    (&[("localClients.cgroup", "\"system.slice\"")], "NPL_CGROUP", "/cgroup/system.slice"),
    (&[("localClients.scope", "\"host\"")], "NPL_LOCAL_CLIENTS", "host"),
    (&[("probes.port", "9000")], "NPL_LISTEN", "127.0.0.1:9000"),
    (&[("metrics.enabled", "true"), ("metrics.port", "9000")], "NPL_METRICS_LISTEN", "[$(HOST_IP)]:9000"),
];

/// Values whose effect has a separate test.
const ELSEWHERE: [&str; 4] = [
    "config",
    "image.digest",
    "metrics.prometheusRule.runbookUrl",
    // The default of `metrics.dashboard.labels` contains this key; `FIELDS` tests other keys.
    "metrics.dashboard.labels.grafana_dashboard",
];

/// Returns the content of an environment variable of the agent.
fn variable<'a>(objects: &'a [Value], name: &str) -> Option<&'a str> {
    variable_of(objects, DAEMON_SET, name)
}

/// Returns the content of an environment variable of the first container of a workload.
pub(crate) fn variable_of<'a>(objects: &'a [Value], workload: (&str, &str), name: &str) -> Option<&'a str> {
    let env = find(objects, workload.0, workload.1)?.pointer(container!(""))?["env"].as_array()?;
    env.iter().find(|variable| variable["name"] == name)?["value"].as_str()
}

/// A case with one of these values is rendered alone, because the value changes fields of the chart's objects that
/// other values set too.
const ALONE: [&str; 8] = [
    "cleanup.enabled",
    "feed.dns.enabled",
    "feed.service.type",
    "feed.tls.clientCertificates",
    "feed.tokenSecret.name",
    "feed.xds.enabled",
    "loadPrograms.enabled",
    "nodeGroups",
];

impl Case {
    /// The paths of the case's values.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &'static str> + use<> {
        self.set.iter().map(|(path, _)| *path)
    }

    /// Whether one rendering can test both cases, so that the test needs fewer renderings.
    fn goes_with(&self, other: &Self) -> bool {
        let is_alone = |case: &Self| case.set.iter().any(|(path, _)| ALONE.contains(path));
        let is_below = |a: &str, b: &str| a.starts_with(b) || b.starts_with(a);
        // A case that disables a part of the chart must not be rendered together with a case that sets a value of this
        // part, because the value would have no effect.
        let scope = |path: &'static str, json: &str| {
            if json == "false" { path.trim_end_matches("enabled") } else { path }
        };
        let differ = |(path, json): &(&'static str, &'static str)| {
            let own = scope(path, json);
            other.set.iter().any(|known| is_below(scope(known.0, known.1), own) && *known != (*path, *json))
        };
        let is_same_field = self.object == other.object && is_below(self.field, other.field);
        !is_alone(self) && !is_alone(other) && !is_same_field && !self.set.iter().any(differ)
    }
}

/// Returns the content of a case's field; `null` if the field is absent.
fn field(objects: &[Value], Case { object: (kind, name), field, .. }: &Case) -> Value {
    find(objects, kind, name).and_then(|object| object.pointer(field)).cloned().unwrap_or_default()
}

#[test]
fn each_value_sets_its_field() {
    assert_each_sets_its_field(FIELDS, &[]);
}

/// Checks each case's field in the rendered chart: with the values of the case and of `base`, the field has the
/// expected content; with `base` alone, the field has another content or is absent.
pub(crate) fn assert_each_sets_its_field(cases: &[Case], base: &[(&str, &str)]) {
    let mut batches: Vec<Vec<&Case>> = Vec::new();
    for case in cases {
        match batches.iter_mut().find(|batch| batch.iter().all(|other| case.goes_with(other))) {
            Some(batch) => batch.push(case),
            None => batches.push(vec![case]),
        }
    }
    let default = rendered(base);
    for batch in batches {
        let set: BTreeSet<(&str, &str)> = batch.iter().flat_map(|case| case.set).chain(base).copied().collect();
        let objects = rendered(&set.into_iter().collect::<Vec<_>>());
        for case in batch {
            let expected: Value = serde_json::from_str(case.expected).unwrap();
            assert_eq!(field(&objects, case), expected, "{:?}: {} of {:?}", case.set, case.field, case.object);
            assert_ne!(field(&default, case), expected, "{:?} must differ from the default", case.set);
        }
    }
}

#[test]
fn each_option_becomes_a_variable_of_the_agent() {
    let default = rendered(&[]);
    let (exclusive, together): (Vec<_>, Vec<_>) = VARIABLES.iter().partition(|(_, name, _)| *name == "NPL_CGROUP");
    let mut batches: Vec<Vec<&VariableCase>> = exclusive.into_iter().map(|case| vec![case]).collect();
    batches.push(together);
    for batch in batches {
        let set: Vec<(&str, &str)> = batch.iter().flat_map(|(set, ..)| *set).copied().collect();
        let objects = rendered(&set);
        for (set, name, expected) in batch {
            assert_eq!(variable(&objects, name), Some(*expected), "{set:?}");
            assert_ne!(variable(&default, name), Some(*expected), "{set:?} must differ from the default");
        }
    }
}

/// Collects the paths of all values. An empty object counts as a value; other objects are searched recursively.
fn leaves(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value.as_object() {
        Some(map) if !map.is_empty() => {
            for (key, below) in map {
                leaves(below, &format!("{path}.{key}"), found);
            }
        }
        _ => drop(found.insert(path.trim_start_matches('.').to_owned())),
    }
}

#[test]
fn every_value_has_a_case() {
    let values: Value =
        serde_saphyr::from_str(&fs::read_to_string(helm::chart().join("values.yaml")).unwrap()).unwrap();
    let schema: Value =
        serde_json::from_str(&fs::read_to_string(helm::chart().join("values.schema.json")).unwrap()).unwrap();
    let mut all = BTreeSet::new();
    leaves(&values, "", &mut all);
    let options = schema.pointer("/properties/config/properties").unwrap().as_object().unwrap();
    all.extend(options.keys().map(|option| format!("config.{option}")));
    let variables = VARIABLES.iter().flat_map(|(set, ..)| *set).map(|(path, _)| *path);
    let tested = FIELDS.iter().flat_map(Case::paths).chain(variables).chain(ELSEWHERE).chain(feed::tested());
    let tested: BTreeSet<&str> = tested.collect();
    let untested: Vec<_> = all.iter().filter(|path| !tested.contains(path.as_str())).collect();
    assert!(untested.is_empty(), "no case sets {untested:?}");
}

#[test]
fn a_digest_takes_precedence_over_the_tag_in_every_container() {
    let digest = format!("sha256:{}", "a".repeat(64));
    let set = [("image.digest", &*json!(digest).to_string()), ("image.tag", "\"v9\""), ("mountBpffs.enabled", "true")];
    let objects = rendered(&set);
    let mut count = 0;
    for (kind, name) in [DAEMON_SET, ("Job", "npl-retire")] {
        let spec = find(&objects, kind, name).unwrap().pointer("/spec/template/spec").unwrap();
        for container in ["initContainers", "containers"].iter().filter_map(|list| spec[list].as_array()).flatten() {
            assert_eq!(container["image"], format!("localhost/npl-agent@{digest}"));
            count += 1;
        }
    }
    assert_eq!(count, 4);
}

#[test]
fn the_admission_policy_follows_the_annotation_domain() {
    let objects = rendered(&[("config.annotationDomain", "\"example.org\"")]);
    let policy = find(&objects, "ValidatingAdmissionPolicy", "npl-agent").unwrap();
    assert_eq!(policy.pointer("/spec/variables/0/expression").unwrap(), "'example.org'");
    let text = policy.to_string();
    assert!(!text.contains("antrea.io"), "{text}");
}

#[test]
fn every_object_has_the_labels_of_kubernetes_and_a_namespaced_one_the_releases_namespace() {
    let text = helm::template(
        &["--namespace", "elsewhere", "--values"]
            .iter()
            .copied()
            .chain([
                helm::chart().join("values-openshift.yaml").to_str().unwrap(),
                "--set",
                "metrics.dashboard.enabled=true,feed.enabled=true,feed.hostNetwork=true",
            ])
            .collect::<Vec<_>>(),
    )
    .unwrap();
    let objects = crate::objects::parse(&text);
    const CLUSTER_SCOPED: [&str; 7] = [
        "ClusterRole",
        "ClusterRoleBinding",
        "FlowSchema",
        "PriorityLevelConfiguration",
        "SecurityContextConstraints",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    ];
    assert!(objects.len() > 22, "{}", objects.len());
    for object in &objects {
        let (kind, metadata) = (object["kind"].as_str().unwrap(), &object["metadata"]);
        let expected = [
            ("app.kubernetes.io/name", "npl"),
            ("app.kubernetes.io/instance", "npl"),
            ("app.kubernetes.io/version", "0.1.0"),
            ("app.kubernetes.io/managed-by", "Helm"),
            ("app.kubernetes.io/part-of", "npl"),
            ("helm.sh/chart", "npl-0.1.0"),
        ];
        for (label, value) in expected {
            assert_eq!(metadata["labels"][label], value, "{kind} {}", metadata["name"]);
        }
        let namespace = metadata["namespace"].as_str();
        assert_eq!(namespace, (!CLUSTER_SCOPED.contains(&kind)).then_some("elsewhere"), "{kind} {}", metadata["name"]);
    }
    assert!(
        !text.contains("npl-system"),
        "the output contains `npl-system`, although the release is in the namespace `elsewhere`"
    );
}

/// On `OpenShift`, the default security context constraints would reject a hook with a fixed user ID.
#[test]
fn the_hook_sets_no_user_id_on_openshift() {
    let context = |objects: &[Value]| {
        let job = find(objects, "Job", "npl-retire").unwrap();
        job.pointer("/spec/template/spec/securityContext").unwrap().clone()
    };
    let (usual, openshift) = (context(&rendered(&[])), context(&rendered(&[("openshift.enabled", "true")])));
    assert_eq!((&usual["runAsUser"], &openshift["runAsUser"]), (&json!(65534), &Value::Null));
    assert_eq!((&usual["runAsNonRoot"], &openshift["runAsNonRoot"]), (&json!(true), &json!(true)));
}

/// No chart value may change the selector of the DaemonSet: the API server would reject an upgrade that changes a
/// selector.
#[test]
fn no_value_changes_the_selector() {
    let set = [("commonLabels", r#"{"a":"b"}"#), ("podLabels", r#"{"a":"b"}"#)];
    let selector = |objects: &[Value]| find(objects, DAEMON_SET.0, DAEMON_SET.1).unwrap()["spec"]["selector"].clone();
    let expected =
        json!({ "matchLabels": { "app.kubernetes.io/name": "npl", "app.kubernetes.io/component": "agent" } });
    assert_eq!(selector(&rendered(&set)), expected);
    assert_eq!(selector(&rendered(&[])), expected);
}

/// For users without Helm, the patch `deploy/mount-bpffs.yaml` has the same effect as the value `mountBpffs.enabled`.
#[test]
fn the_patch_that_mounts_a_bpf_file_system_adds_what_the_value_adds() {
    let text = fs::read_to_string(npl_testkit::tools::repository_file("deploy/mount-bpffs.yaml")).unwrap();
    let patch = crate::objects::parse(&text).remove(0);
    let added = patch.pointer("/spec/template/spec").unwrap();
    let objects = rendered(&[("mountBpffs.enabled", "true")]);
    let spec = find(&objects, DAEMON_SET.0, DAEMON_SET.1).unwrap().pointer("/spec/template/spec").unwrap();
    assert_eq!(spec["initContainers"][0], added["initContainers"][0]);
    assert!(spec["volumes"].as_array().unwrap().contains(&added["volumes"][0]));
    let default = rendered(&[]);
    let without = find(&default, DAEMON_SET.0, DAEMON_SET.1).unwrap().pointer("/spec/template/spec").unwrap();
    assert_eq!(
        spec["initContainers"].as_array().unwrap().get(1..),
        without["initContainers"].as_array().map(Vec::as_slice)
    );
}
