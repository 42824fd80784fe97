// SPDX-License-Identifier: Apache-2.0
//! Tests that each value below `feed` has the effect that its comment describes.

use serde_json::{Value, json};

use crate::objects::{find, rendered};
use crate::values::{Case, assert_each_sets_its_field, case, container, pod, variable_of};

const DEPLOYMENT: (&str, &str) = ("Deployment", "npl-feed");
const SERVICE: (&str, &str) = ("Service", "npl-feed");
const BUDGET: (&str, &str) = ("PodDisruptionBudget", "npl-feed");
const POD_MONITOR: (&str, &str) = ("PodMonitor", "npl-feed");
const ENABLED: (&str, &str) = ("feed.enabled", "true");
/// The value that `feed.allow` requires unless the Service's type is `ClusterIP`: the Service must preserve the
/// clients' source addresses.
const LOCAL: (&str, &str) = ("feed.service.externalTrafficPolicy", "\"Local\"");

/// Chart values, each of which sets one field of one rendered object.
const FIELDS: &[Case] = &[
    case(&[("feed.image.repository", "\"r/a\"")], DEPLOYMENT, container!("/image"), "\"r/a:0.1.0\""),
    case(&[("feed.image.tag", "\"v9\"")], DEPLOYMENT, container!("/image"), "\"localhost/npl-feed:v9\""),
    case(&[("feed.image.pullPolicy", "\"Always\"")], DEPLOYMENT, container!("/imagePullPolicy"), "\"Always\""),
    case(&[("imagePullSecrets", r#"[{"name":"s"}]"#)], DEPLOYMENT, pod!("/spec/imagePullSecrets"), r#"[{"name":"s"}]"#),
    case(&[("feed.replicas", "3")], DEPLOYMENT, "/spec/replicas", "3"),
    case(&[("feed.xds.enabled", "false")], SERVICE, "/spec/ports/0/name", "\"http\""),
    case(&[("feed.xds.port", "18001")], DEPLOYMENT, container!("/ports/0/containerPort"), "18001"),
    case(&[("feed.dns.enabled", "false")], SERVICE, "/spec/ports/2", "null"),
    case(&[("feed.dns.enabled", "false")], DEPLOYMENT, container!("/ports/2"), "null"),
    case(&[("feed.dns.port", "5354")], DEPLOYMENT, container!("/ports/2/containerPort"), "5354"),
    case(&[("feed.dns.port", "5354")], DEPLOYMENT, container!("/ports/3/containerPort"), "5354"),
    case(&[("feed.http.port", "8081")], DEPLOYMENT, container!("/ports/1/containerPort"), "8081"),
    case(&[("feed.service.type", "\"LoadBalancer\"")], SERVICE, "/spec/type", "\"LoadBalancer\""),
    case(&[("feed.service.type", "\"ClusterIP\"")], SERVICE, "/spec/externalTrafficPolicy", "null"),
    case(&[("feed.service.type", "\"ClusterIP\"")], SERVICE, "/spec/ports/0/nodePort", "null"),
    case(&[("feed.service.nodePorts.xds", "30001")], SERVICE, "/spec/ports/0/nodePort", "30001"),
    case(&[("feed.service.nodePorts.http", "0")], SERVICE, "/spec/ports/1/nodePort", "null"),
    case(&[("feed.service.nodePorts.dns", "30053")], SERVICE, "/spec/ports/2/nodePort", "30053"),
    case(&[("feed.service.nodePorts.dns", "30053")], SERVICE, "/spec/ports/3/nodePort", "30053"),
    case(&[("feed.service.externalTrafficPolicy", "\"Local\"")], SERVICE, "/spec/externalTrafficPolicy", "\"Local\""),
    case(&[("feed.service.annotations", r#"{"a":"b"}"#)], SERVICE, "/metadata/annotations", r#"{"a":"b"}"#),
    case(&[("feed.hostNetwork", "true")], DEPLOYMENT, pod!("/spec/hostNetwork"), "true"),
    case(
        &[("feed.hostNetwork", "true")],
        DEPLOYMENT,
        "/spec/strategy/rollingUpdate",
        r#"{"maxUnavailable":1,"maxSurge":0}"#,
    ),
    case(
        &[("feed.hostNetwork", "true"), ("openshift.enabled", "true")],
        ("RoleBinding", "npl-feed-scc"),
        "/roleRef/name",
        "\"system:openshift:scc:hostnetwork-v2\"",
    ),
    case(&[("openshift.enabled", "true")], DEPLOYMENT, pod!("/spec/securityContext/runAsUser"), "null"),
    case(
        &[("feed.tokenSecret.name", "\"s\""), ("feed.tokenSecret.key", "\"k\"")],
        DEPLOYMENT,
        pod!("/spec/volumes/0/secret"),
        r#"{"secretName":"s","items":[{"key":"k","path":"token"}]}"#,
    ),
    // A name that looks like a number must be rendered as a YAML string.
    case(
        &[("feed.tokenSecret.name", "\"1\""), ("feed.tokenSecret.key", "\"2\"")],
        DEPLOYMENT,
        pod!("/spec/volumes/0/secret"),
        r#"{"secretName":"1","items":[{"key":"2","path":"token"}]}"#,
    ),
    case(&[("feed.tls.secretName", "\"1\"")], DEPLOYMENT, pod!("/spec/volumes/0/secret/secretName"), "\"1\""),
    case(&[("feed.priorityClassName", "\"1\"")], DEPLOYMENT, pod!("/spec/priorityClassName"), "\"1\""),
    case(
        &[("feed.tls.secretName", "\"c\"")],
        DEPLOYMENT,
        pod!("/spec/volumes"),
        r#"[{"name":"tls","secret":{"secretName":"c"}}]"#,
    ),
    case(&[("feed.tls.secretName", "\"c\"")], DEPLOYMENT, container!("/readinessProbe/httpGet/scheme"), "\"HTTPS\""),
    case(
        &[("feed.tls.secretName", "\"c\""), ("feed.tls.clientCertificates", "true")],
        DEPLOYMENT,
        container!("/livenessProbe/tcpSocket/port"),
        "\"http\"",
    ),
    case(&[("feed.probes.readiness.periodSeconds", "5")], DEPLOYMENT, container!("/readinessProbe/periodSeconds"), "5"),
    case(
        &[("feed.probes.readiness.timeoutSeconds", "6")],
        DEPLOYMENT,
        container!("/readinessProbe/timeoutSeconds"),
        "6",
    ),
    case(
        &[("feed.probes.readiness.failureThreshold", "7")],
        DEPLOYMENT,
        container!("/readinessProbe/failureThreshold"),
        "7",
    ),
    case(&[("feed.probes.liveness.periodSeconds", "5")], DEPLOYMENT, container!("/livenessProbe/periodSeconds"), "5"),
    case(&[("feed.probes.liveness.timeoutSeconds", "6")], DEPLOYMENT, container!("/livenessProbe/timeoutSeconds"), "6"),
    case(
        &[("feed.probes.liveness.failureThreshold", "7")],
        DEPLOYMENT,
        container!("/livenessProbe/failureThreshold"),
        "7",
    ),
    case(&[("feed.shutdownDelaySeconds", "30")], DEPLOYMENT, pod!("/spec/terminationGracePeriodSeconds"), "35"),
    case(&[("feed.podDisruptionBudget.enabled", "false")], BUDGET, "", "null"),
    case(&[("feed.podDisruptionBudget.maxUnavailable", "\"50%\"")], BUDGET, "/spec/maxUnavailable", "\"50%\""),
    case(
        &[("feed.topologySpread.topologyKey", "\"topology.kubernetes.io/zone\"")],
        DEPLOYMENT,
        pod!("/spec/topologySpreadConstraints/0/topologyKey"),
        "\"topology.kubernetes.io/zone\"",
    ),
    case(&[("feed.topologySpread.maxSkew", "2")], DEPLOYMENT, pod!("/spec/topologySpreadConstraints/0/maxSkew"), "2"),
    case(
        &[("feed.topologySpread.whenUnsatisfiable", "\"DoNotSchedule\"")],
        DEPLOYMENT,
        pod!("/spec/topologySpreadConstraints/0/whenUnsatisfiable"),
        "\"DoNotSchedule\"",
    ),
    case(&[("feed.nodeSelector", r#"{"a":"b"}"#)], DEPLOYMENT, pod!("/spec/nodeSelector"), r#"{"a":"b"}"#),
    case(&[("feed.tolerations", r#"[{"key":"k"}]"#)], DEPLOYMENT, pod!("/spec/tolerations"), r#"[{"key":"k"}]"#),
    case(&[("feed.priorityClassName", "\"p\"")], DEPLOYMENT, pod!("/spec/priorityClassName"), "\"p\""),
    case(&[("feed.resources.requests.cpu", "\"1\"")], DEPLOYMENT, container!("/resources/requests/cpu"), "\"1\""),
    case(
        &[("feed.resources.requests.memory", "\"1Gi\"")],
        DEPLOYMENT,
        container!("/resources/requests/memory"),
        "\"1Gi\"",
    ),
    case(&[("feed.resources.limits.memory", "\"1Gi\"")], DEPLOYMENT, container!("/resources/limits/memory"), "\"1Gi\""),
    case(&[("feed.podAnnotations", r#"{"a":"b"}"#)], DEPLOYMENT, pod!("/metadata/annotations/a"), "\"b\""),
    case(&[("feed.podLabels", r#"{"a":"b"}"#)], DEPLOYMENT, pod!("/metadata/labels/a"), "\"b\""),
    case(
        &[
            ("metrics.enabled", "true"),
            ("metrics.podMonitor.enabled", "true"),
            ("feed.tokenSecret.name", "\"s\""),
            ("feed.tls.secretName", "\"c\""),
        ],
        POD_MONITOR,
        "/spec/podMetricsEndpoints/0",
        r#"{"port":"http","path":"/metrics","scheme":"https","tlsConfig":{"insecureSkipVerify":true},
            "authorization":{"credentials":{"name":"s","key":"token"}},
            "relabelings":[{"targetLabel":"job","replacement":"npl-feed"}]}"#,
    ),
    case(&[("cleanup.enabled", "true")], DEPLOYMENT, "", "null"),
];

/// For each case: the path and JSON of a chart value, the environment variable of the feed that the value sets, and the
/// expected content of this variable.
const VARIABLES: &[(&str, &str, &str, &str)] = &[
    ("feed.xds.enabled", "false", "NPL_FEED_XDS", "none"),
    ("feed.dns.port", "5354", "NPL_FEED_DNS", "[::]:5354"),
    ("feed.http.port", "8081", "NPL_FEED_HTTP", "[::]:8081"),
    ("feed.xds.maxNames", "5000000", "NPL_FEED_XDS_MAX_NAMES", "5000000"),
    ("feed.dns.zone", "\"npl.example.org\"", "NPL_FEED_ZONE", "npl.example.org"),
    ("feed.services", "\"a in (b,c)\"", "NPL_FEED_SERVICES", "a in (b,c)"),
    ("feed.logFormat", "\"json\"", "NPL_FEED_LOG_FORMAT", "json"),
    ("feed.shutdownDelaySeconds", "30", "NPL_FEED_SHUTDOWN_DELAY", "30s"),
    ("feed.allow", r#"["192.0.2.0/24","2001:db8::1"]"#, "NPL_FEED_ALLOW", "192.0.2.0/24,2001:db8::1"),
    ("feed.tokenSecret.name", "\"s\"", "NPL_FEED_TOKEN_FILE", "/etc/npl-feed/token/token"),
    ("feed.tls.secretName", "\"c\"", "NPL_FEED_TLS_CERT", "/etc/npl-feed/tls/tls.crt"),
    ("feed.tls.secretName", "\"c\"", "NPL_FEED_TLS_KEY", "/etc/npl-feed/tls/tls.key"),
    ("feed.tls.clientCertificates", "true", "NPL_FEED_TLS_CLIENT_CA", "/etc/npl-feed/tls/ca.crt"),
    ("config.annotationDomain", "\"example.org\"", "NPL_FEED_ANNOTATION_DOMAIN", "example.org"),
    ("config.portRange", "\"40000-41000\"", "NPL_FEED_PORT_RANGE", "40000-41000"),
    ("config.drain", "\"1m\"", "NPL_FEED_DRAIN", "1m"),
];

/// The paths of the values that this file tests.
pub(crate) fn tested() -> impl Iterator<Item = &'static str> {
    let fields = FIELDS.iter().flat_map(Case::paths);
    fields.chain(VARIABLES.iter().map(|(path, ..)| *path)).chain([ENABLED.0, "feed.image.digest"])
}

#[test]
fn without_its_value_the_feed_is_not_rendered() {
    let objects = rendered(&[]);
    assert!(objects.iter().all(|object| object["metadata"]["name"] != "npl-feed"));
    assert!(find(&rendered(&[ENABLED]), DEPLOYMENT.0, DEPLOYMENT.1).is_some());
}

#[test]
fn each_value_of_the_feed_sets_its_field() {
    assert_each_sets_its_field(FIELDS, &[ENABLED]);
}

#[test]
fn each_option_becomes_a_variable_of_the_feed() {
    let default = rendered(&[ENABLED]);
    let set = VARIABLES.iter().map(|(path, json, ..)| (*path, *json));
    let set: Vec<(&str, &str)> = set.chain([ENABLED, LOCAL]).collect();
    let objects = rendered(&set);
    for (path, json, name, expected) in VARIABLES {
        assert_eq!(variable_of(&objects, DEPLOYMENT, name), Some(*expected), "{path}={json}");
        assert_ne!(variable_of(&default, DEPLOYMENT, name), Some(*expected), "{path} must differ from the default");
    }
}

#[test]
fn a_digest_takes_precedence_over_the_tag_of_the_feed() {
    let digest = format!("sha256:{}", "a".repeat(64));
    let objects = rendered(&[ENABLED, ("feed.image.digest", &json!(digest).to_string()), ("feed.image.tag", "\"v9\"")]);
    let deployment = find(&objects, DEPLOYMENT.0, DEPLOYMENT.1).unwrap();
    assert_eq!(deployment.pointer(container!("/image")).unwrap(), &json!(format!("localhost/npl-feed@{digest}")));
}

/// The chart creates no `PodMonitor` for a feed that requires client certificates, because Prometheus has no client
/// certificate.
#[test]
fn a_feed_that_asks_for_client_certificates_is_not_scraped() {
    let scraped = [ENABLED, ("metrics.enabled", "true"), ("metrics.podMonitor.enabled", "true")];
    let tls = [("feed.tls.secretName", "\"c\""), ("feed.tls.clientCertificates", "true")];
    assert!(find(&rendered(&scraped), POD_MONITOR.0, POD_MONITOR.1).is_some());
    assert_eq!(find(&rendered(&[&scraped[..], &tls].concat()), POD_MONITOR.0, POD_MONITOR.1), None);
}

/// No chart value may change the selector of the feed's Deployment: the API server would reject an upgrade that changes
/// a selector.
#[test]
fn no_value_changes_the_selector_of_the_feed() {
    let selector = |objects: &[Value]| find(objects, DEPLOYMENT.0, DEPLOYMENT.1).unwrap()["spec"]["selector"].clone();
    let changed = rendered(&[ENABLED, ("commonLabels", r#"{"a":"b"}"#), ("feed.podLabels", r#"{"a":"b"}"#)]);
    let expected = json!({ "matchLabels": { "app.kubernetes.io/name": "npl", "app.kubernetes.io/component": "feed" } });
    assert_eq!(selector(&changed), expected);
    assert_eq!(selector(&rendered(&[ENABLED])), expected);
}
