// SPDX-License-Identifier: Apache-2.0
//! `deploy/npl.yaml` on API servers that restrict what a manifest may create.

use std::fs;

use npl_testkit::cluster::Cluster;
use npl_testkit::control_plane::ControlPlane;
use npl_testkit::poll;
use npl_testkit::run::Run;
use serde_json::{Value, json};

use crate::world::{LIMIT, NODE, manifest};

/// The agent's namespace.
const NPL_SYSTEM: &str = "/api/v1/namespaces/npl-system";

/// GKE and others admit Pods of the two system priorities only in namespaces with a quota for them.
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

/// A control plane whose API server has this admission configuration, with the whole manifest applied.
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
    // No quota controller runs here, so the test writes its part.
    let status = json!({"status": {"hard": hard, "used": {"pods": "0"}}});
    cluster.client().merge_patch(&format!("{quota}/status"), &status).unwrap();
    // The API server learns of quotas and priority classes by watches of its own.
    let mut last = None;
    let admitted = poll::until("the agent's Pod to be admitted", LIMIT, || {
        create_agent_pod(&cluster, "admitted").map_err(|error| last = Some(error)).ok()
    });
    assert!(admitted.is_ok(), "{last:?}");
    // One quota with an unrelated scope would count the Pods of other priorities too.
    let counted = cluster.client().get(&quota).unwrap();
    assert_eq!(counted.pointer("/status/used/pods"), Some(&json!("1")), "{counted}");

    cluster.client().delete(&quota).unwrap();
    let mut number = 0;
    let (refusal, _) = poll::until("a Pod to be refused without the quota", LIMIT, || {
        number += 1;
        create_agent_pod(&cluster, &format!("refused-{number}")).err()
    })
    .unwrap();
    let refusal = format!("{refusal:#}");
    assert!(refusal.contains("insufficient quota to match these scopes"), "{refusal}");
}
