// SPDX-License-Identifier: Apache-2.0
//! Tests that Helm rejects wrong values and unsupported Kubernetes versions, and that `helm lint` accepts each profile.

use npl_testkit::{helm, tools};

/// Wrong values, each with a part of the error message.
const WRONG: [(&str, &str); 14] = [
    ("prot=1", "additional properties 'prot' not allowed"),
    ("config.portrange=1-2", "additional properties 'portrange' not allowed"),
    ("config.portRange=61000", "portRange"),
    ("config.forwarding=fast", "must be one of 'stack', 'redirect', 'offload'"),
    ("config.drain=30", "drain"),
    ("image.pullPolicy=Sometimes", "pullPolicy"),
    ("image.repository=localhost/npl-agent:0.1.0", "repository"),
    ("updateStrategy.maxUnavailable=0", "maxUnavailable"),
    ("metrics.podMonitor.enabled=true", "metrics.podMonitor.enabled requires metrics.enabled"),
    ("feed.replicas=0", "replicas"),
    ("feed.dns.port=53", "port"),
    ("feed.service.type=ExternalName", "must be one of 'ClusterIP', 'NodePort', 'LoadBalancer'"),
    ("feed.allow={192.0.2.0-24}", "allow"),
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
