// SPDX-License-Identifier: Apache-2.0
//! Tests that a real API server accepts each profile, and that Helm installs, changes and removes a release there.

use std::fs;
use std::time::Duration;

use npl_testkit::cluster::{Cluster, timeout_option};
use npl_testkit::control_plane::ControlPlane;
use npl_testkit::run::Run;
use npl_testkit::{helm, poll, tools};
use serde_json::Value;

use crate::objects::parse;

const LIMIT: Duration = Duration::from_secs(30);

/// The profiles: the name of each, and its arguments for Helm.
const PROFILES: [(&str, &[&str]); 9] = [
    ("default", &[]),
    ("openshift", &["--values", "values-openshift.yaml"]),
    ("gke", &["--values", "values-gke.yaml"]),
    ("hardened", &["--values", "values-hardened.yaml"]),
    (
        "monitoring",
        &[
            "--set",
            "metrics.enabled=true,metrics.podMonitor.enabled=true,metrics.prometheusRule.enabled=true,metrics.dashboard.enabled=true",
        ],
    ),
    ("feed", &["--set", "feed.enabled=true"]),
    (
        "feed with all options",
        &[
            "--values",
            "values-openshift.yaml",
            "--set",
            "feed.enabled=true,feed.hostNetwork=true,feed.service.type=LoadBalancer,feed.service.externalTrafficPolicy=Local,feed.allow={192.0.2.0/24},feed.tokenSecret.name=token,feed.tls.secretName=tls",
        ],
    ),
    (
        "groups of Nodes",
        &[
            "--set-json",
            r#"nodeGroups=[{"name":"edge","nodeLabel":{"key":"example.org/zone","values":["edge",""]},"config":{"portRange":"40000-41000","forwarding":"offload"}},{"name":"large","nodeLabel":{"key":"size","values":["large"]},"resources":{"limits":{"memory":"1Gi"}}}]"#,
        ],
    ),
    ("cleanup", &["--set", "cleanup.enabled=true"]),
];

/// An API server with the CRDs of all kinds that the chart uses.
struct World {
    run: Run,
    plane: ControlPlane,
    cluster: Cluster,
}

impl World {
    fn start() -> Self {
        let run = Run::start().unwrap();
        let plane = ControlPlane::start(&run, None).unwrap();
        let cluster = Cluster::new(&plane).unwrap();
        let kinds = tools::repository_file("npl-testkit/tests/chart/crds.yaml");
        cluster.kubectl(&["apply", "--filename", kinds.to_str().unwrap()]).unwrap();
        cluster.kubectl(&["wait", "--for=condition=Established", timeout_option(), "crd", "--all"]).unwrap();
        cluster.kubectl(&["create", "namespace", "npl-system"]).unwrap();
        Self { run, plane, cluster }
    }

    /// Runs Helm in the namespace `npl-system`.
    fn helm(&self, arguments: &[&str]) -> String {
        let mut helm = helm::command().unwrap();
        helm.arg("--kubeconfig").arg(self.plane.admin_kubeconfig());
        helm.args(["--namespace", "npl-system"]).args(arguments);
        // Helm's caches and configuration are placed in the directory of the test run, so that they are removed with
        // it.
        helm.env("HELM_CACHE_HOME", self.run.file("helm-cache")).env("HELM_CONFIG_HOME", self.run.file("helm-config"));
        tools::output(&mut helm).unwrap()
    }

    fn daemon_set(&self) -> Option<Value> {
        self.cluster.client().get("/apis/apps/v1/namespaces/npl-system/daemonsets/npl-agent").ok()
    }

    /// The names of all objects with NPL's label, without Helm's release records.
    fn objects(&self) -> String {
        let kinds = "daemonsets,deployments,services,poddisruptionbudgets,jobs,serviceaccounts,resourcequotas,roles,rolebindings,clusterroles,clusterrolebindings,\
                     flowschemas,prioritylevelconfigurations,validatingadmissionpolicies,\
                     validatingadmissionpolicybindings,podmonitors,prometheusrules,configmaps";
        let label = ["--all-namespaces", "--selector", "app.kubernetes.io/name=npl", "--output", "name"];
        self.cluster.kubectl(&[&["get", kinds][..], &label].concat()).unwrap()
    }
}

/// All cases run in one test with one API server, because its start takes longer than the cases.
#[test]
fn an_api_server_accepts_each_profile_and_every_step_of_a_release() {
    let world = World::start();
    the_api_server_accepts_each_profile(&world);
    the_notes_name_the_next_steps_and_warn_of_a_missing_policy(&world);
    helm_installs_upgrades_rolls_back_and_uninstalls(&world);
    a_release_takes_over_what_the_manifest_has_installed(&world);
}

fn the_api_server_accepts_each_profile(world: &World) {
    for (profile, arguments) in PROFILES {
        let folder = helm::chart();
        let path = |word: &&str| {
            if word.starts_with("values-") { folder.join(word).display().to_string() } else { (*word).to_owned() }
        };
        let arguments: Vec<String> = arguments.iter().map(path).collect();
        let text = helm::template(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
        let file = world.run.file(&format!("{profile}.yaml"));
        fs::write(&file, &text).unwrap();
        let apply =
            ["apply", "--server-side", "--dry-run=server", "--validate=strict", "--output", "name", "--filename"];
        let accepted = world.cluster.kubectl(&[&apply[..], &[file.to_str().unwrap()]].concat()).unwrap();
        assert_eq!(accepted.lines().count(), parse(&text).len(), "{profile}: {accepted}");
    }
    assert_eq!(world.objects(), "", "a dry run must create nothing");
}

fn helm_installs_upgrades_rolls_back_and_uninstalls(world: &World) {
    let chart = helm::chart();
    let chart = chart.to_str().unwrap();
    let variable = |name: &str| {
        let daemon_set = world.daemon_set().unwrap();
        let env = daemon_set.pointer("/spec/template/spec/containers/0/env").unwrap().as_array().unwrap().clone();
        env.into_iter().find(|it| it["name"] == name).map(|it| it["value"].as_str().unwrap().to_owned())
    };
    world.helm(&["install", "npl", chart]);
    assert_eq!(variable("NPL_DRAIN"), None);
    world.helm(&[
        "upgrade",
        "npl",
        chart,
        "--set",
        "config.drain=1m,metrics.enabled=true,metrics.podMonitor.enabled=true,feed.enabled=true",
    ]);
    assert_eq!(variable("NPL_DRAIN").as_deref(), Some("1m"));
    assert!(world.objects().contains("podmonitor"), "{}", world.objects());
    assert!(world.objects().contains("deployment.apps/npl-feed"), "{}", world.objects());
    world.helm(&["rollback", "npl", "1"]);
    assert_eq!(variable("NPL_DRAIN"), None);
    assert!(!world.objects().contains("podmonitor"), "{}", world.objects());
    assert!(!world.objects().contains("npl-feed"), "{}", world.objects());
    // The uninstall hook is skipped: no controller runs in this test, so the hook's Job would never finish.
    world.helm(&["uninstall", "npl", "--no-hooks"]);
    // Wait, because the API server deletes dependent objects in the background, after Helm has returned.
    poll::until("the objects to be deleted", LIMIT, || world.objects().is_empty().then_some(())).unwrap();
}

/// The change from the manifest to a release keeps the DaemonSet and its running agents.
fn a_release_takes_over_what_the_manifest_has_installed(world: &World) {
    let manifest = tools::repository_file("deploy/npl.yaml");
    world.cluster.kubectl(&["apply", "--filename", manifest.to_str().unwrap()]).unwrap();
    let before = world.daemon_set().unwrap();
    let chart = helm::chart();
    world.helm(&["upgrade", "--install", "npl", chart.to_str().unwrap(), "--take-ownership"]);
    let after = world.daemon_set().unwrap();
    assert_eq!(after["metadata"]["uid"], before["metadata"]["uid"]);
    assert_eq!(after["spec"]["template"], before["spec"]["template"], "a changed template would restart the agents");
    assert_eq!(after["metadata"]["labels"]["app.kubernetes.io/managed-by"], "Helm");
}

fn the_notes_name_the_next_steps_and_warn_of_a_missing_policy(world: &World) {
    let chart = helm::chart();
    let notes = |set: &str| {
        let output = world.helm(&["install", "npl", chart.to_str().unwrap(), "--dry-run=client", "--set", set]);
        output.split_once("NOTES:").unwrap().1.to_owned()
    };
    let usual = notes("config.annotationDomain=example.org");
    for words in [
        "kubectl --namespace npl-system rollout status daemonset/npl-agent",
        "example.org/enabled=true",
        "helm uninstall npl",
    ] {
        assert!(usual.contains(words), "`{words}` is missing from {usual}");
    }
    assert!(!usual.contains("WARNING"), "{usual}");
    let group = "nodeGroups[0].name=edge,nodeGroups[0].nodeLabel.key=k,nodeGroups[0].nodeLabel.values={v}";
    let grouped = notes(group);
    for name in ["npl-agent\n", "npl-agent-edge\n"] {
        assert!(grouped.contains(&format!("rollout status daemonset/{name}")), "{name} is missing from {grouped}");
    }
    assert!(notes("admissionPolicy.enabled=false").contains("WARNING: without the admission policy"));
    assert!(!usual.contains("npl-feed"), "{usual}");
    let feed = notes("feed.enabled=true,feed.service.type=ClusterIP");
    for words in ["rollout status deployment/npl-feed", "npl-feed.npl-system.svc", "kubectl npl members"] {
        assert!(feed.contains(words), "`{words}` is missing from {feed}");
    }
    assert!(feed.contains("WARNING: the feed answers every client"), "{feed}");
    assert!(!notes("feed.enabled=true,feed.tokenSecret.name=a").contains("WARNING"));
    let local = notes("feed.enabled=true,feed.allow={192.0.2.0/24},feed.service.externalTrafficPolicy=Local");
    assert!(local.contains("WARNING: a Node without a replica of the feed does not answer"), "{local}");
    assert!(notes("cleanup.enabled=true").contains("rollout status daemonset/npl-cleanup"));
}
