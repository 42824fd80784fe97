// SPDX-License-Identifier: Apache-2.0
//! Tests that Helm rejects wrong values and unsupported Kubernetes versions, and that `helm lint` accepts each profile.

use npl_testkit::{helm, tools};

/// Wrong values, each with a part of the error message.
const WRONG: [(&str, &str); 34] = [
    ("prot=1", "additional properties 'prot' not allowed"),
    ("config.portrange=1-2", "additional properties 'portrange' not allowed"),
    ("config.portRange=61000", "portRange"),
    ("config.forwarding=fast", "must be one of 'stack', 'redirect', 'offload'"),
    ("config.drain=30", "drain"),
    ("config.namespaces=Shop", "namespaces"),
    ("config.namespaces=shop\\,\\,billing", "namespaces"),
    ("config.namespaces=shop\\,shop", "config.namespaces must name each namespace once: shop,shop"),
    ("image.pullPolicy=Sometimes", "pullPolicy"),
    ("image.repository=localhost/npl-agent:0.1.0", "repository"),
    ("updateStrategy.maxUnavailable=0", "maxUnavailable"),
    ("metrics.podMonitor.enabled=true", "metrics.podMonitor.enabled requires metrics.enabled"),
    ("feed.replicas=0", "replicas"),
    ("feed.dns.port=53", "port"),
    ("feed.service.type=ExternalName", "must be one of 'ClusterIP', 'NodePort', 'LoadBalancer'"),
    ("feed.allow={192.0.2.0-24}", "allow"),
    (
        "feed.enabled=true,feed.allow={192.0.2.0/24}",
        "feed.allow with feed.service.type=NodePort requires feed.service.externalTrafficPolicy=Local: otherwise, kube-proxy",
    ),
    (
        "feed.enabled=true,feed.allow={192.0.2.0/24},feed.service.type=LoadBalancer",
        "feed.allow with feed.service.type=LoadBalancer requires",
    ),
    ("feed.enabled=true,feed.http.port=18000", "feed.xds.port and feed.http.port must differ"),
    ("feed.enabled=true,feed.xds.enabled=false,feed.dns.port=8080", "feed.dns.port and feed.http.port must differ"),
    ("feed.enabled=true,feed.xds.port=5353", "feed.dns.port and feed.xds.port must differ"),
    (
        "feed.enabled=true,feed.service.nodePorts.xds=30153",
        "feed.service.nodePorts.dns and feed.service.nodePorts.xds must differ",
    ),
    (
        "feed.enabled=true,feed.hostNetwork=true,metrics.enabled=true,metrics.port=8080",
        "feed.http.port and metrics.port must differ with feed.hostNetwork",
    ),
    ("commonLabels.app\\.kubernetes\\.io/version=v1", "commonLabels must not contain app.kubernetes.io/version"),
    ("podLabels.app\\.kubernetes\\.io/component=a", "podLabels must not contain app.kubernetes.io/component"),
    ("feed.podLabels.app\\.kubernetes\\.io/name=a", "feed.podLabels must not contain app.kubernetes.io/name"),
    ("podLabels.npl/node-group=a", "podLabels must not contain npl/node-group"),
    ("nodeGroups[0].name=Edge,nodeGroups[0].nodeLabel.key=k,nodeGroups[0].nodeLabel.values={v}", "name"),
    (
        "nodeGroups[0].name=a-name-of-more-than-20-characters,nodeGroups[0].nodeLabel.key=k,nodeGroups[0].nodeLabel.values={v}",
        "name",
    ),
    ("nodeGroups[0].name=a,nodeGroups[0].config.resync=9s", "nodeLabel"),
    (
        "nodeGroups[0].name=a,nodeGroups[0].nodeLabel.key=k,nodeGroups[0].nodeLabel.values={v},nodeGroups[0].config.forwarding=fast",
        "must be one of 'stack', 'redirect', 'offload'",
    ),
    (
        "nodeGroups[0].name=a,nodeGroups[0].nodeLabel.key=k,nodeGroups[0].nodeLabel.values={v},\
         nodeGroups[1].name=a,nodeGroups[1].nodeLabel.key=k,nodeGroups[1].nodeLabel.values={w}",
        "nodeGroups must have different names: two groups have the name a",
    ),
    (
        "nodeGroups[0].name=a,nodeGroups[0].nodeLabel.key=k,nodeGroups[0].nodeLabel.values={v},nodeGroups[0].config.annotationDomain=example.org",
        "config.annotationDomain must not be set for the group a of nodeGroups, only for all Nodes: the admission policy",
    ),
    ("feed.enabled=true,feed.tls.clientCertificates=true", "feed.tls.clientCertificates requires feed.tls.secretName"),
];

#[test]
fn a_wrong_value_is_refused_with_its_name() {
    for (wrong, words) in WRONG {
        let error = helm::template(&["--set", wrong]).unwrap_err().to_string();
        assert!(error.contains(words), "{wrong}: {error}");
    }
}

#[test]
fn values_that_only_resemble_wrong_ones_are_accepted() {
    for right in [
        "feed.enabled=true,feed.allow={192.0.2.0/24},feed.service.type=ClusterIP",
        "feed.enabled=true,feed.allow={192.0.2.0/24},feed.service.externalTrafficPolicy=Local",
        // The feed is disabled here, so its values have no effect, and Helm accepts them.
        "feed.allow={192.0.2.0/24},feed.http.port=18000",
        "feed.enabled=true,feed.xds.enabled=false,feed.http.port=18000",
        "feed.enabled=true,feed.service.nodePorts.xds=0,feed.service.nodePorts.dns=0",
        "feed.enabled=true,metrics.enabled=true,metrics.port=8080",
        "commonLabels.team=a,podLabels.app=b",
        // An empty list of namespaces means all namespaces.
        "config.namespaces=",
        "config.namespaces=shop\\,billing",
    ] {
        helm::template(&["--set", right]).unwrap();
    }
}

#[test]
fn helm_lint_finds_nothing_in_any_profile() {
    for profile in [None, Some("openshift"), Some("gke"), Some("hardened")] {
        let mut lint = helm::command().unwrap();
        lint.args(["lint", "--strict"]).arg(helm::chart());
        if let Some(profile) = profile {
            lint.arg("--values").arg(helm::chart().join(format!("values-{profile}.yaml")));
        }
        let output = tools::output(&mut lint).unwrap();
        assert!(output.contains("1 chart(s) linted, 0 chart(s) failed"), "{output}");
        assert!(!output.contains("WARNING") && !output.contains("ERROR"), "{output}");
    }
}

#[test]
fn the_chart_refuses_a_kubernetes_without_admission_policies() {
    let error = helm::template(&["--kube-version", "1.29.9"]).unwrap_err().to_string();
    assert!(error.contains("chart requires kubeVersion: >=1.30.0-0"), "{error}");
    helm::template(&["--kube-version", "v1.33.2-gke.100"]).unwrap();
}
